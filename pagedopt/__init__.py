"""pagedopt: fused, paged optimizers over pointer lists in unified memory.

Names are imported when first used, so that ``import pagedopt`` is cheap. CuPy and Numba are imported by the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.names import attach
from .optim.foreign_options import NAMES, NO_RULES
from .optim.registry import OPTIMIZERS

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .foreach_ops import *  # noqa: F403
    from .formats.choice import Moment as Moment
    from .launch.apply import DeviceTable as DeviceTable
    from .launch.apply import multi_tensor_apply as multi_tensor_apply
    from .launch.sweep import Sweep as Sweep
    from .optim import *  # noqa: F403
    from .optim.average import ema as ema
    from .optim.options import Options as Options
    from .planning.estimate import Estimate as Estimate
    from .planning.estimate import estimate as estimate
    from .planning.rates import Rates as Rates
    from .rules import Rule as Rule
    from .rules import RuleError as RuleError
    from .rules import compose as compose
    from .rules import rule as rule
    from .tables.pointers import PointerTable as PointerTable

_MODULES = {
    ".launch.sweep": ("Sweep",),
    ".launch.apply": ("DeviceTable", "multi_tensor_apply"),

    ".planning.estimate": ("Estimate", "estimate"),
    ".optim": ("MemoryReport", "PagedOptimizer", "run_with_room", *(entry.name for entry in OPTIMIZERS)),
    ".optim.average": ("ema",),
    ".optim.options": ("Options",),
    ".formats.choice": ("Moment",),
    ".tables.pointers": ("PointerTable",),
    ".planning.rates": ("Rates",),
    ".rules": ("Rule", "RuleError", "compose", "rule"),
}  # fmt: skip
#: Found here, too, and not listed: they have a module of their own.
_UNLISTED = {".foreach_ops": (
    "foreach_add", "foreach_add_", "foreach_addcdiv", "foreach_addcdiv_", "foreach_addcmul", "foreach_addcmul_",
    "foreach_lerp", "foreach_lerp_", "foreach_mul", "foreach_mul_", "foreach_norm", "foreach_sqrt", "foreach_sqrt_",
)}  # fmt: skip
#: What is gone, and what to do instead.
_GONE = {"shadow": "run examples/beside_torch.py of the repository, with your own model and options in it"}
if not TYPE_CHECKING:  # with a module-level __getattr__, a type checker would accept any name
    __getattr__, __dir__, __all__ = attach(__name__, _MODULES, NAMES | NO_RULES | _GONE, _UNLISTED)
