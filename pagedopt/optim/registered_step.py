"""``torch.ops.pagedopt.step_``: a whole step of one optimizer, as a graph of ``torch.compile`` sees it.

The graph knows that the step writes the parameters and reads the gradients that are passed to it.  The graph does not
contain state.  So a graph that also reads state is refused: nothing would order that read before or after the step.
(Which tensors a graph reads is known by a private part of torch; where it is missing, nothing is refused.)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..system.internals import known_to_fakes
from ..system.registered_ops import UNSAFE_IN_CUDA_GRAPHS, define
from .state.rule_optimizer import occurrences


class Handed:
    """An optimizer, and which of its parameters are passed to the operator; graphs know it by its handle.

    Attributes:
        optimizer: a weak reference to it.
        positions: indices of those parameters, counted through all groups.
    """

    __slots__ = ("__weakref__", "handle", "optimizer", "positions")

    def __init__(self, optimizer: Any, positions: tuple[int, ...]) -> None:
        self.optimizer, self.positions = weakref.ref(optimizer), positions
        self.handle = next(_numbers)

    def own(self, optimizer: Any, params: Sequence[torch.Tensor], grads: Sequence[Any]) -> list[torch.Tensor]:
        """Return the optimizer's parameters, all of them.

        Raises:
            RuntimeError: its groups are others than those that were compiled.
            ValueError: the passed tensors do not fit them.
        """
        own = [p for _, _, p in occurrences(optimizer)]
        shown = getattr(optimizer, "_shown_groups", None)
        if shown is not optimizer.param_groups:  # load_state_dict() makes new groups of the same parameters
            before = [p for group in shown or () for p in group["params"]]
            optimizer._shown_groups = optimizer.param_groups
            if [*map(id, before)] != [*map(id, own)]:
                raise RuntimeError(
                    f"the groups of this {type(optimizer).__name__} hold other parameters than when the step was "
                    "compiled; nothing was updated: call the compiled function again, which compiles it anew"
                )
        if not len(params) == len(grads) == len(self.positions):
            raise ValueError(
                f"step_ got {len(params)} parameters and {len(grads)} gradients; handle {self.handle} is of "
                f"{len(self.positions)} parameters of a {type(optimizer).__name__}"
            )
        return own


_numbers = itertools.count(1)
_handed: weakref.WeakValueDictionary[int, Handed] = weakref.WeakValueDictionary()


def handle_of(optimizer: Any, positions: tuple[int, ...]) -> int:
    """Return the handle of a step of the parameters at these positions; valid while the optimizer is alive."""
    of: dict[tuple[int, ...], Handed] = vars(optimizer).setdefault("_handles", {})
    handed = of.get(positions)
    if handed is None:
        handed = of[positions] = Handed(optimizer, positions)
        _handed[handed.handle] = handed
    return handed.handle


def _found(handle: int) -> tuple[Handed, Any]:
    """Return the :class:`Handed` of a handle, and its optimizer."""
    handed = _handed.get(handle)
    optimizer = None if handed is None else handed.optimizer()
    if handed is None or optimizer is None:
        raise RuntimeError(
            f"the optimizer of handle {handle} is gone, or never was in this process; keep the optimizer alive as long "
            "as what was compiled with it, and compile anew in a new process"
        )
    return handed, optimizer


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie in the same memory with the same strides."""
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _run(params: list[torch.Tensor], grads: list[torch.Tensor], handle: int) -> None:
    """Take a step with the parameters and gradients that are passed.

    A compiler may pass clones; it copies them back itself.  While the step runs, each parameter of the optimizer has
    the passed tensor's memory as its ``.data`` and the passed gradient as its ``.grad``.
    """
    handed, optimizer = _found(handle)
    with optimizer._lock():
        own = handed.own(optimizer, params, grads)
        wanted: list[torch.Tensor | None] = [None] * len(own)
        moved, written = [], []
        for position, given, grad in zip(handed.positions, params, grads, strict=True):
            p = own[position]
            wanted[position] = grad
            if given is not p:
                _check(p, given, position)
                written.append(given)
                if not _same_memory(given, p):
                    moved.append((p, given, p.data))
        if moved:
            _check_apart([own[position] for position in handed.positions])
        before = [p.grad for p in own]
        try:
            for p, given, _ in moved:
                p.data = given
            for p, old, new in zip(own, before, wanted, strict=True):
                if new is not old:
                    p.grad = new
            optimizer._step()
            if written:
                torch.autograd.graph.increment_version(written)
        finally:
            for p, _, data in moved:
                p.data = data
            for p, old, new in zip(own, before, wanted, strict=True):
                if new is not old:
                    p.grad = old


def _check_apart(params: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError if parameters share memory: the clones that a compiler has passed do not."""
    memories = [at for p in params if (at := p.untyped_storage().data_ptr())]
    if len({*memories}) < len(memories):
        raise RuntimeError(
            "parameters share memory now, and did not when the step was compiled; nothing was updated: compile the "
            "function anew (torch.compiler.reset())"
        )


def _check(p: torch.Tensor, given: torch.Tensor, position: int) -> None:
    """Raise ValueError unless a tensor may stand for a parameter."""
    if given.shape != p.shape or given.dtype is not p.dtype or given.device != p.device:
        raise ValueError(
            f"step_ got {given.dtype} {tuple(given.shape)} on {given.device} for parameter {position}, which is "
            f"{p.dtype} {tuple(p.shape)} on {p.device}"
        )


def _fake(params: list[torch.Tensor], grads: list[torch.Tensor], handle: int) -> None:
    """Check, without values, that the gradients fit, and that the graph reads no state."""
    _, optimizer = _found(handle)
    if len(params) != len(grads):
        raise ValueError(f"step_ got {len(params)} parameters and {len(grads)} gradients")
    mode = getattr(params[0], "fake_mode", None) if params else None
    for position, key, value in _state(optimizer) if mode is not None else ():
        if known_to_fakes(mode, value):
            raise RuntimeError(
                f"the compiled function reads state {key!r} of parameter {position}, and takes a step of its "
                f"{type(optimizer).__name__}: the graph does not know which comes first. Read the state outside of "
                "the compiled function, or behind torch._dynamo.graph_break()"
            )


def _state(optimizer: Any) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (position of the parameter, name, tensor) of all state."""
    for position, (_, _, p) in enumerate(occurrences(optimizer)):
        for key, value in (optimizer.state.get(p) or {}).items():
            if isinstance(value, torch.Tensor):
                yield position, key, value


#: ``step_(Tensor(a!)[] params, Tensor[] grads, int handle)``: a step of the optimizer that a handle stands for, with
#: these parameters, which it writes, and these gradients.  Raises what ``step()`` does; RuntimeError if the optimizer
#: is gone or has other groups; ValueError if the tensors are not its own, or clones of them.
step_ = define("step_", "Tensor(a!)[] params, Tensor[] grads, int handle", _run, _fake, UNSAFE_IN_CUDA_GRAPHS)

__all__ = ["handle_of", "step_"]
