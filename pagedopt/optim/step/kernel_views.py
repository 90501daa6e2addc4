"""The tensors of one launch as its kernel takes them: real numbers, dense, each laid out as its parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...tables.columns import Tensors, has_memory, is_dense
from ...tables.shards import local
from .members import Grads, Member

_NONE_BESIDE: dict[int, torch.Tensor] = {}


class KernelViews:
    """Parameters, gradients and state of some members, as :class:`~pagedopt.launch.sweep.Sweep` takes them.

    What is dense and laid out as its parameter is taken as it is; complex numbers are viewed as pairs of real ones, as
    torch's optimizers do, and of a DTensor the shard.  Of what has gaps or other strides there is a copy beside it,
    filled before the launch and brought back behind it.  Nothing else is kept: tensors are given, list by list.

    Args:
        members: the parameters; in each entry all state, the columns of which are ``keys``.
        keys: of the state, in the rule's order.

    Attributes:
        plain: whether all tensors are taken as they are.
    """

    __slots__ = ("_beside", "_count", "_gaps", "_odd", "_relaid", "plain")

    def __init__(self, members: Sequence[Member], keys: Sequence[str]) -> None:
        self._count = len(members)
        self._odd = tuple([i for i, m in enumerate(members) if m.shard is not m.param or _is_odd(m.param)])
        self._gaps: tuple[tuple[int, torch.Tensor], ...] = ()  # (place, copy) of parameters
        self._relaid = False  # whether gradients have been laid out otherwise than their parameters
        beside: dict[int, torch.Tensor] = {}  # by id of the original
        self._beside = _NONE_BESIDE  # by place among all state
        for at, (key, m) in enumerate((key, m) for key in keys for m in members):
            state = local(m.entry[key])
            if not _is_laid_out(state, like := m.columns[key].column.like(m.shard)):
                if id(state) not in beside:
                    beside[id(state)] = torch.empty_strided(
                        like.shape, like.stride(), dtype=state.dtype, device=state.device
                    )
                self._beside = {**self._beside, at: beside[id(state)]}
        self.plain = not self._odd and not self._beside

    def as_seen(self, tensors: Tensors, shards: Grads) -> Tensors:
        """Parameters and gradients as kernels see them, list by list.

        Args:
            tensors: parameters, then gradients; what is behind them does not matter.
            shards: gradients of DTensors.
        """
        count = self._count
        if self.plain and not self._relaid:
            return tensors[: 2 * count]
        params = self._params(tensors[:count])
        return (*params, *self._grads(tensors[:count], tensors[count : 2 * count], params, shards))

    def state_as_seen(self, members: Sequence[Member], keys: Sequence[str]) -> list[torch.Tensor]:
        """State as kernels see it, column by column."""
        state = [local(m.entry[key]) for key in keys for m in members]
        return [as_real(self._beside.get(i, t)) for i, t in enumerate(state)]

    def lay_out_gradients(self) -> bool:
        """From now on copy gradients whose strides are not their parameters' (autograd makes them alike); False if
        this is so already."""
        before, self._relaid = self._relaid, True
        return not before

    def _params(self, params: Tensors) -> list[torch.Tensor]:
        """Parameters as they are now: their ``.data`` may be another."""
        now: list[Any] = list(params)
        before, gaps = dict(self._gaps), {}
        for i in self._odd:
            p = local(now[i]).detach()
            if not _is_plain(p):
                if not has_memory(p):
                    raise ValueError(f"tensor {i} of param has no memory (its storage was freed or resized to less)")
                there = before.get(i)
                if there is None or there.shape != p.shape or there.dtype != p.dtype or there.device != p.device:
                    there = torch.empty_like(p)
                p = gaps[i] = there
            now[i] = as_real(p)
        self._gaps = tuple(gaps.items())
        return now

    def _grads(
        self, params: Tensors, given: Tensors, seen: Sequence[torch.Tensor], shards: Grads
    ) -> list[torch.Tensor | None]:
        grads = list(given)
        for i in self._odd:
            p = params[i]
            assert p is not None, "a parameter that is none"
            grads[i] = shards.get(p, grads[i])
            if (g := grads[i]) is not None and (g.is_complex() or p.is_complex()):
                grads[i] = as_real(g.detach() if g.is_complex() else g.detach().to(p.dtype))
        if self._relaid:
            grads = [_alike(g, p) for g, p in zip(grads, seen, strict=True)]
        return grads

    def fill(self, tensors: Tensors) -> None:
        """Bring what has a copy into it."""
        for i, copy in self._gaps:
            copy.copy_(local(_there(tensors, i)).detach())
        for original, copy in self._beside_of(tensors):
            copy.copy_(original.detach())

    def bring_back(self, tensors: Tensors) -> None:
        """Bring the copies back to what they stand for, those of parameters without a gradient excepted."""
        for i, copy in self._gaps:
            if tensors[self._count + i] is not None:
                local(_there(tensors, i)).detach().copy_(copy)
        for original, copy in self._beside_of(tensors):
            original.detach().copy_(copy)

    def _beside_of(self, tensors: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """State that has a copy, and that, each once."""
        first = 2 * self._count
        pairs = {id(copy): (local(_there(tensors, first + i)), copy) for i, copy in self._beside.items()}
        return list(pairs.values())


def _there(tensors: Tensors, at: int) -> torch.Tensor:
    found = tensors[at]
    assert found is not None, "of gradients alone some may be absent"
    return found


def _is_laid_out(t: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether a kernel can take state as it is: plain numbers in memory, in the order of the parameter's."""
    return not (t.is_conj() or t.is_neg()) and (t.numel() <= 1 or t.stride() == like.stride())


def _is_odd(p: torch.Tensor) -> bool:
    """Whether a kernel cannot take a parameter as it is."""
    return p.is_complex() or not _is_plain(p)


def _is_plain(p: torch.Tensor) -> bool:
    """Whether a parameter's own memory has its numbers, and nothing else between them."""
    return is_dense(p) and not (p.is_conj() or p.is_neg())


def _alike(grad: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor | None:
    """The gradient, or a copy laid out as its parameter; what is wrong otherwise is for others to say."""
    if grad is None or grad.layout is not torch.strided or grad.shape != p.shape:
        return grad
    if (grad.stride() == p.stride() and not grad.is_neg()) or not has_memory(grad):
        return grad
    return torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as one of real numbers, with a last dimension of two, in the same memory if it can be."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj().resolve_neg())
