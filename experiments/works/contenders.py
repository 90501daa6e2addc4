"""Optimizers that step over a model: ours, torch's in all its ways, other packages'."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from experiments.harness.run import Run
from experiments.harness.time import Case
from experiments.works.models import HYPER, Work
from experiments.works.reference import Contender, Reference
from pagedopt import PagedAdamW

OURS, FUSED, COPY = "PagedAdamW", "torch fused", "copy of its bytes"
Build = Callable[[list[torch.nn.Parameter]], Contender]


def ours(**options: Any) -> Build:
    """PagedAdamW."""
    return lambda params: Contender(PagedAdamW(params, **HYPER, **options).step)


def theirs(**options: Any) -> Build:
    """torch.optim.AdamW."""
    return lambda params: Contender(torch.optim.AdamW(params, **HYPER, **options).step)


def compiled(params: list[torch.nn.Parameter]) -> Contender:
    """torch.compile of the foreach step, as torch's tutorial on compiled optimizers does it (lr in a tensor)."""
    hyper = {**HYPER, "lr": torch.tensor(HYPER["lr"], device=params[0].device)}
    optimizer = torch.optim.AdamW(params, **hyper, foreach=True, capturable=params[0].is_cuda)

    @torch.compile(fullgraph=False)
    def step() -> None:
        optimizer.step()

    return Contender(step)


def graphed(params: list[torch.nn.Parameter]) -> Contender:
    """A CUDA graph of the capturable fused step."""
    optimizer = torch.optim.AdamW(params, **HYPER, fused=True, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    warm = 2
    with torch.cuda.stream(side):
        for _ in range(warm):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return Contender(graph.replay, warm)


def bitsandbytes(name: str) -> Build:
    """An optimizer of bitsandbytes."""

    def build(params: list[torch.nn.Parameter]) -> Contender:
        from bitsandbytes import optim  # type: ignore[import-not-found]

        return Contender(getattr(optim, name)(params, **HYPER).step)

    return build


def torchao_8bit(params: list[torch.nn.Parameter]) -> Contender:
    """AdamW8bit of torchao: less state, so fewer bytes than the others move."""
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    return Contender(AdamW8bit(params, **HYPER).step)


#: By name; those of another package are left out where it is missing.
CONTENDERS: dict[str, Build] = {
    OURS: ours(),
    "PagedAdamW, managed state": ours(placement="managed"),
    FUSED: theirs(fused=True),
    "torch foreach": theirs(foreach=True),
    "torch loop": theirs(foreach=False),
    "CUDA graph of torch fused": graphed,
    "torch.compile of foreach": compiled,
    "bitsandbytes AdamW32bit": bitsandbytes("AdamW32bit"),
    "bitsandbytes PagedAdamW32bit": bitsandbytes("PagedAdamW32bit"),
    "torchao AdamW8bit": torchao_8bit,
}


def installed(run: Run, names: Iterable[str]) -> list[str]:
    """Those whose package is here; the others are left out, each package once."""
    known = list(names)
    packages = {name: package for name in known if (package := name.split()[0]) in ("bitsandbytes", "torchao")}
    missing = sorted({package for package in packages.values() if importlib.util.find_spec(package) is None})
    run.left_out += [line for package in missing if (line := f"{package}: not installed") not in run.left_out]
    return [name for name in known if packages.get(name) not in missing]


def checked(
    run: Run, work: Work, builds: Mapping[str, Build], device: torch.device
) -> tuple[list[Case], dict[str, float]]:
    """A case per contender, each over parameters of its own, after four of its updates; and their errors.

    Raises:
        AssertionError: our update is not right.
    """
    first = work.parameters(device)
    grads = [p.grad for p in first if p.grad is not None]
    reference = Reference(first)
    cases, errors = [], {}
    for name, build in builds.items():
        params = work.parameters(device, grads)
        try:
            contender = build(params)
            errors[name] = reference.error(params, contender)
        except (RuntimeError, ImportError) as error:
            if name == OURS:
                raise
            run.left_out.append(f"{work.name}, {name}: {error}")
            continue
        if not errors[name] <= work.tolerance:
            what = f"{work.name}, {name}: its update is off by {errors[name]:.2g} of itself, allowed {work.tolerance:g}"
            if name == OURS:
                raise AssertionError(what)
            run.left_out.append(f"{what}; timed all the same")
        cases.append(Case(name, contender.step))
    return cases, errors


def copy_of_bytes(work: Work, device: torch.device) -> Case:
    """Read half the bytes of an update and write the other half."""
    source = torch.rand(work.bytes_each * work.numel // 8, device=device)
    target = torch.empty_like(source)
    return Case(COPY, lambda: target.copy_(source))
