"""The training that these tests share; as a program, it goes on with what they have saved: ``training FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from .placement import Ordinary, SmallCard, SmallRam
from .rule import Tempered

Params = list[torch.nn.Parameter]

#: The first spans pages, of 64 KiB in a file and of 2 MiB on a card.
SHAPES = {"cpu": ((200, 201), (5, 9), (), (70,)), "cuda": ((1100, 1101), (5, 9), (), (70,))}
OPTIONS: dict[str, float] = {"lr": 0.03, "decay": 0.8, "eps": 1e-3}
#: Where state of parameters on a CPU may be, the first of them whole and in torch's own tensors.
PLACES: list[dict[str, Any]] = [
    {},
    {"device_budget": 0},
    {"device_budget": "50%"},
    {"placement": SmallRam, "device_budget": 100_000},
    {"placement": Ordinary},
]
ON_THE_CARD: list[dict[str, Any]] = [
    {},
    {"device_budget": 0},
    {"device_budget": 0.5, "host_access": "in_place"},
    {"placement": SmallCard, "device_budget": "60%"},
]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EVERYWHERE = [
    *(pytest.param("cpu", how, id=f"cpu {how}") for how in PLACES),
    *(pytest.param("cuda", how, id=f"cuda {how}", marks=gpu) for how in ON_THE_CARD),
]


def parameters(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES[device]]
    return [torch.nn.Parameter(value.to(device, dtype)) for value in found]


def optimizer(params: Params, **how: Any) -> Tempered:
    return Tempered([{"params": params[1:]}, {"params": params[:1], "lr": 0.01}], **OPTIONS, **how)


def gradient(p: torch.Tensor, step: int, number: int) -> torch.Tensor | None:
    """After the first step there is none now and then."""
    generator = torch.Generator().manual_seed(100 * step + number)
    value = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(torch.float32)
    return None if step and step % 4 == number else value.to(p.device, p.dtype)


def train(opt: torch.optim.Optimizer, params: Params, first: int, last: int) -> None:
    for step in range(first, last):
        for number, p in enumerate(params):
            p.grad = gradient(p, step, number)
        opt.step()


def trained(last: int, device: str = "cpu", **how: Any) -> tuple[Tempered, Params]:
    """An optimizer after its first steps, and its parameters."""
    params = parameters(device)
    opt = optimizer(params, **how)
    train(opt, params, 0, last)
    return opt, params


def bits(opt: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    """Copies of parameters and state."""
    return [t.detach().cpu().clone() for p in params for t in (p, *opt.state[p].values())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(one, other, strict=True))


def go_on(folder: Path) -> None:
    """From a checkpoint in each of ``PLACES``, and from each whole optimizer that was pickled."""
    begun, found = [], []
    saved = torch.load(folder / "checkpoint.pt")
    for how in PLACES:
        params = [torch.nn.Parameter(value.clone()) for value in saved["params"]]
        opt = optimizer(params, **how)
        opt.load_state_dict(saved["optimizer"])
        begun.append((opt, params))
    for opt, params in (*begun, *torch.load(folder / "pickled.pt", weights_only=False)):
        train(opt, params, 6, 10)
        found.append((opt.memory_report().placement, bits(opt, params)))
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    go_on(Path(sys.argv[1]))
