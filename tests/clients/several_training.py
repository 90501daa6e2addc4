"""A model that several processes train together, and its optimizer, as one of them has both."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from tests.clients.several_setups import Net, Setup

#: Parts of a batch, and rows of a part in all processes together: 1, 2, 3 or 4 of them have as many each.
PARTS, ROWS = 3, 12


def mean_of_squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


@dataclass
class Training:
    """A model and its optimizer in this process."""

    setup: Setup
    model: Any
    optimizer: Any
    device: str

    @classmethod
    def begin(cls, setup: Setup, device: str, kind: Any, **options: Any) -> Training:
        torch.manual_seed(7)
        model = setup.wrap(Net().to(device), device)
        optimizer = setup.make(kind, model, **options)
        return cls(setup, setup.finish(model, device), optimizer, device)

    def train(self, first: int, last: int) -> list[float]:
        """Steps ``first`` to ``last``; the losses of this process's rows."""
        losses = []
        for number in range(first, last):
            parts = self.rows(number).chunk(1 if self.setup.accumulates is None else PARTS)
            for i, part in enumerate(parts):
                apart = self.setup.accumulates if i + 1 < len(parts) else None
                with (apart or contextlib.nullcontext)(self.model):
                    loss = mean_of_squares(self.model(part) - 0.5) / len(parts)
                    loss.backward()
                losses.append(loss.detach())
            if self.setup.clips is not None:
                self.setup.clips(self.model)
            self.setup.step(self.optimizer)
        return [float(loss) for loss in losses]

    def rows(self, number: int) -> torch.Tensor:
        """The rows of a batch that are for this process: its share of every part."""
        index, count = self.setup.share()
        rows = torch.randn(PARTS, ROWS, 6, generator=torch.Generator().manual_seed(number))
        return rows[:, index::count].reshape(-1, 6).to(self.device)

    def save(self, folder: Path) -> None:
        self.setup.save(self.model, self.optimizer, folder)

    def load(self, folder: Path) -> None:
        self.setup.load(self.model, self.optimizer, folder)

    def step_places(self) -> set[str]:
        """Devices of the step counts."""
        return {entry["step"].device.type for one in self.setup.inner(self.optimizer) for entry in one.state.values()}

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters and state, this process's own part."""
        names = {p: name for name, p in self.model.named_parameters()}
        found = {name: own(p) for p, name in names.items()}
        for one in self.setup.inner(self.optimizer):
            for p, entry in one.state.items():
                found |= {f"{names[p]}.{key}": own(value) for key, value in entry.items()}
        return found

    def whole(self) -> dict[str, torch.Tensor]:
        """Parameters and state, those of all processes put together."""
        found = dict(self.model.state_dict())
        state: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        for name, entry in state.items():
            found |= {f"{name}.{key}": value for key, value in entry.items()}
        return {name: own(value, whole=True) for name, value in found.items()}

    def kinds(self) -> set[type]:
        """Of state tensors that are no numbers."""
        entries = (e for one in self.setup.inner(self.optimizer) for e in one.state.values())
        return {type(value) for entry in entries for key, value in entry.items() if key != "step"}


def own(tensor: torch.Tensor, whole: bool = False) -> torch.Tensor:
    """A copy of this process's part, or of all parts put together."""
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.full_tensor() if whole else part.to_local()
    return part.cpu().clone()
