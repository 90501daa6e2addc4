"""A contender: one optimizer with its own copy of the model, and what it has measured so far."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .gpt import GPT, build_model
from .train_options import TrainOptions

LABELS = {"paged": "PagedAdamW", "torch": "torch AdamW (fused)", "foreach": "torch AdamW (foreach)"}
BETAS = (0.9, 0.95)  # as GPT-3
CLIP_NORM = 1.0


def build_optimizer(which: str, model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Return the optimizer called ``which``. Matrices and embeddings decay, norms and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if which == "paged":
        from ... import PagedAdamW

        given: Any = {"placement": options.placement, "state_format": options.state_format}  # known to be names
        optimizer = PagedAdamW(groups, lr=options.lr, betas=BETAS, device_budget=options.device_budget, **given)
        if options.overlap:
            optimizer.attach(model)
        return optimizer
    how: Any = {"foreach": True} if which == "foreach" else {"fused": True}
    return torch.optim.AdamW(groups, lr=options.lr, betas=BETAS, **how)


def label(which: str, options: TrainOptions) -> str:
    """Return the name of a contender in tables, with the format of its state if one is given."""
    named = which == "paged" and options.state_format is not None
    return f"{LABELS[which]} ({options.state_format})" if named else LABELS[which]


class Clock:
    """Times work on its device: with CUDA events, which do not wait for the GPU, or with the CPU's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return the present as a mark for ``milliseconds``."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks. On CUDA both events must have completed."""
        return float(start.elapsed_time(end)) if self.cuda else (end - start) * 1e3


@dataclass
class Curve:
    """What one contender has measured, one number per step."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)


class Contender:
    """A model and its optimizer. Losses and times stay on the device until ``collect``, so that no step waits."""

    def __init__(self, which: str, options: TrainOptions, name: str = "") -> None:
        self.which = which
        self.name = name or which  # in the display
        self.label = label(which, options)
        self.device = torch.device(options.device)
        self.model: GPT = build_model(options.shape, options.block, options.seed, self.device)
        self.optimizer = build_optimizer(which, self.model, options)
        self.curve = Curve()
        self.clock = Clock(self.device)
        self._waiting: list[tuple[Tensor, Any, Any, Any]] = []

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss. On a GPU matrix products are in bfloat16."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(inputs, targets)

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> None:
        """Take one training step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        start = self.clock.now()
        loss = self.loss(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        before = self.clock.now()
        self.optimizer.step()
        end = self.clock.now()
        self.optimizer.zero_grad()
        self._waiting.append((loss.detach(), start, before, end))

    def collect(self) -> None:
        """Bring losses and times to the host. On CUDA this waits for the device, once for all of them."""
        if not self._waiting:
            return
        self.curve.losses += torch.stack([loss for loss, *_ in self._waiting]).tolist()
        if self.clock.cuda:
            self._waiting[-1][3].synchronize()
        for _, start, before, end in self._waiting:
            self.curve.step_ms.append(self.clock.milliseconds(start, end))
            self.curve.optimizer_ms.append(self.clock.milliseconds(before, end))
        self._waiting.clear()

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of optimizer state by where they are: ``device``, ``host`` or ``file``."""
        if self.which == "paged":
            optimizer: Any = self.optimizer
            return {where: int(size) for where, size in optimizer.memory_report().by_place.items() if size}
        found: Counter[str] = Counter()
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    found["device" if value.is_cuda else "host"] += value.nbytes
        return dict(found)

    @property
    def queued(self) -> bool:
        """Whether updates were queued to run under the forward: then ``optimizer_ms`` is the time to queue them."""
        ask = getattr(self.optimizer, "overlap_report", None)  # torch's has none
        report = ask and ask()
        return bool(report and (report.hidden or report.waited))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that ``load_state_dict`` needs to go on."""
        self.collect()
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "curve": vars(self.curve)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.curve = Curve(**saved["curve"])
