"""Which parameters a module reads, recorded from a forward: an optimizer knows parameters, not modules.

A parameter is known by the modules that hold it and its name there.  So a record keeps no parameter alive, and stays
valid if a module gets another one under that name.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...system import internals
from ...system.compare_tensors import identities
from ...system.interrupts import Uninterrupted
from ..step.pending import LOOKS, cannot_be_told, memory_of
from .hooks import is_compiled
from .models import modules_of

#: A module, and the name under which it holds a parameter.
Slot = tuple[weakref.ref[torch.nn.Module], str]
#: Turns of parameters that no attached model holds, and of those that no record has seen.
OUTSIDE, UNRECORDED = -2, -1
_NEVER = sys.maxsize
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
        changes: counts them; while it is the same, so is the record.
    """

    def __init__(self) -> None:
        # By module: the values of `training` that it was recorded with; parameters that it reads beside its own; and
        # by name of its own, the position in the order in which parameters were first used.
        self._training: weakref.WeakKeyDictionary[torch.nn.Module, set[bool]] = weakref.WeakKeyDictionary()
        self._reads: weakref.WeakKeyDictionary[torch.nn.Module, set[Slot]] = weakref.WeakKeyDictionary()
        self._turns: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
        self._reads_any: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._count = self.changes = 0

    def knows(self, module: torch.nn.Module) -> bool:
        """Return whether a call of a module, as it is set, has been recorded from its beginning to its end."""
        return module.training in self._training.get(module, ())

    def forget(self) -> None:
        """Know no module any more: each is to be recorded anew."""
        self.changes += 1
        self._training.clear()
        self._reads_any.clear()

    def read_by(self, module: torch.nn.Module) -> Iterator[torch.Tensor | None]:
        """Yield the parameters that a module reads and does not own."""
        for ref, name in tuple(self._reads.get(module, ())):
            if (owner := ref()) is not None:
                yield owner._parameters.get(name)
        if module in self._reads_any:
            for each in self._turns.keyrefs():
                if (owner := each()) is not None:
                    yield from tuple(owner._parameters.values())

    def reads_others(self, module: torch.nn.Module) -> bool:
        """Return whether a module reads parameters that it does not own."""
        return bool(self._reads.get(module)) or module in self._reads_any

    def first_uses(self, modules: Iterable[torch.nn.Module]) -> dict[int, int]:
        """Return, by id of each parameter that modules hold, when it was first used, or UNRECORDED."""
        found: dict[int, int] = {}
        for module in modules:
            if module._parameters:
                seen = self._turns.get(module, {})
                for name, p in module._parameters.items():
                    if p is not None:
                        found[id(p)] = min(found.get(id(p), _NEVER), seen.get(name, _NEVER))
        return {key: UNRECORDED if turn == _NEVER else turn for key, turn in found.items()}

    def enter(self, module: torch.nn.Module) -> None:
        """Note that a module is called."""
        for each in modules_of([module]) if is_compiled(module) else (module,):
            for name, p in each._parameters.items():
                if p is not None:
                    self._use(each, name)

    def ended(self, module: torch.nn.Module) -> None:
        """Note that the call of a module has ended well."""
        self.changes += 1
        self._training.setdefault(module, set()).add(module.training)

    def note(self, module: torch.nn.Module, slots: Iterable[Slot]) -> None:
        """Note that a module itself reads the parameters in these slots; no module inside of it does."""
        for slot in slots:
            owner = slot[0]()
            if owner is not None:
                self._use(owner, slot[1])
                if owner is not module:
                    self.changes += 1
                    self._reads.setdefault(module, set()).add(slot)

    def note_any(self, module: torch.nn.Module) -> None:
        """Note that a module is given a tensor whose memory cannot be told, and so may read any parameter."""
        self.changes += 1
        self._reads_any.add(module)

    def _use(self, module: torch.nn.Module, name: str) -> None:
        turns = self._turns.setdefault(module, {})
        if name not in turns:
            self.changes += 1
            turns[name] = self._count
            self._count += 1


class Turns:
    """When the pages of each parameter pass, by a record; asked in each step, it looks again only if something is new.

    Args:
        record: of the models.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._known: tuple[tuple[int, bytes] | None, list[int]] = None, []  # what was asked, and found

    def turns(self, modules: Sequence[torch.nn.Module], params: Sequence[torch.Tensor]) -> list[int]:
        """Return the turn of each parameter: OUTSIDE if no module holds it, UNRECORDED if its first use was not seen.

        Args:
            modules: all that the models have now.
            params: those of the optimizer.
        """
        held = [(module, of) for module in modules if (of := module._parameters)]
        slots = chain.from_iterable((module, *of.keys(), *of.values()) for module, of in held)
        asked = self._record.changes, identities((*slots, *params))
        before, found = self._known
        if asked != before:
            uses = self._record.first_uses(modules)
            found = [uses.get(id(p), OUTSIDE) for p in params]
            self._known = asked, found
        return found


class Recorder(TorchFunctionMode):
    """Finds the parameters, or views of them, that are passed to functions of torch in one call of a module.

    Args:
        models: who may hold parameters.
        frame: lasts as long as the call.
        note: called with the slots of a parameter; with None if the memory of a tensor cannot be told.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module], frame: FrameType, note: Callable[[list[Slot] | None], object]
    ) -> None:
        super().__init__()
        self.frame, self._note = frame, note
        self._by_memory: dict[int, list[Slot]] = {}
        for module in modules_of(models):
            ref = weakref.ref(module)
            for name, p in module._parameters.items():
                if p is not None and (memory := memory_of(p)) is not None:
                    self._by_memory.setdefault(memory, []).append((ref, name))

    def start(self) -> None:
        """Put this on torch's stack of modes."""
        internals.push_function_mode(self)

    def stop(self) -> None:
        """Take this off torch's stack of modes, wherever it is there."""
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
            memory = memory_of(tensor)
            if memory is not None:
                if slots := self._by_memory.get(memory):
                    self._note(slots)
            elif cannot_be_told(tensor):
                self._note(None)
        return func(*args, **(kwargs or {}))


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
