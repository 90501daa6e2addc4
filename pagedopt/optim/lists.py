"""The tensors of one launch as its kernel takes them: real numbers, dense, each laid out as its parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tables.columns import Tensors, has_memory, is_dense
from ..tables.shards import local
from .members import Grads, Member


class Lists:
    """Parameters, gradients and state of some members, as :class:`~pagedopt.launch.sweep.Sweep` takes them.

    What is dense and laid out as its parameter is taken as it is; complex numbers are viewed as pairs of real ones, as
    torch's optimizers do, and of a DTensor the shard.  Of what has gaps or other strides there is a copy beside it,
    filled before the launch and brought back behind it.

    Attributes:
        params: the parameters as they were when they were last looked at.
        everyone: the parameters themselves.
        odd: places of those that are not taken as they are.
        state: one list for each column of state.
    """

    __slots__ = ("_beside", "_gaps", "everyone", "odd", "params", "state")

    def __init__(self, members: Sequence[Member]) -> None:
        self.everyone = tuple(m.param for m in members)
        self.odd = tuple(i for i, m in enumerate(members) if m.shard is not m.param or _is_odd(m.param))
        self._gaps: tuple[tuple[int, torch.Tensor], ...] = ()  # (place, copy) of parameters
        self.params: tuple[torch.Tensor, ...] = self.everyone
        if self.odd:
            self.take_params()
        beside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the original
        columns = members[0].kept if members else {}
        self.state = tuple(
            tuple(_as(local(m.entry[key]), of.column.like(m.shard), beside) for m in members)
            for key, of in columns.items()
        )
        self._beside = tuple(beside.values())

    def take_params(self) -> None:
        """Look at the parameters that are not taken as they are once more: their ``.data`` may be another."""
        now, before, gaps = list(self.everyone), dict(self._gaps), {}
        for i in self.odd:
            p = local(self.everyone[i]).detach()
            if not _is_plain(p):
                if not has_memory(p):
                    raise ValueError(f"tensor {i} of param has no memory (its storage was freed or resized to less)")
                there = before.get(i)
                if there is None or there.shape != p.shape or there.dtype != p.dtype or there.device != p.device:
                    there = torch.empty_like(p)
                p = gaps[i] = there
            now[i] = as_real(p)
        self.params, self._gaps = tuple(now), tuple(gaps.items())

    def grads(self, shards: Grads, laid_out: bool = False) -> Tensors:
        """The gradients there are now.

        Args:
            shards: those of DTensors.
            laid_out: copy those whose strides are not their parameters' (autograd makes them alike).
        """
        grads = [p.grad for p in self.everyone]
        for i in self.odd:
            p = self.everyone[i]
            grads[i] = shards.get(p, grads[i])
            if (g := grads[i]) is not None and (g.is_complex() or p.is_complex()):
                grads[i] = as_real(g.detach() if g.is_complex() else g.detach().to(p.dtype))
        if laid_out:
            grads = [_alike(g, p) for g, p in zip(grads, self.params, strict=True)]
        return tuple(grads)

    def fill(self) -> None:
        """Bring what has a copy into it."""
        for i, copy in self._gaps:
            copy.copy_(local(self.everyone[i]).detach())
        for original, copy in self._beside:
            copy.copy_(original.detach())

    def bring_back(self) -> None:
        """Bring the copies back to what they stand for, those of parameters without a gradient excepted."""
        for i, copy in self._gaps:
            if self.everyone[i].grad is not None:
                local(self.everyone[i]).detach().copy_(copy)
        for original, copy in self._beside:
            original.detach().copy_(copy)


def _as(t: torch.Tensor, like: torch.Tensor, beside: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """State as a kernel takes it: laid out as ``like``, itself or in a copy ``beside`` it."""
    if not (t.is_conj() or t.is_neg()) and (t.numel() <= 1 or t.stride() == like.stride()):
        return as_real(t)
    if id(t) not in beside:
        beside[id(t)] = t, torch.empty_strided(like.shape, like.stride(), dtype=t.dtype, device=t.device)
    return as_real(beside[id(t)][1])


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
