"""Optimizers that step over a model: ours, torch's in all its ways, other packages'; each is one record."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from experiments.lab import Run
from experiments.pictures import BLUE, GRAY, ORANGE, PURPLE
from experiments.works.builds import compiled, graphed, graphed_ours, ours, theirs
from experiments.works.models import BITS_8, COMPILED, FOREACH, FUSED, GRAPH, HYPER, LOOP, OURS, Bound, Build
from pagedopt.formats import FORMATS

OURS_GRAPH = f"{OURS} in a CUDA graph"
TRITON = "Triton over our table"
#: Elements of a tensor from which on packages quantize its state.
QUANTIZED_FROM = 4096


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
