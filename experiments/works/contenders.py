"""Optimizers that step over a model: ours, torch's in all its ways, other packages'; each is one record."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.clock import Case
from experiments.lab import Row, Run, by_clock_of, over
from experiments.pictures import BLUE, GRAY, ORANGE, PURPLE
from experiments.works.graph import captured
from experiments.works.models import COPY, FOREACH, FUSED, GRAPH, HYPER, LOOP, OURS, Bound, Build, Work
from experiments.works.reference import Reference
from pagedopt import PagedAdamW, PagedSGD
from pagedopt.formats import FORMATS

OURS_GRAPH = f"{OURS} in a CUDA graph"
COMPILED = "torch.compile of foreach"
TRITON = "Triton over our table"
#: Elements of a tensor from which on packages quantize its state.
QUANTIZED_FROM = 4096
#: Bytes of two moments in 8 bits, with scales that belong to 256 numbers.
BITS_8 = 2 * (1 + 4 / 256)


@dataclass(frozen=True)
class Contender:
    """An optimizer that steps over a model.

    Attributes:
        build: of parameters with gradients.
        color: ours, torch's, what is compiled, or another package's.
        state: bytes of state for each parameter.
        crosses: whether some of its state crosses the link in a step.
        narrow_from: elements of a tensor from which on its state is narrow, and float32 below; 0: of all.
        needs: a package.
    """

    name: str
    build: Build
    color: str = BLUE
    state: float = 8.0
    crosses: bool = False
    narrow_from: int = 0
    needs: str = ""

    @property
    def moved(self) -> float | None:
        """Bytes that a step must move for each float32 parameter: it, its gradient, its state; None: over the link."""
        return None if self.crosses else 12 + 2 * self.state


@dataclass(frozen=True)
class Family:
    """An optimizer of torch, ours in its place, the hyperparameters of both, and options of torch's in a graph."""

    name: str
    plain: Callable[..., torch.optim.Optimizer]
    paged: Callable[..., torch.optim.Optimizer]
    hyper: Mapping[str, Any]
    graph: Mapping[str, Any] = field(default_factory=dict)


ADAMW = Family("AdamW", torch.optim.AdamW, PagedAdamW, HYPER, {"capturable": True})
SGD = Family("SGD", torch.optim.SGD, PagedSGD, {"lr": 1e-3})


def ours(family: Family = ADAMW, /, **options: Any) -> Build:
    """PagedAdamW, or another of ours, with the family's hyperparameters where ``options`` has no other."""
    return lambda params: Bound(family.paged(params, **{**family.hyper, **options}).step)


def theirs(family: Family = ADAMW, /, **options: Any) -> Build:
    """torch.optim.AdamW, or another of torch's."""
    return lambda params: Bound(family.plain(params, **family.hyper, **options).step)


def compiled(
    family: Family = ADAMW, /, *, foreach: bool = True, before: Callable[[Any], object] = len, **how: Any
) -> Build:
    """torch.compile of torch's step, as torch's tutorial on compiled optimizers does it: on a GPU, lr in a tensor.

    ``before``: what is done to the parameters in front of the step; ``how``: options of torch.compile.
    """

    def build(params: list[torch.nn.Parameter]) -> Bound:
        hyper = dict(family.hyper)
        if params[0].is_cuda:  # torch refuses a tensor where steps are counted on the host
            hyper |= {"lr": torch.tensor(hyper["lr"], device=params[0].device), **family.graph}
        optimizer = family.plain(params, **hyper, foreach=foreach)

        @torch.compile(fullgraph=False, **how)
        def step() -> None:
            before(params)
            optimizer.step()

        return Bound(step)

    return build


def graphed(family: Family = ADAMW, /) -> Build:
    """A CUDA graph of torch's fused step."""
    return lambda params: graph_of(theirs(family, fused=True, **family.graph)(params).step)


def graphed_ours() -> Build:
    """A CUDA graph of PagedAdamW."""
    return lambda params: graph_of(ours(capturable=True)(params).step)


def graph_of(step: Callable[[], object]) -> Bound:
    """A CUDA graph of a step, after two that warm it up."""
    return Bound(captured(step, 2), 2)


