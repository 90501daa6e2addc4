"""The logger ``logging.getLogger("pagedopt")`` of everything that moves bytes or falls back.

Levels are INFO, and WARNING where something else is used than the user asked for.  A step logs nothing.
"""

from __future__ import annotations

import logging

log = logging.getLogger("pagedopt")
log.addHandler(logging.NullHandler())
