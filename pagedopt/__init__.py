"""pagedopt: fused, paged optimizers over pointer lists in unified memory.

Names are loaded when first used, so that ``import pagedopt`` costs little; CuPy and Numba wait for the first step.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "PagedAdamW": "optim",
    "PagedSGD": "optim",
    "PagedOptimizer": "optim",
    "rule": "rules",
    "Rule": "rules",
    "multi_tensor_apply": "apply",
    "Sweep": "apply",
    "PointerTable": "pointers",
    "DeviceTable": "device_table",
    "foreach_add": "foreach",
    "foreach_add_": "foreach",
    "foreach_mul": "foreach",
    "foreach_mul_": "foreach",
    "foreach_lerp": "foreach",
    "foreach_lerp_": "foreach",
    "foreach_addcmul": "foreach",
    "foreach_addcmul_": "foreach",
    "foreach_addcdiv": "foreach",
    "foreach_addcdiv_": "foreach",
    "foreach_sqrt": "foreach",
    "foreach_sqrt_": "foreach",
    "foreach_norm": "norm",
}
__all__ = ["__version__", *_NAMES]

if TYPE_CHECKING:
    from .apply import Sweep, multi_tensor_apply
    from .device_table import DeviceTable
    from .foreach import (
        foreach_add, foreach_add_, foreach_addcdiv, foreach_addcdiv_, foreach_addcmul, foreach_addcmul_, foreach_lerp,
        foreach_lerp_, foreach_mul, foreach_mul_, foreach_sqrt, foreach_sqrt_,
    )  # fmt: skip
    from .norm import foreach_norm
    from .optim import PagedAdamW, PagedOptimizer, PagedSGD
    from .pointers import PointerTable
    from .rules import Rule, rule


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'pagedopt' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
