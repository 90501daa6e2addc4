"""The tensors of one launch as its kernel takes them: real numbers, dense, those of a parameter in the same strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...tables.columns import Tensors, has_memory, is_dense, same_layout
from ...tables.shards import local
from .members import Grads, Member


class KernelViews:
    """Parameters, gradients and state of some members, as :class:`~pagedopt.launch.sweep.Sweep` takes them.

    Dense tensors with their parameter's strides are taken as they are, complex ones as pairs of real numbers (as in
    torch's optimizers), DTensors as their local shards.  A tensor with gaps or other strides gets a copy, which is
    filled before the launch and copied back after it.  Of a parameter with other strides than its blocks of state, it
    is the parameter that is copied.  Only these copies are stored; all other tensors are arguments.

    Attributes:
        direct: whether kernels take all parameters and state as they are; gradients aside.
    """

    __slots__ = ("_copies_gradients", "_count", "_odd", "_param_copies", "_state_copies", "_strides", "direct")

    def __init__(self, members: Sequence[Member], keys: Sequence[str]) -> None:
        self._count = len(members)
        self._param_copies: tuple[tuple[int, torch.Tensor], ...] = ()  # (index of the parameter, copy)
        self._state_copies: tuple[tuple[int, torch.Tensor], ...] = ()  # (index in all state, copy)
        self._copies_gradients = False
        self._odd: tuple[int, ...] = ()
        #: Strides along which blocks of state lie (None: it has none), by index of the parameter.
        self._strides: dict[int, tuple[int, ...] | None] = {}
        if not all(_is_simple(m, keys) for m in members):
            self._find_copies(members, keys)
        self.direct = not self._odd and not self._state_copies

    def _find_copies(self, members: Sequence[Member], keys: Sequence[str]) -> None:
        likes = [m.like for m in members]
        strides = [None if like is m.shard else like.stride() for m, like in zip(members, likes, strict=True)]
        odd = [m.shard is not m.param or _is_odd(m.param, own) for m, own in zip(members, strides, strict=True)]
        self._odd = tuple([i for i, is_odd in enumerate(odd) if is_odd])
        self._strides = {i: strides[i] for i in self._odd}
        copies: list[tuple[int, torch.Tensor]] = []
        by_id: dict[int, torch.Tensor] = {}  # by id of the original: a tensor may be there twice
        for i, (key, (m, like)) in enumerate((key, each) for key in keys for each in zip(members, likes, strict=True)):
            state, like = local(m.entry[key]), m.columns[key].column.like(like)
            if not _is_laid_out(state, like):
                if id(state) not in by_id:
                    by_id[id(state)] = state.new_empty_strided(like.shape, like.stride())
                copies.append((i, by_id[id(state)]))
        self._state_copies = tuple(copies)

    @property
    def as_they_are(self) -> bool:
        """Whether kernels take all tensors as they are, gradients too."""
        return self.direct and not self._copies_gradients

    def as_seen(self, tensors: Tensors, shards: Grads) -> Tensors:
        """Return parameters and gradients as kernels see them; ``tensors`` begins with parameters, then gradients."""
        count = self._count
        if self.direct and not self._copies_gradients:  # as_they_are, written out: every step asks
            return tensors[: 2 * count]
        params = self._params(tensors[:count])
        return (*params, *self._grads(tensors[:count], tensors[count : 2 * count], params, shards))

    def state_as_seen(self, members: Sequence[Member], keys: Sequence[str]) -> list[torch.Tensor]:
        """Return state as kernels see it, column by column."""
        state, copies = [local(m.entry[key]) for key in keys for m in members], dict(self._state_copies)
        return [as_real(copies.get(i, t)) for i, t in enumerate(state)]

    def lay_out_gradients(self) -> bool:
        """Copy gradients with other strides than their parameters from now on; return False if this is so already."""
        before, self._copies_gradients = self._copies_gradients, True
        return not before

    def _params(self, params: Tensors) -> list[torch.Tensor]:
        """Return the parameters as they are now: their ``.data`` may have been replaced."""
        now: list[Any] = list(params)
        before, copies = dict(self._param_copies), {}
        for i in self._odd:
            p, strides = local(now[i]).detach(), self._strides[i]
            if not _is_param_laid_out(p, strides):
                if not has_memory(p):
                    raise ValueError(f"tensor {i} of param has no memory (its storage was freed or resized to less)")
                copy = before.get(i)
                if copy is None or copy.shape != p.shape or copy.dtype != p.dtype or copy.device != p.device:
                    copy = torch.empty_like(p) if strides is None else p.new_empty_strided(p.shape, strides)
                p = copies[i] = copy
            now[i] = as_real(p)
        self._param_copies = tuple(copies.items())
        return now

    def _grads(
        self, params: Tensors, given: Tensors, seen: Sequence[torch.Tensor], shards: Grads
    ) -> list[torch.Tensor | None]:
        grads = list(given)
        for i in self._odd:
            p = _there(params, i)
            grads[i] = shards.get(p, grads[i])
            if (g := grads[i]) is not None and (g.is_complex() or p.is_complex()):
                grads[i] = as_real(g.detach() if g.is_complex() else g.detach().to(p.dtype))
        return [_alike(g, p) for g, p in zip(grads, seen, strict=True)] if self._copies_gradients else grads

    def fill(self, tensors: Tensors) -> None:
        """Fill the copies from their originals."""
        for i, copy in self._param_copies:
            copy.copy_(local(_there(tensors, i)).detach())
        for original, copy in self._copied_state(tensors):
            copy.copy_(original.detach())

    def bring_back(self, tensors: Tensors) -> None:
        """Write the copies back into their originals, except those of parameters without a gradient."""
        for i, copy in self._param_copies:
            if tensors[self._count + i] is not None:
                local(_there(tensors, i)).detach().copy_(copy)
        for original, copy in self._copied_state(tensors):
            original.detach().copy_(copy)

    def _copied_state(self, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (original, copy) of state that has a copy, each once."""
        first = 2 * self._count
        pairs = {id(copy): (local(_there(tensors, first + i)), copy) for i, copy in self._state_copies}
        return list(pairs.values())


