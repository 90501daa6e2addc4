"""Operators counted where torch dispatches them: a CPU's counterpart of launches.

    dispatched(optimizer.step).total()

Views, markers of the profiler and reads of a single number start no kernel and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: They start no kernel, or wait for one.
UNCOUNTED = (
    "profiler::", "aten::_local_scalar_dense", "aten::empty", "aten::new_empty", "aten::set_", "prim::",
    "aten::_unsafe_view",  # a view that does not say so; F.linear of torch 2.15 dispatches it
)  # fmt: skip


class Dispatched(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it."""
        name, returns = func._schema.name, func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not (is_view or name.startswith(UNCOUNTED)):
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))


def dispatched(run: Callable[[], object]) -> Counter[str]:
    """How often one call dispatches each operator ("aten::mul_")."""
    with Dispatched() as found:
        run()
    return found.by_name
