"""Which parameters a module reads, recorded from a forward: an optimizer knows parameters, not modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..step.queued import memory_of
from .hooks import is_compiled

Parameters = list[torch.Tensor]
#: Attributes that say nothing of a tensor's values.
_ABOUT = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse",
        "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape",
    )
)  # fmt: skip


class Record:
    """What recorded forwards have shown.

    Attributes:
        first_use: by id of a parameter, its place in the order in which parameters were first used.
    """

    def __init__(self) -> None:
        # By module: the values of `training` that it was recorded with, and parameters that it reads beside its own.
        self._training: weakref.WeakKeyDictionary[torch.nn.Module, set[bool]] = weakref.WeakKeyDictionary()
        self._reads: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()
        self.first_use: dict[int, int] = {}

    def knows(self, module: torch.nn.Module) -> bool:
        """Return whether a call of a module, as it is set, has been recorded."""
        return module.training in self._training.get(module, ())

    def read_by(self, module: torch.nn.Module) -> Iterable[torch.Tensor]:
        """Return the parameters that a module reads and does not own."""
        return self._reads.get(module, {}).values()

    def enter(self, module: torch.nn.Module) -> None:
        """Note that a module is called."""
        self._training.setdefault(module, set()).add(module.training)
        for p in module.parameters(recurse=is_compiled(module)):
            self._use(p)

    def note(self, module: torch.nn.Module, p: torch.Tensor) -> None:
        """Note that a module, and none inside of it, reads a parameter."""
        self._use(p)
        if all(p is not own for own in module._parameters.values()):
            self._reads.setdefault(module, {})[id(p)] = p

    def _use(self, p: torch.Tensor) -> None:
        self.first_use.setdefault(id(p), len(self.first_use))


class Recorder(TorchFunctionMode):
    """Calls ``note`` with each parameter that an operator or a function of torch is given, or a view of one.

    Args:
        params: those of the optimizer.
        note: called in the thread that made this.
    """

    def __init__(self, params: Iterable[torch.Tensor], note: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self._note = note
        self._by_memory: dict[int, Parameters] = {}
        for p in params:
            if (memory := memory_of(p)) is not None:
                self._by_memory.setdefault(memory, []).append(p)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is read, and go on."""
        for tensor in tensors_in((args, kwargs)) if func not in _ABOUT else ():
            memory = memory_of(tensor)
            for p in self._by_memory.get(memory, ()) if memory is not None else ():
                self._note(p)
        return func(*args, **(kwargs or {}))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