def _is_simple(member: Member, keys: Sequence[str]) -> bool:
    """Tell whether kernels take a parameter and its state as they are, for the usual reason: all are contiguous."""
    p, entry = member.param, member.entry
    if member.blocked or member.shard is not p or p.is_complex() or p.is_neg() or not p.is_contiguous():
        return False
    for key in keys:
        state = entry[key]
        if state.is_neg() or not state.is_contiguous():
            return False
    return True


def _there(tensors: Tensors, at: int) -> torch.Tensor:
    found = tensors[at]
    assert found is not None, "only gradients may be absent"
    return found


def _is_laid_out(t: torch.Tensor, like: torch.Tensor) -> bool:
    """Tell whether a kernel can take state as it is: no pending conjugation or sign, and the strides of ``like``."""
    return not (t.is_conj() or t.is_neg()) and (t.numel() <= 1 or t.stride() == like.stride())


def _is_odd(p: torch.Tensor, strides: tuple[int, ...] | None) -> bool:
    """Tell whether a kernel cannot take a parameter as it is; ``strides``: those of its state in blocks, if any."""
    return p.is_complex() or not _is_param_laid_out(p, strides)


def _is_param_laid_out(p: torch.Tensor, strides: tuple[int, ...] | None) -> bool:
    """Tell whether a parameter is dense, with these strides, and with no pending conjugation or sign."""
    # Another number of dimensions is left to the table, which refuses it.
    as_asked = strides is None or len(strides) != p.dim() or same_layout(p.shape, p.stride(), strides)
    return as_asked and is_dense(p) and not (p.is_conj() or p.is_neg())


def _alike(grad: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, or a copy with its parameter's strides; the table refuses other misfits."""
    if grad is None or grad.layout is not torch.strided or grad.shape != p.shape:
        return grad
    if (grad.stride() == p.stride() and not grad.is_neg()) or not has_memory(grad):
        return grad
    return torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one with a last dimension of two, in the same memory if possible."""
    if not tensor.is_complex() or not has_memory(tensor):  # the table refuses what has no memory
        return tensor
    return torch.view_as_real(tensor.resolve_conj().resolve_neg())
