"""The logger of everything that moves bytes or falls back: ``logging.getLogger("pagedopt")``.  Nothing in a step's
path says anything; what is said is INFO, or WARNING where something else is used than was asked for."""

from __future__ import annotations

import logging

log = logging.getLogger("pagedopt")
log.addHandler(logging.NullHandler())

__all__ = ["log"]
