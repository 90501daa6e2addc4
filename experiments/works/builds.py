"""Steps of ours and of torch's in all its ways, bound to parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.works.graph import captured
from experiments.works.models import HYPER, Bound, Build
from pagedopt import PagedAdamW, PagedSGD


@dataclass(frozen=True)
class Family:
    """An optimizer of torch, ours in its place, the hyperparameters of both, and options of torch's in a graph."""

    name: str
    plain: Callable[..., torch.optim.Optimizer]
    paged: Callable[..., torch.optim.Optimizer]
    hyper: Mapping[str, Any]
    graph: Mapping[str, Any] = field(default_factory=dict)


ADAMW = Family("AdamW", torch.optim.AdamW, PagedAdamW, HYPER, {"capturable": True})
SGD = Family("SGD", torch.optim.SGD, PagedSGD, {"lr": 1e-3})


def ours(family: Family = ADAMW, /, **options: Any) -> Build:
    """PagedAdamW, or another of ours, with the family's hyperparameters where ``options`` has no other."""
    return lambda params: Bound(family.paged(params, **{**family.hyper, **options}).step)


def theirs(family: Family = ADAMW, /, **options: Any) -> Build:
    """torch.optim.AdamW, or another of torch's."""
    return lambda params: Bound(family.plain(params, **family.hyper, **options).step)


def compiled(
    family: Family = ADAMW, /, *, foreach: bool = True, before: Callable[[Any], object] = len, **how: Any
) -> Build:
    """torch.compile of torch's step, as torch's tutorial on compiled optimizers does it: on a GPU, lr in a tensor.

    ``before``: what is done to the parameters in front of the step; ``how``: options of torch.compile.
    """

    def build(params: list[torch.nn.Parameter]) -> Bound:
        hyper = dict(family.hyper)
        if params[0].is_cuda:  # torch refuses a tensor where steps are counted on the host
            hyper |= {"lr": torch.tensor(hyper["lr"], device=params[0].device), **family.graph}
        optimizer = family.plain(params, **hyper, foreach=foreach)

        @torch.compile(fullgraph=False, **how)
        def step() -> None:
            before(params)
            optimizer.step()

        return Bound(step)

    return build


def graphed(family: Family = ADAMW, /) -> Build:
    """A CUDA graph of torch's fused step."""
    return lambda params: graph_of(theirs(family, fused=True, **family.graph)(params).step)


def graphed_ours() -> Build:
    """A CUDA graph of PagedAdamW."""
    return lambda params: graph_of(ours(capturable=True)(params).step)


def graph_of(step: Callable[[], object]) -> Bound:
    """A CUDA graph of a step, after two that warm it up."""
    return Bound(captured(step, 2), 2)
