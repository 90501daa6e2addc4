"""Operators counted where torch dispatches them, with the bytes they read and write: a CPU's counterpart of launches.

    counts = dispatched(optimizer.step)
    counts.operators, counts.bytes_read, counts.bytes_written

Views, markers of the profiler and reads of a single number start no kernel and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

#: They start no kernel, or wait for one.
UNCOUNTED = (
    "profiler::", "aten::_local_scalar_dense", "aten::empty", "aten::new_empty", "aten::set_", "prim::",
    "aten::_unsafe_view",  # a view that does not say so; F.linear of torch 2.15 dispatches it
)  # fmt: skip
#: They write over what they get without reading it.
OVERWRITING = ("copy", "fill", "zero", "normal", "uniform", "random", "bernoulli", "exponential")


@dataclass
class Dispatched:
    """What was dispatched.

    Attributes:
        by_name: how often each operator was called ("aten::mul_").
        bytes_read, bytes_written: of its arguments and results, each of one call once.
    """

    by_name: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def operators(self) -> int:
        """Calls of all operators."""
        return self.by_name.total()

    def as_dict(self) -> dict[str, int]:
        """Columns of a row."""
        return {"operators": self.operators, "bytes_read": self.bytes_read, "bytes_written": self.bytes_written}


class DispatchCounter(TorchDispatchMode):
    """Counts while it is entered; what it found is in ``found``."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Dispatched()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if not name.startswith(UNCOUNTED) and not is_view(func._schema):
            self.found.by_name[name] += 1
            read, written = touched(func._schema, args, kwargs, result)
            self.found.bytes_read += read
            self.found.bytes_written += written
        return result


def is_view(schema: Any) -> bool:
    """Whether what it returns is an argument's memory that it did not write."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def touched(schema: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Bytes that a call reads and writes: what it changes in place is both."""
    overwrites = schema.name.partition("::")[2].strip("_").removeprefix("foreach_").startswith(OVERWRITING)
    read: list[Any] = []
    written: list[Any] = [result]
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        # torch's fused steps say that they write gradients; they do where they unscale them.
        changed = changed and not (argument.name == "grads" and kwargs.get("grad_scale") is None)
        if changed:
            written.append(value)
        if not (changed and (overwrites or argument.is_out)):
            read.append(value)
    return total(read), total(written)


def total(values: Iterable[Any]) -> int:
    """Bytes of all tensors in lists of them, each place in memory once."""
    return sum({(t.data_ptr(), n): n for t in _tensors(values) if (n := t.numel() * t.element_size())}.values())


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in tree_iter(list(values)):
        if isinstance(value, torch.Tensor):
            yield value


def dispatched(run: Callable[[], object]) -> Dispatched:
    """What one call dispatches."""
    with DispatchCounter() as counter:
        run()
    return counter.found
