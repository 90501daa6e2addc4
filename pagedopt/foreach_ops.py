"""torch's ``_foreach_*`` functions over one pointer table: 12 elementwise ones in a launch each, and the norm in two.

Example:
    >>> from pagedopt.foreach_ops import foreach_add_
    >>> foreach_add_(params, grads, alpha=-0.1)
"""

from __future__ import annotations

from .launch import foreach
from .launch.foreach import *  # noqa: F403
from .launch.norm import foreach_norm as foreach_norm

__all__ = ["foreach_norm"]
__all__ += foreach.__all__
