"""Checkpoints of the pagedopt found on the path, which ``tests/optim/test_checkpoint_foreign.py`` reads for ever.

The files in ``data`` are from commit 5d310f2.  They were made by

    mkdir /tmp/old && git archive 5d310f2 pagedopt | tar x -C /tmp/old
    PYTHONPATH=/tmp/old python tests/optim/write_golden.py tests/helpers/data/pagedopt-5d310f2-cpu.pt
    PYTHONPATH=/tmp/old python tests/optim/write_golden.py tests/helpers/data/pagedopt-5d310f2-cuda.pt --device cuda

Of each case there are the parameters after some steps, the state dict as it was then (its tensors as ``torch.save``
found them, in the storages of their arenas), gradients, and the parameters after ``AFTER`` steps with these.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagedopt import PagedAdamW, PagedSGD, __version__

BEFORE, AFTER = 3, 2
#: Odd sizes, and a scalar.  Where a page stays, the first is longer than a page, as that commit has them.
SHAPES: tuple[tuple[int, ...], ...] = ((20_000,), (), (13, 18), (5, 9))
PAGE = {"cpu": 64 << 10, "cuda": 8 << 20}
ADAMW: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.7, "dampening": 0.4, "weight_decay": 0.2}

#: Name: class, hyperparameters, dtype of the parameters, ``state_format``.
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], torch.dtype, str | None]] = {
    "adamw": (PagedAdamW, ADAMW, torch.float32, None),
    "amsgrad": (PagedAdamW, {**ADAMW, "amsgrad": True}, torch.float32, None),
    "momentum": (PagedSGD, SGD, torch.float32, None),
    "plain sgd": (PagedSGD, {**SGD, "momentum": 0, "dampening": 0}, torch.float32, None),
    "bfloat16": (PagedAdamW, ADAMW, torch.bfloat16, None),
    "bfloat16, float32 state": (PagedAdamW, ADAMW, torch.bfloat16, "float32"),
    "bfloat16 state": (PagedAdamW, ADAMW, torch.float32, "bfloat16"),
}
#: Where state was.
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "resident": {},
        "host": {"placement": "host"},
        "file": {"placement": "file", "device_budget": 0},
        "file, a page stays": {"placement": "file"},
    },
    "cuda": {
        "resident": {},
        "host": {"placement": "host"},
        "staged": {"placement": "mapped", "device_budget": 0, "host_access": "staged"},
        "in place": {"placement": "mapped", "device_budget": 0, "host_access": "in_place"},
        "managed": {"placement": "managed", "device_budget": 0},
        "managed by the driver": {"placement": "managed-driver"},
        "staged, a page stays": {"placement": "mapped", "host_access": "staged"},
    },
}
#: Of what else there is a case: AdamW is everywhere, and every kind resident.
SPILLED = {
    "cpu": (("amsgrad", "file"), ("bfloat16, float32 state", "file"), ("momentum", "file, a page stays")),
    "cuda": (("amsgrad", "staged"), ("bfloat16, float32 state", "staged"), ("momentum", "staged, a page stays")),
}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Values between -1 and 1, none of them 0, the same on every device; they repeat, so that files are small."""
    k = torch.arange(torch.Size(shape).numel(), device=device)
    return (((k * 17 + seed * 29) % 61 * 2 - 61).float() / 64).reshape(shape).to(dtype)


def gradient(index: int, p: torch.Tensor, step: int) -> torch.Tensor:
    return values(tuple(p.shape), 7 * step + index, p.dtype, p.device.type)


def trained(kind: str, place: str, device: str, steps: int) -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters and their optimizer after some steps; the last parameter has no gradient in the first ``BEFORE``."""
    make, hyper, dtype, state_format = KINDS[kind]
    options, shapes = dict(PLACES[device][place]), list(SHAPES)
    if "a page stays" in place:
        sections = 1 if make is PagedSGD else 2
        options["device_budget"], shapes[0] = sections * PAGE[device], (PAGE[device] // 4 + 5000,)
    params = [torch.nn.Parameter(values(shape, 100 + i, dtype, device)) for i, shape in enumerate(shapes)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]
    optimizer = make(groups, state_format=state_format, **hyper, **options)
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = gradient(i, p, min(step, BEFORE))
        if step < BEFORE:
            params[-1].grad = None
        optimizer.step()
    return params, optimizer


def record(kind: str, place: str, device: str) -> dict[str, Any]:
    params, optimizer = trained(kind, place, device, BEFORE)
    later, _ = trained(kind, place, device, BEFORE + AFTER)
    return {
        "class": type(optimizer).__name__,
        "state_format": optimizer.state_format,
        "bytes": dict(optimizer.memory_report().by_place),
        "params": [p.detach() for p in params],
        "state_dict": optimizer.state_dict(),
        "grads": [gradient(i, p, BEFORE) for i, p in enumerate(params)],
        "steps": AFTER,
        "after": [p.detach() for p in later],
    }


def cases(device: str) -> list[tuple[str, str]]:
    resident = [(kind, "resident") for kind in KINDS]
    everywhere = [("adamw", place) for place in PLACES[device] if "a page stays" not in place or device == "cpu"]
    return list(dict.fromkeys((*resident, *everywhere, *SPILLED[device])))


def packed(content: dict[str, Any]) -> bytes:
    """What ``torch.save`` writes, with its parts compressed: pages are rounded up, and mostly zeros."""
    plain, small = io.BytesIO(), io.BytesIO()
    torch.save(content, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return small.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=sorted(PLACES), default="cpu")
    given = parser.parse_args()
    found = {f"{kind}, {place}": record(kind, place, given.device) for kind, place in cases(given.device)}
    versions = {"torch": str(torch.__version__), "pagedopt": __version__, "device": given.device}
    given.out.write_bytes(packed({"versions": versions, "cases": found}))
    print(f"{given.out}: {len(found)} cases, {given.out.stat().st_size:,} bytes")
