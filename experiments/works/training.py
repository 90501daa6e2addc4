"""A GPT that is trained as users train it: bfloat16 autocast, clipping by global norm, nothing waits for the GPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pagedopt.commands.gpt import GPT
from pagedopt.planning.sizes import Size

Make = Callable[[Iterable[torch.nn.Parameter]], Any]


@dataclass(frozen=True)
class Load:
    """What an iteration computes: sequences a forward, forwards a step, and whether activations are computed twice."""

    batch: int = 8
    micro: int = 1
    recomputed: bool = False

    def __str__(self) -> str:
        parts = f"{self.micro} x " if self.micro > 1 else "", "recomputed" if self.recomputed else ""
        return f"{parts[0]}{self.batch} sequences{', ' * bool(parts[1])}{parts[1]}"


class Mark:
    """A point of time in the current stream; on a CPU one of the host."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def since(self, other: Mark) -> float:
        """Microseconds from another mark to this one."""
        if self._event is None or other._event is None:
            return (self._at - other._at) * 1e6
        return 1e3 * other._event.elapsed_time(self._event)


class Training:
    """A model, its optimizer, and iterations.

    Attributes:
        host: microseconds that the calls of ``step()`` took.
    """

    def __init__(self, device: torch.device, size: Size, load: Load, make: Make) -> None:
        torch.manual_seed(0)
        with device:
            self.model = GPT(size)
            self.tokens = torch.randint(size.vocabulary, (load.batch, size.block + 1))
        if load.recomputed:
            for layer in self.model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        self.device, self.load, self.host = device, load, list[float]()
        self.optimizer = make(self.model.parameters())

    def gradients(self) -> None:
        """Forward, backward and clipping."""
        for _ in range(self.load.micro):
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
            (loss / self.load.micro).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self) -> None:
        """The step, timed on the host."""
        begin = time.perf_counter()
        self.optimizer.step()
        self.host.append((time.perf_counter() - begin) * 1e6)
        self.optimizer.zero_grad()

    def iterate(self) -> Mark:
        """An iteration; returns its begin."""
        begin = Mark(self.device)
        self.gradients()
        self.step()
        return begin

    def wait(self) -> None:
        """Until all is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
