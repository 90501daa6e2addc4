"""The contenders: each is an optimizer with a model of its own, and what it has measured so far."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from ...optim.registry import Entry
from ...planning.sizes import Size
from ..errors import UsageError
from .gpt import build_model

SEED = 0  # of weights and batches
CLIP_NORM = 1.0
#: By optimizer: its peak learning rate as a multiple of AdamW's, which comes with the model's size; other arguments.
RECIPES: dict[str, tuple[float, dict[str, Any]]] = {
    "adamw": (1.0, {"betas": (0.9, 0.95), "weight_decay": 0.1}),  # the betas of GPT-3
    "sgd": (30.0, {"momentum": 0.9}),
    "lion": (0.2, {"weight_decay": 0.5}),
}


class Contender:
    """An optimizer with a model of its own. It notes each step's loss, time, and time of the optimizer."""

    def __init__(self, name: str, kind: Any, given: dict[str, Any], size: Size, device: torch.device) -> None:
        self.name, self.device = name, device
        self.model = build_model(size, size.block, SEED, device)
        if given.get("param_format"):
            self.model.bfloat16()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]  # norms and biases, which do not decay
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer = kind(groups, **given)
        self.losses, self.step_ms, self.optimizer_ms = (list[float]() for _ in range(3))

    def step(self, inputs: Tensor, targets: Tensor, rate: float) -> None:
        """Take a step at ``rate`` times the peak learning rate. On a GPU matrix products are in bfloat16."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * self.optimizer.defaults["lr"]
        start = self._now()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        before = self._now()
        self.optimizer.step()
        end = self._now()
        self.optimizer.zero_grad()
        self.step_ms.append(1e3 * (end - start))
        self.optimizer_ms.append(1e3 * (end - before))
        self.losses.append(loss.item())  # at last: of each loss that an interrupt leaves, the times are there

    def _now(self) -> float:
        """Return the time in seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def state_bytes(self) -> Counter[str]:
        """Return the bytes of optimizer state by place: ``device``, ``host``, ``file``."""
        if report := getattr(self.optimizer, "memory_report", None):
            return Counter(report().by_place) + Counter(device=report().ring)  # slots that pages pass through
        tensors = [value for state in self.optimizer.state.values() for value in state.values() if value is not None]
        return sum((Counter({"device" if t.is_cuda else "host": t.nbytes}) for t in tensors), Counter[str]())


def line_up(
    entry: Entry, budget: str, formats: dict[str, str | None], size: Size, device: torch.device
) -> list[Contender]:
    """Return the contenders: torch's, if it has this optimizer, ours with these formats, and ours with the budget.

    Raises:
        UsageError: our optimizer refuses the budget or a format.
    """
    factor, arguments = RECIPES.get(entry.module, (1.0, {}))
    given: dict[str, Any] = {"lr": factor * size.lr, **arguments}
    ours = {**given, **formats, "preallocate": True}
    lined_up: list[tuple[str, Any, dict[str, Any]]] = [
        (entry.name, entry.optimizer, ours),
        (f"{entry.name}, {budget}", entry.optimizer, {**ours, "device_budget": budget}),
    ]
    if theirs := entry.torch:
        lined_up.insert(0, (f"torch {theirs.__name__}", theirs, {**given, "fused": True}))
    try:
        return [Contender(*each, size, device) for each in lined_up]
    except ValueError as error:  # it names the option
        raise UsageError(str(error)) from error
