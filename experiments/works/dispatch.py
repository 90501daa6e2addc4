"""Operators counted where torch dispatches them, a CPU's counterpart of launches; and the bytes of their operands.

    dispatched(optimizer.step).total()
    operands(optimizer.step)

Views, markers of the profiler and reads of a single number start no kernel and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: They start no kernel, or wait for one.
UNCOUNTED = (
    "profiler::", "aten::_local_scalar_dense", "aten::empty", "aten::new_empty", "aten::set_", "prim::",
    "aten::_unsafe_view",  # a view that does not say so; F.linear of torch 2.15 dispatches it
)  # fmt: skip
#: What they write they do not read.
OVERWRITE = ("aten::copy_", "aten::fill_", "aten::zero_")


class Dispatched(TorchDispatchMode):
    """Counts while it is entered: operators, and bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it."""
        name, returns = func._schema.name, func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not (is_view or name.startswith(UNCOUNTED)):
            self.by_name[name] += 1
        result = func(*args, **(kwargs or {}))
        if not (is_view or name.startswith(UNCOUNTED)):
            self.bytes += moved(func._schema, args, kwargs or {}, result)
        return result


def moved(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of what an operator reads and of what it writes; in place is both, and an operand given twice is one."""
    read: dict[Any, int] = {}
    written: dict[Any, int] = {}
    overwrites = schema.name.startswith(OVERWRITE)
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        # The fused step writes gradients only if it is to divide them by a scale.
        changed = changed and not (argument.name == "grads" and kwargs.get("grad_scale") is None)
        if changed:
            written |= sizes(value)
        if not (changed and (argument.is_out or overwrites)):
            read |= sizes(value)
    return sum(read.values()) + sum((written | sizes(result)).values())


def sizes(value: Any) -> dict[Any, int]:
    """Bytes of a tensor, or of those in a list, by where they lie; what is spread out is as large as its memory."""
    tensors = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
    return {(t.data_ptr(), t.numel()): min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors}


def dispatched(run: Callable[[], object]) -> Counter[str]:
    """How often one call dispatches each operator ("aten::mul_")."""
    with Dispatched() as found:
        run()
    return found.by_name


def operands(run: Callable[[], object]) -> int:
    """Bytes that the operators of one call read and write, if each takes its operands from memory and puts them there.

    What runs beside torch's dispatcher is not seen, such as a kernel of one's own.
    """
    with Dispatched() as found:
        run()
    return found.bytes
