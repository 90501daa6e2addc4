"""What modules read, recorded from one call of a model: an optimizer knows parameters, not modules.

A parameter is known by the module that holds it and its name there.  So what is recorded keeps no parameter alive, and
stays valid if the module gets another one under that name.

If a forward raises, torch runs no hooks of inner modules; after KeyboardInterrupt, none at all.  So each call is stored
with a frame that lasts as long as the call: if the frame is not on the stack, the call has ended.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...system import internals
from ...system.interrupts import Uninterrupted
from ..pending import LOOKS, cannot_be_told, memory_of
from .models import is_compiled, modules_of

#: A module, and the name under which it holds a parameter.
Slot = tuple[weakref.ref[torch.nn.Module], str]
#: Attributes that say nothing of a tensor's values.
_ABOUT = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_sparse",
        "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape",
    )
)  # fmt: skip


def is_running(call: FrameType) -> bool:
    """Return whether a frame is on the stack of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


class Recorder(TorchFunctionMode):
    """Finds the parameters, or views of them, that modules pass to functions of torch, in one call of a model.

    Args:
        modules: who may hold parameters.
        model: what is called.
        frame: lasts as long as the call.

    Attributes:
        order: slots of parameters, in the order of their first use.
        reads: by module, the slots that it reads and does not own; all, if the memory of a tensor cannot be told.
        ended: modules of which a call has ended well.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], model: torch.nn.Module, frame: FrameType) -> None:
        super().__init__()
        self.order: dict[Slot, None] = {}
        self.reads: dict[torch.nn.Module, set[Slot]] = {}
        self.ended: set[torch.nn.Module] = set()
        self._calls: list[tuple[torch.nn.Module, FrameType]] = []
        self._modules, self._ends = modules, list[Any]()
        self._by_memory: dict[int | None, list[Slot]] = {}
        for slot, p in slots_of(modules):
            self._by_memory.setdefault(memory_of(p), []).append(slot)
        self.enter(model, frame)

    def enter(self, module: torch.nn.Module, frame: FrameType) -> None:
        """A module is called, in a frame."""
        self._calls.append((module, frame))
        self.reads.setdefault(module, set())
        called = modules_of([module]) if is_compiled(module) else [module]
        self.order.update((slot, None) for slot, _ in slots_of(called))

    def leave(self, module: torch.nn.Module, whole: bool) -> None:
        """The call of a module has ended, and all within it; ``whole`` unless it has raised."""
        if any(each is module for each, _ in self._calls):
            while self._calls.pop()[0] is not module:
                pass
            if whole:
                self.ended.add(module)

    def start(self, leave: Any) -> None:
        """Put this on torch's stack of modes, and a hook behind modules that lack it."""
        self._ends += [m.register_forward_hook(leave) for m in self._modules if leave not in m._forward_hooks.values()]
        internals.push_function_mode(self)

    def stop(self) -> None:
        """Undo :meth:`start`, wherever on torch's stack of modes this is."""
        for handle in self._ends:
            handle.remove()
        with Uninterrupted():
            if any(mode is self for mode in internals.function_modes()):
                above = []
                while (mode := internals.pop_function_mode()) is not self:
                    above.append(mode)
                for mode in reversed(above):
                    internals.push_function_mode(mode)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is read, and go on.  In code of a compiler nothing is noted."""
        if internals.dynamo_is_at_work():
            return func(*args, **(kwargs or {}))
        if sys._getframe(1).f_code in _LOOKS:
            return _pass_on(func, args, kwargs or {})
        for tensor in tensors_in((args, kwargs)) if func not in _ABOUT else ():
            if cannot_be_told(tensor):
                self._note([slot for slots in self._by_memory.values() for slot in slots])
            elif (memory := memory_of(tensor)) is not None and memory in self._by_memory:
                self._note(self._by_memory[memory])
        return func(*args, **(kwargs or {}))

    def _note(self, slots: Iterable[Slot]) -> None:
        """Note that the innermost module reads the parameters in these slots."""
        while self._calls and not is_running(self._calls[-1][1]):
            self._calls.pop()  # it has raised, and its caller goes on
        if self._calls:
            module, _ = self._calls[-1]
            self.order.update(dict.fromkeys(slots))
            self.reads[module].update(slot for slot in slots if slot[0]() is not module)


def slots_of(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yield the slots of modules' own parameters, each with the parameter."""
    for module in modules:
        yield from (((weakref.ref(module), name), p) for name, p in module._parameters.items() if p is not None)


def _pass_on(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with which a recorder looks at a tensor."""
    return func(*args, **kwargs)


#: Code that looks at tensors for recorders.  Each optimizer has a recorder; if they recorded each other's looks, every
#: further one would double the calls.
_LOOKS = frozenset(look.__code__ for look in (*LOOKS, _pass_on))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
