"""The error of a move that lost state."""

from __future__ import annotations


class StateLost(RuntimeError):
    """State could neither be moved nor brought back to where it was."""


def lost_in_move(nbytes: int, reason: object) -> StateLost:
    """Return the error for ``nbytes`` of state that a move has lost."""
    return StateLost(
        f"{nbytes:,} bytes of optimizer state were neither moved nor left where they were ({reason}); load a checkpoint"
    )
