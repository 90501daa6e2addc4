"""Finds lines that read or write a parameter whose update is queued, and have not waited for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...system.warn import INSIDE
from .overlap import Overlap
from .record import tensors_in


class Watch(TorchDispatchMode):
    """See :meth:`~pagedopt.PagedOptimizer.watch_reads`.

    Each operator of torch is looked at before it runs.  What counts is which fences were passed, not the time: if the
    update has long been done, a line that did not wait for it is found all the same.
    """

    def __init__(self, overlap: Overlap) -> None:
        super().__init__()
        self._overlap = overlap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise RuntimeError, or go on."""
        queued, kwargs = self._overlap.queued, kwargs or {}
        if queued is not None and queued.passed < queued.total and not _reads_nothing(func):
            written = [*_written(func, args, kwargs)]
            for tensor in tensors_in((args, kwargs)):
                does = "writes" if any(tensor is each for each in written) else "reads"
                if queued.is_pending(tensor):
                    _raise(f"{does} {self._overlap.name_of(tensor)}", func, "is still to be updated")
                elif does == "writes" and queued.reads_gradient(tensor):
                    _raise("writes a gradient", func, "is still to be read by an update")
        return func(*args, **kwargs)


def _raise(does: str, func: Any, why: str) -> NoReturn:
    raise RuntimeError(f"{_line_of_user()} {does} ({func}), which {why}: call optimizer.wait() before")


@functools.cache
def _reads_nothing(func: Any) -> bool:
    """Return whether an operator makes another view of its tensor, as ``detach``, or new values of its shape."""
    schema = func._schema
    if schema.name.endswith("_like") or schema.name.startswith("aten::new_"):
        return True
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in schema.arguments)
    return not writes and any(each.alias_info is not None for each in schema.returns)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def _line_of_user() -> str:
    """Return ``file:line`` of the first caller outside of torch, this package and Python's library."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        if top not in INSIDE and (top not in sys.stdlib_module_names or top == "__main__"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