def other(module: str, name: str, state: float = 8.0) -> Contender:
    """An optimizer of another package, which quantizes large tensors if it has less state than two float32 numbers."""
    package, narrow_from = module.partition(".")[0], QUANTIZED_FROM if state < 8 else 0
    return Contender(f"{package} {name}", imported(module, name), ORANGE, state, False, narrow_from, package)


def imported(module: str, name: str) -> Build:
    """An optimizer of a module that is loaded when it is built."""
    return lambda params: Bound(getattr(importlib.import_module(module), name)(params, **HYPER).step)


def every() -> Iterator[Contender]:
    """All there are."""
    yield Contender(OURS, ours())
    yield Contender(f"{OURS}, device", ours(placement="device"))
    yield Contender(f"{OURS}, managed state", ours(placement="managed"))
    yield Contender(OURS_GRAPH, graphed_ours())
    for share in ("75%", "50%", "25%", "0%"):
        yield Contender(f"{OURS}, {share} on device", ours(device_budget=share), crosses=True)
    for name, of in FORMATS.items():
        if name not in ("float32", "float16"):  # AdamW's state is float32 without one, and float16 loses its squares
            width = 2 * sum(column.dtype.itemsize for column in of.columns)
            yield Contender(f"{OURS}, {name} state", ours(state_format=name), state=width)
    for how in ("nearest", "stochastic"):
        build = ours(state_format="int8", rounding=how)
        yield Contender(f"{OURS}, int8 {how}", build, state=BITS_8, narrow_from=QUANTIZED_FROM)
    yield Contender(FUSED, theirs(fused=True), GRAY)
    yield Contender(FOREACH, theirs(foreach=True), GRAY)
    yield Contender(LOOP, theirs(foreach=False), GRAY)
    yield Contender(GRAPH, graphed(), GRAY)
    yield Contender(COMPILED, compiled(), PURPLE)
    yield Contender(TRITON, imported("experiments.works.triton_table", "TableAdamW"), PURPLE, needs="triton")
    yield other("bitsandbytes.optim", "AdamW32bit")
    yield other("bitsandbytes.optim", "AdamW8bit", BITS_8)


CONTENDERS = {contender.name: contender for contender in every()}
#: Seconds after which a compilation is given up: that it was is a result.
LIMIT = 300


def color(name: str) -> str:
    """Of the contender whose name this begins with, or ours."""
    known = [c for c in CONTENDERS.values() if name.startswith(c.name)]
    return max(known, key=lambda contender: len(contender.name)).color if known else GRAY


def installed(run: Run, names: Iterable[str]) -> list[str]:
    """Those whose package is here; the others are left out, each package once."""
    known = list(names)
    needs = {name: CONTENDERS[name].needs for name in known if name in CONTENDERS and CONTENDERS[name].needs}
    missing = sorted({package for package in needs.values() if importlib.util.find_spec(package) is None})
    run.left_out += [line for package in missing if (line := f"{package}: not installed") not in run.left_out]
    return [name for name in known if needs.get(name) not in missing]


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
        is_ours = name.startswith(OURS)
        params = work.parameters(device, grads)
        with run.attempt(f"{work.name}, {name}", () if is_ours else (Exception,)):  # others' code may raise anything
            contender = build(params)
            errors[name] = reference.error(params, contender)
            cases.append(Case(name, contender.step))
        if not errors.get(name, 0.0) <= work.tolerance:
            what = f"{work.name}, {name}: its update is off by {errors[name]:.2g} of itself, allowed {work.tolerance:g}"
            if is_ours:
                raise AssertionError(what)
            run.leave_out(f"{what}; timed all the same")
    return cases, errors


def copy_of_bytes(work: Work, device: torch.device) -> Case:
    """Read half the bytes of an update and write the other half."""
    source = torch.rand(int(work.bytes_each * work.numel) // 8, device=device)
    target = torch.empty_like(source)
    return Case(COPY, lambda: target.copy_(source))


def of_copy(row: Row, copy: Row | None) -> float | None:
    """How fast a row is, in % of a copy of as many bytes, by the row's clock; None where there is no copy, or on a CPU.

    There a copy is no floor: a CPU reads a line of memory before it writes into it.  So a copy also reads its target,
    and nobody counts that; a step has read whatever it writes.
    """
    share = None if row["device"] == "cpu" else over(by_clock_of(row, copy), row["time"])
    return share and 100 * share
