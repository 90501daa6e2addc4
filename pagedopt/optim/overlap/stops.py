"""Where the calls of modules wait, as earlier forwards have shown it: looking for it anew costs five times as much."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import NamedTuple

import torch

from ..step.pending import LastLaunches, addresses_in
from .record import Record


class Stop(NamedTuple):
    """What is known of the calls of one module.

    Attributes:
        module: the module.
        training: its mode.
        addresses: of its parameters, in their order.
        launches: of a queued step, how many must have begun before it runs.
        last: the launches of that step, and of others that share them; None: no step was queued.
        depth: how many frames lie between the caller of :meth:`Stops.of` and the call of the outermost module.
    """

    module: weakref.ref[torch.nn.Module]
    training: bool
    addresses: list[int]
    launches: int
    last: LastLaunches | None
    depth: int


class Stops:
    """Where the calls of modules wait, while a record stays as it is.

    A parameter is known by its address.  Memory that is to be updated is kept alive; so what lies at the address of a
    parameter is that parameter, or a view of it.
    """

    def __init__(self) -> None:
        self._of: dict[int, Stop] = {}
        self._changes = -1

    def keep_for(self, record: Record) -> None:
        """Forget all, if a record has changed since the last call."""
        if record.changes != self._changes:
            self._of, self._changes = {}, record.changes

    def of(self, module: torch.nn.Module, outermost: FrameType) -> Stop | None:
        """Return what is known of a module that is called within the outermost call; None if that is not so.

        Args:
            module: the module.
            outermost: the frame of the outermost call.
        """
        stop = self._of.get(id(module))
        if stop is None or stop.module() is not module or stop.training is not module.training:
            return None
        if module._compiled_call_impl is not None:  # since then: its call is one of all modules within
            return None
        try:
            return stop if sys._getframe(stop.depth) is outermost else None
        except ValueError:  # the stack is not so deep
            return None

    def note(
        self,
        module: torch.nn.Module,
        record: Record,
        launches: int,
        last: LastLaunches | None,
        outermost: FrameType,
    ) -> None:
        """Note where the calls of a module wait, if it reads no parameters but its own.

        Args:
            module: the module.
            record: knows it.
            launches, last: see :class:`Stop`.
            outermost: the frame of the outermost call.
        """
        addresses = addresses_in(module)
        if addresses is None or record.reads_others(module):
            return
        depth, frame = 0, sys._getframe()
        while frame is not outermost:
            if frame.f_back is None:
                return
            depth, frame = depth + 1, frame.f_back
        self._of[id(module)] = Stop(weakref.ref(module), module.training, addresses, launches, last, depth)
