"""pagedopt: fused, paged optimizers over pointer lists in unified memory.

Names are loaded when first used, so that ``import pagedopt`` costs little; CuPy and Numba wait for the first step.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "launch.sweep": ("Sweep", "multi_tensor_apply"),
    "launch.device_table": ("DeviceTable",),
    "planning.estimate": ("Estimate", "estimate"),
    "launch.foreach": (
        "foreach_add", "foreach_add_", "foreach_addcdiv", "foreach_addcdiv_", "foreach_addcmul", "foreach_addcmul_",
        "foreach_lerp", "foreach_lerp_", "foreach_mul", "foreach_mul_", "foreach_sqrt", "foreach_sqrt_",
    ),
    "launch.norm": ("foreach_norm",),
    "optim": ("MemoryReport", "PagedAdamW", "PagedOptimizer", "PagedSGD", "run_with_room"),
    "tables.pointers": ("PointerTable",),
    "planning.rates": ("Rates",),
    "rules": ("Rule", "RuleError", "rule"),
}  # fmt: skip
_NAMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *_NAMES]

if TYPE_CHECKING:
    from .launch.device_table import DeviceTable as DeviceTable
    from .launch.foreach import *  # noqa: F403
    from .launch.norm import foreach_norm as foreach_norm
    from .launch.sweep import Sweep as Sweep
    from .launch.sweep import multi_tensor_apply as multi_tensor_apply
    from .optim import MemoryReport as MemoryReport
    from .optim import PagedAdamW as PagedAdamW
    from .optim import PagedOptimizer as PagedOptimizer
    from .optim import PagedSGD as PagedSGD
    from .optim import run_with_room as run_with_room
    from .planning.estimate import Estimate as Estimate
    from .planning.estimate import estimate as estimate
    from .planning.rates import Rates as Rates
    from .rules import Rule as Rule
    from .rules import RuleError as RuleError
    from .rules import rule as rule
    from .tables.pointers import PointerTable as PointerTable


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'pagedopt' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
