"""Hooks of modules that call an overlap back, and vanish with it; copies of a module have dead ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Waits(Protocol):
    """What hooks call."""

    def enter(self, module: torch.nn.Module) -> None:
        """A module is called."""

    def leave(self, module: torch.nn.Module) -> None:
        """The call has ended, with or without an error."""

    def wait(self) -> None:
        """All parameters are about to be read or written."""

    def traced(self) -> None:
        """A compiler traces a module: what it makes calls no hooks."""


class _NoScript(AttributeError):
    """What ``torch.jit.script`` gets of a hook."""


class Hook:
    """Calls a method of an overlap that is alive; does nothing else."""

    __slots__ = ("_overlap",)

    def __init__(self, overlap: Waits | None = None) -> None:
        self._overlap = None if overlap is None else weakref.ref(overlap)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return type(self)()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return type(self), ()

    @property
    def __name__(self) -> str:
        raise _NoScript(
            "torch.jit.script would leave out the waits of overlap='forward': call optimizer.detach() first"
        )

    @property
    def overlap(self) -> Waits | None:
        """The overlap, if it is alive."""
        return None if self._overlap is None else self._overlap()


class Enter(Hook):
    """Before a module's forward."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            tell_compiled()
        elif (overlap := self.overlap) is not None:
            overlap.enter(module)


class Leave(Hook):
    """Behind a module's forward, if it failed, too."""

    def __call__(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling() and (overlap := self.overlap) is not None:
            overlap.leave(module)


class Fence(Hook):
    """Before a module's state dict is made or loaded, with whatever arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if (overlap := self.overlap) is not None:
            overlap.wait()


class Compiled:
    """Stands in for what ``module.compile()`` has made, whose call shows no hook of the module."""

    def __init__(self, module: torch.nn.Module, overlap: Waits) -> None:
        self._module, self._overlap = weakref.ref(module), weakref.ref(overlap)
        self.call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, overlap = self._module(), self._overlap()
        if module is None or overlap is None:
            return self.call(*args, **kwargs)
        overlap.enter(module)
        try:
            return self.call(*args, **kwargs)
        finally:
            overlap.leave(module)


#: All overlaps: which of them a compiler is tracing is not known where it traces.
known: weakref.WeakSet[Waits] = weakref.WeakSet()


def _tell(_: Any) -> None:
    for overlap in list(known):
        overlap.traced()


def tell_compiled() -> None:
    """Tell all overlaps, while Dynamo traces the caller and not when its code runs, that a compiler is at work."""
    from torch._dynamo.comptime import comptime

    comptime(_tell)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a call of a module runs code of a compiler, which calls no hooks of modules inside."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def hook(module: torch.nn.Module, overlap: Waits) -> list[Any]:
    """Register all hooks of one module; return what removes them."""
    return [
        module.register_forward_pre_hook(Enter(overlap), prepend=True),
        module.register_forward_hook(Leave(overlap), always_call=True),
        module.register_state_dict_pre_hook(Fence(overlap)),
        module.register_load_state_dict_pre_hook(Fence(overlap)),
    ]
