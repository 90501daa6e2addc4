"""The judge of updates: one is right if it is near that of AdamW in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from experiments.works.models import HYPER, Bound, Build


def off_by(build: Build, params: Sequence[torch.nn.Parameter]) -> float:
    """How far four steps over these parameters are from float64, as a share of the update."""
    return Reference(params).error(params, build([*params]))


class Reference:
    """``torch.optim.AdamW`` in float64 over the smallest tensors and the largest, for contenders to be held to."""

    STEPS = 4
    LARGEST = 8_000_000  # parameters, without the largest tensor's

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        *order, last = sorted(range(len(params)), key=lambda i: params[i].numel())
        total = 0
        self.chosen = [last]
        for i in order:
            total += params[i].numel()
            if total > self.LARGEST:
                break
            self.chosen.append(i)
        self.before = [params[i].detach().double() for i in self.chosen]
        values = [torch.nn.Parameter(value.clone()) for value in self.before]
        for value, i in zip(values, self.chosen, strict=True):
            grad = params[i].grad
            assert grad is not None
            value.grad = grad.double()
        optimizer = torch.optim.AdamW(values, **HYPER, foreach=True)
        for _ in range(self.STEPS):
            optimizer.step()
        self.after = [v.detach() for v in values]

    def error(self, params: Sequence[torch.nn.Parameter], contender: Bound) -> float:
        """‖update - exact update‖ / ‖exact update‖ after four steps of a contender that was just built."""
        for _ in range(self.STEPS - contender.done):
            contender.step()
        wrong, exact = 0.0, 0.0
        for i, after, before in zip(self.chosen, self.after, self.before, strict=True):
            wrong += float((params[i].detach().double() - after).square().sum())
            exact += float((after - before).square().sum())
        return float((wrong / exact) ** 0.5)
