"""Damage: part of the state belongs to another step than the rest.  One protocol for all that writes state."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from .rule_optimizer import RuleOptimizer


class whole:
    """A ``with`` block that writes state: it is carried out, or changes nothing, or leaves the optimizer damaged.

    The damage is noted first and taken back last, so an interrupt that nothing can stop leaves the note.

    Args:
        optimizer: whose state is written.
        what: the block, for the text, as "a step".
        begun: whether part of the state is new already; asked if the block fails.
    """

    __slots__ = ("_before", "_begun", "_optimizer", "_what")

    def __init__(self, optimizer: RuleOptimizer, what: str, begun: Callable[[], bool]) -> None:
        self._optimizer, self._what, self._begun = optimizer, what, begun

    def __enter__(self) -> None:
        self._before = self._optimizer.damaged
        self._optimizer.damaged = f"{self._what} ended in the middle"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._begun():
            self._optimizer.damaged = f"{self._what} failed in the middle ({type(error).__name__}: {error})"
        else:
            self._optimizer.damaged = self._before


def check_whole(optimizer: RuleOptimizer) -> None:
    """Raise RuntimeError if state is damaged."""
    if optimizer.damaged:
        raise RuntimeError(
            f"the state of this {type(optimizer).__name__} is damaged: {optimizer.damaged}. Some of it belongs to a "
            "step that the rest does not know; load_state_dict() of a checkpoint mends it (load the model's, too)"
        )
