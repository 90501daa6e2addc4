"""The error that a command reports as one line instead of a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """A request that cannot be met. The message names the value, the limit and what to do instead."""
