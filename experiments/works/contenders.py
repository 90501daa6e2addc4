"""Optimizers that step over a model: ours, torch's in all its ways, other packages'."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from experiments.harness.run import Run
from experiments.harness.time import Case
from experiments.works.models import HYPER, Work
from experiments.works.reference import Contender, Reference
from pagedopt import PagedAdamW, PagedSGD

OURS, FUSED, COPY = "PagedAdamW", "torch fused", "copy of its bytes"
FOREACH, LOOP, GRAPH = "torch foreach", "torch loop", "CUDA graph of torch fused"
COMPILED, COMPILED_LOOP = "torch.compile of foreach", "torch.compile of loop"
TRITON = "Triton over our table"
#: Their step is compiled by torch, tensor by tensor.
TORCHAO = ("torchao AdamW8bit", "torchao AdamW4bit")
Build = Callable[[list[torch.nn.Parameter]], Contender]


@dataclass(frozen=True)
class Family:
    """An optimizer of torch, ours that stands in for it, and the hyperparameters of both."""

    name: str
    plain: Callable[..., torch.optim.Optimizer]
    paged: Callable[..., torch.optim.Optimizer]
    hyper: Mapping[str, Any]
    capturable: bool = False


ADAMW = Family("AdamW", torch.optim.AdamW, PagedAdamW, HYPER, capturable=True)
SGD = Family("SGD", torch.optim.SGD, PagedSGD, {"lr": 1e-3})
MOMENTUM = Family("SGD with momentum", torch.optim.SGD, PagedSGD, {"lr": 1e-3, "momentum": 0.9})


def ours(family: Family = ADAMW, /, **options: Any) -> Build:
    """PagedAdamW, or another of ours."""
    return lambda params: Contender(family.paged(params, **family.hyper, **options).step)


def theirs(family: Family = ADAMW, /, **options: Any) -> Build:
    """torch.optim.AdamW, or another of torch's."""
    return lambda params: Contender(family.plain(params, **family.hyper, **options).step)


def compiled(family: Family = ADAMW, /, *, foreach: bool = True) -> Build:
    """torch.compile of torch's step, as torch's tutorial on compiled optimizers does it: on a GPU, lr in a tensor."""

    def build(params: list[torch.nn.Parameter]) -> Contender:
        hyper = dict(family.hyper)
        if params[0].is_cuda:  # torch refuses a tensor where steps are counted on the host
            hyper["lr"] = torch.tensor(hyper["lr"], device=params[0].device)
            hyper |= {"capturable": True} if family.capturable else {}
        optimizer = family.plain(params, **hyper, foreach=foreach)

        @torch.compile(fullgraph=False)
        def step() -> None:
            optimizer.step()

        return Contender(step)

    return build


def graphed(family: Family = ADAMW, /) -> Build:
    """A CUDA graph of torch's fused step, capturable where that is a question."""

    def build(params: list[torch.nn.Parameter]) -> Contender:
        capturable = {"capturable": True} if family.capturable else {}
        return captured(family.plain(params, **family.hyper, fused=True, **capturable).step)

    return build


def captured(step: Callable[[], object]) -> Contender:
    """A CUDA graph of a step, after two that warm it up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    warm = 2
    with torch.cuda.stream(side):
        for _ in range(warm):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(
        _step: Callable[[], object] = step,
    ) -> None:  # a graph writes to addresses; the step holds what lies there
        graph.replay()

    return Contender(replay, warm)


def bitsandbytes(name: str) -> Build:
    """An optimizer of bitsandbytes."""

    def build(params: list[torch.nn.Parameter]) -> Contender:
        from bitsandbytes import optim  # type: ignore[import-not-found]

        return Contender(getattr(optim, name)(params, **HYPER).step)

    return build


def torchao(name: str) -> Build:
    """An optimizer of torchao: less state, so fewer bytes than the others move."""

    def build(params: list[torch.nn.Parameter]) -> Contender:
        from torchao import optim  # type: ignore[import-not-found]

        return Contender(getattr(optim, name)(params, **HYPER).step)

    return build


def apex(params: list[torch.nn.Parameter]) -> Contender:
    """FusedAdam of apex, of which torch's fused step comes."""
    from apex.optimizers import FusedAdam  # type: ignore[import-not-found]

    return Contender(FusedAdam(params, adam_w_mode=True, **HYPER).step)


def triton(params: list[torch.nn.Parameter]) -> Contender:
    """A kernel in Triton over our table of pointers, after a first step: whatever its compiler says is a refusal.

    Raises:
        RuntimeError: it does not compile.
    """
    from experiments.works.triton_table import TableAdamW

    optimizer = TableAdamW(params, **HYPER)
    try:
        optimizer.step()
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return Contender(optimizer.step, 1)


#: By name; those of another package are left out where it is missing.
CONTENDERS: dict[str, Build] = {
    OURS: ours(),
    "PagedAdamW, managed state": ours(placement="managed"),
    FUSED: theirs(fused=True),
    FOREACH: theirs(foreach=True),
    LOOP: theirs(foreach=False),
    GRAPH: graphed(),
    COMPILED: compiled(),
    COMPILED_LOOP: compiled(foreach=False),
    "bitsandbytes AdamW32bit": bitsandbytes("AdamW32bit"),
    "bitsandbytes PagedAdamW32bit": bitsandbytes("PagedAdamW32bit"),
    "bitsandbytes AdamW8bit": bitsandbytes("AdamW8bit"),
    **{name: torchao(name.split()[1]) for name in TORCHAO},
    "apex FusedAdam": apex,
    TRITON: triton,
}
#: Seconds after which a compilation is given up: that it was is a result.
LIMIT = 300
PACKAGES = ("bitsandbytes", "torchao", "triton", "apex")


def installed(run: Run, names: Iterable[str]) -> list[str]:
    """Those whose package is here; the others are left out, each package once."""
    known = list(names)
    packages = {name: package for name in known if (package := name.split()[0].lower()) in PACKAGES}
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
        except Exception as error:  # what may go wrong in others' code is anything
            if name == OURS:
                raise
            run.left_out.append(f"{work.name}, {name}: {type(error).__name__}: {str(error).strip()[:600]}")
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
