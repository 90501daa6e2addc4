"""What a command raises instead of a traceback."""

from __future__ import annotations


class UsageError(Exception):
    """What was asked for cannot be done; the message names the value, the limit and what to do instead."""
