"""Hooks of modules that call overlaps back, and vanish with them; copies of a module have dead ones."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling


class Waits(Protocol):
    """What hooks call."""

    def enter(self, module: torch.nn.Module) -> None:
        """A module is called."""

    def leave(self, module: torch.nn.Module, whole: bool = True) -> None:
        """The call has ended; ``whole`` unless its forward has raised."""

    def wait(self) -> None:
        """All parameters are about to be read or written."""

    def tell_misuse(self) -> None:
        """Raise RuntimeError if an update was lost."""

    def refuse_copy(self) -> None:
        """A module is being copied or pickled; RuntimeError if it may have been read too early."""

    def traced(self) -> None:
        """A compiler traces a module: the code that it makes calls no hooks."""


def _nobody() -> None:
    """Stand for a reference to an overlap that has died."""


class _NoScript(AttributeError):
    """Stands for a hook in ``torch.jit.script``."""


class Hook:
    """Calls a method of an overlap that is alive; does nothing else."""

    __slots__ = ("_overlap",)

    def __init__(self, overlap: Waits | None = None) -> None:
        #: Returns the overlap, if it is alive.
        self._overlap: Callable[[], Waits | None] = _nobody if overlap is None else weakref.ref(overlap)

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
    """Before a module's forward."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if is_dynamo_compiling():
            tell_compiled()
        elif (overlap := self._overlap()) is not None:
            overlap.enter(module)


class Leave(Hook):
    """Behind a module's forward."""

    def __call__(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not is_dynamo_compiling() and (overlap := self._overlap()) is not None:
            overlap.leave(module)


class Raised(Hook):
    """Behind an error in a module's forward; behind one that ended well :class:`Leave` was there before."""

    def __call__(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if not is_dynamo_compiling() and (overlap := self._overlap()) is not None:
            overlap.leave(module, whole=False)


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


class Compiled:
    """Replaces the callable that ``module.compile()`` has made: a call of that runs no hook of the module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        self.overlaps: weakref.WeakSet[Waits] = weakref.WeakSet()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        entered: list[Waits] = []
        whole = False
        try:
            for overlap in list(self.overlaps) if module is not None else ():
                entered.append(overlap)
                overlap.enter(module)  # type: ignore[arg-type]
            result = self.call(*args, **kwargs)
            whole = True
            return result
        finally:
            for overlap in entered:
                overlap.leave(module, whole)  # type: ignore[arg-type]


def wrap_compiled(modules: Iterable[torch.nn.Module], overlap: Waits) -> None:
    """Let calls of compiled modules wait, too."""
    for module in modules:
        made = module._compiled_call_impl
        if made is not None:
            if not isinstance(made, Compiled):
                made = module._compiled_call_impl = Compiled(module)
            made.overlaps.add(overlap)


def unwrap_compiled(modules: Iterable[torch.nn.Module], overlap: Waits) -> None:
    """Undo :func:`wrap_compiled`."""
    for module in modules:
        made = module._compiled_call_impl
        if isinstance(made, Compiled):
            made.overlaps.discard(overlap)
            if not made.overlaps:
                module._compiled_call_impl = made.call


#: All overlaps, in a set that is cheap to find empty.
known: set[weakref.ref[Waits]] = set()


def tell_of(overlap: Waits) -> None:
    """Let an overlap be known while it is alive."""
    _let_apply_wait()
    known.add(weakref.ref(overlap, known.discard))


@functools.cache
def _let_apply_wait() -> None:
    """Replace, once a process, ``torch.nn.Module._apply``, which ``to()``, ``half()`` and ``share_memory()`` call.

    Not in single modules: a copy of a module would call that of the original.
    """
    apply = torch.nn.Module._apply

    @functools.wraps(apply)
    def waits(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for overlap in all_known() if known else ():
            if (queued := overlap.queued) is not None and any(map(queued.is_pending, _own(module))):
                overlap.wait()
        return apply(module, *args, **kwargs)

    torch.nn.Module._apply = waits  # type: ignore[method-assign, assignment]


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in module._parameters.values() if p is not None]


def all_known() -> list[Any]:
    """Return all overlaps."""
    return [overlap for ref in list(known) if (overlap := ref()) is not None]


def _tell(_: Any) -> None:  # all of them: here it is not known whose module is traced
    for overlap in all_known():
        overlap.traced()


def tell_compiled() -> None:
    """Tell all overlaps, while Dynamo traces the caller and not when its code runs, that a compiler is at work."""
    from torch._dynamo.comptime import comptime

    comptime(_tell)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a call of a module runs code of a compiler, which calls no hooks of modules inside."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
