"""Errors of ours that callers tell apart."""

from __future__ import annotations


class StateLost(RuntimeError):
    """State could neither be moved nor brought back to where it was."""


__all__ = ["StateLost"]
