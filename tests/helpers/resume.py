"""The training that the resume tests interrupt, and the program that goes on with it in a process of its own.

``python resume.py FOLDER`` carries out the cases in ``FOLDER/cases.json`` and writes ``FOLDER/results.json``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from children import python
from stand_ins import refusal

from pagedopt import PagedAdamW

#: Steps before the checkpoint, and as many behind it.
STEPS = 5
SHAPES = {"cpu": ((130, 257), (1000, 96), (7,), (96, 3, 5, 5)), "cuda": ((1023, 1025), (1500, 1001), (7,), (1 << 19,))}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A checkpoint and the optimizer that loads it.

    Attributes:
        file: the checkpoint's name, without the parameters' dtype.
        placement, budget: of the optimizer; a budget below 1 is a share of the state.
        dtype: of the parameters; the state is float32.
        map_location: for ``torch.load``; ``mmap`` maps the file into memory.
    """

    file: str
    placement: str | None
    budget: float | None
    dtype: str = "float32"
    map_location: str | None = None

    @property
    def name(self) -> str:
        return f"{self.file} -> {self.placement} {self.budget} {self.dtype} {self.map_location}"


def parameters(device: str, dtype: str, seed: int = 1) -> list[torch.nn.Parameter]:
    """One of them in another layout than the others."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator).to(device, DTYPES[dtype]) for shape in SHAPES[device]]
    return [torch.nn.Parameter(p.to(memory_format=torch.channels_last) if p.dim() == 4 else p) for p in params]


def state_bytes(device: str) -> int:
    """Of AdamW's two moments in float32."""
    return 8 * sum(torch.Size(shape).numel() for shape in SHAPES[device])


def optimizer(params: list[torch.nn.Parameter], placement: str | None, budget: float | None, **options: Any) -> Any:
    """Two groups with different hyperparameters, and state in float32."""
    if budget is not None and budget < 1:
        budget = int(budget * state_bytes(params[0].device.type))
    groups = [{"params": params[1:], "lr": 0.02, "weight_decay": 0.3}, {"params": params[:1], "betas": (0.8, 0.9)}]
    extra = {} if budget is None else {"device_budget": budget}
    return PagedAdamW(groups, state_format="float32", placement=placement, **extra, **options)


def train(params: list[torch.nn.Parameter], opt: Any, first: int, steps: int = STEPS) -> None:
    """Gradients that depend on the step and the parameters and use no matrix product: the same bits everywhere."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            noise = torch.randn(997, generator=generator).to(p.device, p.dtype)
            p.grad = p.detach() * 0.1 + noise.repeat(-(-p.numel() // 997))[: p.numel()].reshape(p.shape)
            if i == step % 3:
                p.grad = None
        opt.step()


def digest(params: list[torch.nn.Parameter], opt: Any) -> str:
    """One number for all bits of parameters and state."""
    found = hashlib.sha256()
    for p in params:
        for tensor in (p.detach(), *opt.state[p].values()):
            found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
            found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save(folder: Path, file: str, dtype: str, params: list[torch.nn.Parameter], opt: Any) -> None:
    torch.save({"params": [p.detach() for p in params], "optimizer": opt.state_dict()}, folder / f"{file}-{dtype}.pt")


def resume(folder: Path, case: Case, device: str) -> str:
    """Load, go on to the end, and return the digest; on the way there a load that has to fail."""
    how = {"mmap": True} if case.map_location == "mmap" else {"map_location": case.map_location}
    saved = torch.load(folder / f"{case.file}-{case.dtype}.pt", weights_only=True, **how)
    params = parameters(device, case.dtype, seed=2)
    opt = optimizer(params, case.placement, case.budget, lr=7.0)
    broken = {**saved["optimizer"], "state": {**saved["optimizer"]["state"], 3: {"step": 5}}}
    assert refusal(functools.partial(opt.load_state_dict, broken), ValueError), "a dict without moments was loaded"
    assert not opt.state
    with torch.no_grad():
        for p, value in zip(params, saved["params"], strict=True):
            p.copy_(value)
    opt.load_state_dict(saved["optimizer"])
    del saved, broken
    train(params, opt, STEPS)
    return digest(params, opt)


def in_new_process(folder: Path, cases: list[Case], device: str, timeout: float = 100) -> dict[str, str]:
    """The digest of each case, or what went wrong."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    python(__file__, folder, device, timeout=timeout)
    found: dict[str, str] = json.loads((folder / "results.json").read_text())
    return found


def main(folder: Path, device: str) -> None:
    results = {}
    for fields in json.loads((folder / "cases.json").read_text()):
        case = Case(**fields)
        try:
            results[case.name] = resume(folder, case, device)
        except Exception:
            results[case.name] = traceback.format_exc()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors, many operations: threads would spend their time waiting for each other
    main(Path(sys.argv[1]), sys.argv[2])
