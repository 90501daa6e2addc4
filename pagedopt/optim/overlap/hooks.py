"""Hooks of modules that call overlaps back, and vanish with them; copies of a module have dead ones."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling


class _NoScript(AttributeError):
    """Stands for a hook in ``torch.jit.script``."""


class Hook:
    """Calls a method of an :class:`~.overlap.Overlap` that is alive; does nothing else."""

    __slots__ = ("_overlap",)

    def __init__(self, overlap: Any = None) -> None:
        #: Returns the overlap, if it is alive.
        self._overlap: Callable[[], Any] = (lambda: None) if overlap is None else weakref.ref(overlap)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self.__reduce__()[0]()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        if (overlap := self._overlap()) is not None:
            overlap.refuse_copy()
        return type(self), ()

    @property
    def __name__(self) -> str:
        raise _NoScript(
            "torch.jit.script would leave out the waits of overlap='forward': call optimizer.detach() first"
        )


class Enter(Hook):
    """Before the forward of a module within an attached model."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if is_dynamo_compiling():
            tell_compiled()
        elif (overlap := self._overlap()) is not None:
            overlap.enter(module)


class Begin(Enter):
    """Before the forward of an attached model."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if is_dynamo_compiling():
            tell_compiled()
        elif (overlap := self._overlap()) is not None:
            overlap.begin(module, sys._getframe(1))


class Leave(Hook):
    """Behind a forward; behind that of an attached model, also if it has raised."""

    def __call__(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not is_dynamo_compiling() and (overlap := self._overlap()) is not None:
            overlap.leave(module, sys._getframe(1), whole=result is not None or sys.exc_info()[0] is None)


class Fence(Hook):
    """Before a state dict reads parameters; called with whatever arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if (overlap := self._overlap()) is not None:
            overlap.wait()
            overlap.tell_misuse()


class Load(Hook):
    """Before parameters are loaded, which replaces what may have been misused; called with whatever arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if (overlap := self._overlap()) is not None:
            overlap.wait()


#: In models that were pickled by pagedopt 0.1.0.
Raised = Leave


class Compiled:
    """Replaces the callable that ``module.compile()`` has made: a call of that runs no hook of the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, whole = self.module(), False
        found = [] if module is None else hooks_before(module)
        try:
            for hook in found:
                hook(module, args)
            result = self.call(*args, **kwargs)
            whole = True
            return result
        finally:
            for hook in found:
                if (overlap := hook._overlap()) is not None:
                    overlap.leave(module, sys._getframe(), whole)


def hooks_before(module: torch.nn.Module) -> list[Any]:
    """Return the hooks of overlaps that run before a module's forward."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Enter)]


def wrap_compiled(modules: Iterable[torch.nn.Module]) -> None:
    """Let calls of compiled modules run hooks of overlaps, too."""
    for module in modules:
        if module._compiled_call_impl is not None and not isinstance(module._compiled_call_impl, Compiled):
            module._compiled_call_impl = Compiled(module)


def unwrap_compiled(module: torch.nn.Module) -> None:
    """Undo :func:`wrap_compiled`, if no such hook is left."""
    if isinstance(made := module._compiled_call_impl, Compiled) and not hooks_before(module):
        module._compiled_call_impl = made.call


#: All overlaps.
known: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def let_apply_wait() -> None:
    """Replace, once a process, ``torch.nn.Module._apply``, which ``to()``, ``half()`` and ``share_memory()`` call.

    Not in single modules: a copy of a module would call that of the original.
    """
    apply = torch.nn.Module._apply

    @functools.wraps(apply)
    def waits(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for overlap in list(known):
            own = (p for p in module._parameters.values() if p is not None)
            if (queued := overlap.queued) is not None and any(map(queued.is_pending, own)):
                overlap.wait()
        return apply(module, *args, **kwargs)

    torch.nn.Module._apply = waits  # type: ignore[method-assign, assignment]


def _tell(_: Any) -> None:  # all of them: here it is not known whose module is traced
    for overlap in list(known):
        overlap.traced()


def tell_compiled() -> None:
    """Tell all overlaps, while Dynamo traces the caller and not when its code runs, that a compiler is at work."""
    from torch._dynamo.comptime import comptime

    comptime(_tell)
