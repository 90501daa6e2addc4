"""Where the calls of modules wait, as earlier forwards have shown it: looking for it anew costs ten times as much."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any, NamedTuple

import torch

from .record import Record


class Stop(NamedTuple):
    """What is known of the calls of one module.

    Attributes:
        module: the module.
        training: its mode.
        addresses: of its parameters, in their order; None for those that it lacks.
        launches: of the queued step, how many must have begun before it runs; None: no step was queued.
        depth: how many frames lie between the caller of :meth:`Stops.of` and the call of the outermost module.
    """

    module: weakref.ref[torch.nn.Module]
    training: bool
    addresses: list[int | None]
    launches: int | None
    depth: int


class Stops:
    """Where the calls of modules wait, while :meth:`keep_for` is told the same.

    A parameter is known by its address.  Memory that is to be updated is kept alive; so what lies at the address of a
    parameter is that parameter, or a view of it.
    """

    def __init__(self) -> None:
        self._of: dict[int, Stop] = {}
        self._made_for: tuple[object, ...] = ()

    def keep_for(self, *made_for: object) -> None:
        """Forget all, unless these are what the last call was told."""
        if made_for != self._made_for:
            self._of, self._made_for = {}, made_for

    def of(self, module: torch.nn.Module, outermost: FrameType) -> Stop | None:
        """Return what is known of a module that is called within the outermost call; None if that is not so.

        Args:
            module: the module.
            outermost: the frame of the outermost call.
        """
        stop = self._of.get(id(module))
        if stop is None or stop.module() is not module or stop.training is not module.training:
            return None
        try:
            return stop if sys._getframe(stop.depth) is outermost else None
        except ValueError:  # the stack is not so deep
            return None

    def note(self, module: torch.nn.Module, record: Record, launches: int | None, outermost: FrameType) -> None:
        """Note where the calls of a module wait, if it reads no parameters but its own.

        Args:
            module: the module.
            record: knows it.
            launches: see :class:`Stop`.
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
        self._of[id(module)] = Stop(weakref.ref(module), module.training, addresses, launches, depth)


def addresses_in(module: torch.nn.Module) -> list[Any] | None:
    """Return the addresses of a module's own parameters; None if one has no memory that can be told."""
    try:
        return [None if p is None else p.data_ptr() for p in module._parameters.values()]
    except (RuntimeError, NotImplementedError, ValueError):  # fake, functional, sparse, not initialized
        return None
