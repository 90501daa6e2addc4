"""How many kernels does a step of N tensors launch on each rung, and is it what the code says?

Answer (H200, 2026-11): AdamW over 1,000 tensors is 8,000 kernels in a loop, 115 as foreach, 38 as fused (the same in
one launch of a graph) and one over a pointer list; every count is what the code says.

N tensors of (2, 3); an addition, SGD, AdamW.  Kernels and launches are counted in traces on a
GPU, operators where torch dispatches them.  Beside them stands what the code must launch: M kernels a tensor in the
loop, and in foreach and fused torch's batching, simulated with the constants of the header that is installed.  A line
through the counts, a + b N, says what a further tensor costs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pagedopt
from experiments.columns import last_line
from experiments.device import chosen_device
from experiments.lab import Page, Row, Rows, Run
from experiments.works import builds
from experiments.works.builds import ADAMW, SGD, Family
from experiments.works.contenders import LIMIT
from experiments.works.dispatch import dispatched
from experiments.works.fresh import fresh
from experiments.works.models import COMPILED, FOREACH, FUSED, GRAPH, LOOP, Bound, Build, Work
from experiments.works.trace import Incomplete, counted
from pagedopt.rules import UPDATES, Rule
from pagedopt.rules.adamw import adamw
from pagedopt.rules.elementwise import add
from pagedopt.rules.sgd import sgd
from pagedopt.tables.layout import HEADER, WORD, HostTable, batches
from pagedopt.transports.by_value import ARGUMENT_BYTES

TORCHS = Path("ATen", "native", "cuda", "MultiTensorApply.cuh")
#: (lists, whether each tensor has a scalar of its own) of the kernels of a step, none of which is on the host.
Kernels = Sequence[tuple[int, bool]]
#: mul, lerp, mul, addcmul, sqrt, div, add, addcdiv.
FOREACH_ADAMW: Kernels = ((1, False), (2, False), (1, False), (3, False), (2, False), (1, True), (1, False), (3, True))
#: param -= lr * grad.
FOREACH_SGD: Kernels = ((2, False),)


@dataclass(frozen=True)
class Limits:
    """What one launch carries.

    Attributes:
        tensors: at most so many, by number of lists less one.
        blocks: at most so many chunks, likewise.
        tensors_with_scalars: as ``tensors``, where each tensor has a scalar.
        chunk: elements of a chunk.
        source: the file, and for which CUDA it was read.
    """

    tensors: tuple[int, ...]
    blocks: tuple[int, ...]
    tensors_with_scalars: tuple[int, ...]
    chunk: int
    source: str = ""

    def launches(self, numels: Iterable[int], depth: int, scalars: bool = False) -> int:
        """Launches over ``depth`` lists of tensors with so many elements.

        A launch is full when its last tensor is whole, or when it has all its blocks: a tensor that is cut there is the
        first of the next launch.
        """
        most = (self.tensors_with_scalars if scalars else self.tensors)[depth - 1]
        most_blocks = self.blocks[depth - 1]
        launches = tensors = blocks = 0
        for numel in numels:
            left = -(-numel // self.chunk)
            tensors += left > 0
            while left:
                taken = min(left, most_blocks - blocks)
                left, blocks = left - taken, blocks + taken
                if blocks == most_blocks or (tensors == most and not left):
                    launches, blocks, tensors = launches + 1, 0, int(left > 0)
        return launches + (blocks > 0)

    def step(self, numels: Sequence[int], kernels: Kernels) -> int:
        """Launches of several kernels over the same lists."""
        return sum(self.launches(numels, depth, scalars) for depth, scalars in kernels)


def parsed(text: str, cuda: int, source: str = "") -> Limits:
    """The constants in the header's text, as a compiler with this ``CUDART_VERSION`` (13000: CUDA 13.0) reads them.

    Raises:
        RuntimeError: they are not where they used to be.
    """

    def chosen(found: re.Match[str]) -> str:
        return found[2] if cuda >= int(found[1]) else found[3]

    # Without the branches for another CUDA; conditions that say nothing of it are kept.
    condition = r"#if[^\n]*CUDART_VERSION\s*>=\s*(\d+)[^\n]*\n(.*?)#else[^\n]*\n(.*?)#endif"
    text = re.sub(condition, chosen, text, flags=re.DOTALL)

    def numbers(name: str) -> tuple[int, ...]:
        found = re.search(rf"\b{name}\s*(?:\[\d*\])?\s*=\s*\{{?\s*([\d,\s]+?)\s*\}}?\s*;", text)
        if found is None:
            raise RuntimeError(f"{source or TORCHS}: there is no {name} in it")
        return tuple(int(number) for number in found[1].replace(",", " ").split())

    names = ("depth_to_max_tensors", "depth_to_max_blocks", "depth_to_max_tensors_scalarlist")
    tensors, blocks, scalars = map(numbers, names)
    return Limits(tensors, blocks, scalars, numbers("kChunkSize")[0], source)


@functools.cache
def installed(cuda: int | None = None) -> Limits:
    """The limits of the installed torch, by default as it was built; a torch without CUDA counts as of CUDA 13.0.

    Raises:
        OSError: it came without its headers.
        RuntimeError: they have changed.
    """
    if cuda is None:
        major, minor = (torch.version.cuda or "13.0").split(".")[:2]
        cuda = 1000 * int(major) + 10 * int(minor)
    source = f"{TORCHS.name} of torch {torch.__version__}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    return parsed((Path(torch.__file__).parent / "include" / TORCHS).read_text(), cuda, source)


LIST, STRUCT = "one pointer list (ours)", "ours in structs of 4 KB"
#: What torch chooses if it is told nothing.
DEFAULT = "torch, by default"
#: The added multiple.
ALPHA = -1e-3


@dataclass(frozen=True)
class Operation:
    """Something that a step may do to every parameter, on every rung.

    Attributes:
        builds: by rung; those that a GPU is needed for are in it.
        each: kernels of the loop for a tensor, on a GPU.
        on_cpu: operators of the loop for a tensor, on a CPU: the step count is a tensor there, too.
        kernels: of foreach; of the fused kernel ``fused``.
        rule: of ours.
    """

    name: str
    builds: dict[str, Build]
    each: int
    on_cpu: int
    kernels: Kernels
    fused: Kernels
    rule: Rule

    def expected(self, rung: str, numels: Sequence[int], limits: Limits) -> int | None:
        """Kernels that a rung launches on a GPU, as its text says; None where that is a compiler's choice."""
        if rung == LOOP:
            return self.each * len(numels)
        if rung == STRUCT:
            return by_value(self.rule, numels)
        foreach, fused = limits.step(numels, self.kernels), limits.step(numels, self.fused)
        return {FOREACH: foreach, DEFAULT: foreach, FUSED: fused, LIST: 1}.get(rung)

    def operators(self, rung: str, count: int) -> int | None:
        """Operators of torch that a rung calls on a CPU, whose default is the loop."""
        if rung in (LOOP, DEFAULT):
            return self.on_cpu * count
        if rung == FOREACH:
            return len(self.kernels) + (self.on_cpu > self.each)
        return len(self.fused) if rung == FUSED else 0


def by_value(rule: Rule, numels: Sequence[int]) -> int:
    """Launches of ours if the table travels in structs of 4 KB; an optimizer's has room for twice its one group."""
    table = HostTable(len(rule.inputs), numels, rule.uniform_count, sets=2 if rule.name in UPDATES else 1)
    return len(list(batches(table, (ARGUMENT_BYTES[0] - HEADER.itemsize) // WORD)))


def stepped(family: Family) -> dict[str, Build]:
    """An optimizer on every rung."""
    return {
        LOOP: builds.theirs(family, foreach=False),
        FOREACH: builds.theirs(family, foreach=True),
        FUSED: builds.theirs(family, fused=True),
        DEFAULT: builds.theirs(family),
        GRAPH: builds.graphed(family),
        COMPILED: builds.compiled(family),
        LIST: builds.ours(family),
        STRUCT: builds.ours(family, transport="struct"),
    }


def adding(run: Callable[[list[torch.Tensor], list[torch.Tensor]], object]) -> Build:
    """An addition of multiples of gradients, without an optimizer around it."""

    def build(params: list[torch.nn.Parameter]) -> Bound:
        values, grads = [p.detach() for p in params], [p.grad for p in params if p.grad is not None]
        return Bound(lambda: run(values, grads))

    return build


def add_each(values: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """One by one."""
    for value, grad in zip(values, grads, strict=True):
        value.add_(grad, alpha=ALPHA)


ADD = {
    LOOP: adding(add_each),
    FOREACH: adding(lambda values, grads: torch._foreach_add_(values, grads, alpha=ALPHA)),
    LIST: adding(lambda values, grads: pagedopt.foreach_add_(values, grads, alpha=ALPHA)),
}
OPERATIONS = (
    Operation("add", ADD, 1, 1, FOREACH_SGD, (), add),
    Operation(SGD.name, stepped(SGD), 1, 1, FOREACH_SGD, ((2, False),), sgd),
    # The fused step counts its steps on the GPU, in a launch over a list of numbers.
    Operation(ADAMW.name, stepped(ADAMW), 8, 9, FOREACH_ADAMW, ((4, False), (1, False)), adamw),
)


MEASURES = ("launch", "tables", "transports", "optim")
COUNTS, TOYS = (1, 10, 36, 37, 48, 110, 111, 300, 1000), (1, 10, 37)
#: Lists that are compiled: longer ones take minutes (the question of compiled_optimizer).
COMPILED_COUNTS, COMPILED_ON_CPU = (1, 10, 36, 110), (1, 4, 8)
#: What a GPU is needed for.
ON_GPU = (GRAPH, STRUCT)


def measure(run: Run) -> Iterator[Row]:
    """A row per operation, rung and N: operators, kernels, launches, and how many there ought to be."""
    run.say(f"batching as in {installed().source}")
    cpu = run.device.type == "cpu"
    for operation in run.each(OPERATIONS):
        for rung in operation.builds:
            if rung != COMPILED and not (cpu and rung in ON_GPU):
                with run.attempt(f"{operation.name}, {rung}", (Exception,)):
                    for count in run.size(COUNTS, TOYS):
                        yield row(operation, rung, count, run.device)
        if COMPILED not in operation.builds:
            continue
        if run.quick:
            run.left_out.append(f"{operation.name}, {COMPILED}: takes a compiler and tens of seconds")
            continue
        counts = COMPILED_ON_CPU if cpu else COMPILED_COUNTS
        found = fresh(compiled_counts, str(run.device), operation.name, counts, limit=LIMIT)
        yield from found.rows
        for count in counts[len(found.rows) :]:  # what it did not reach in its time
            yield {**blank(operation, COMPILED, count, run.device), "ended": found.ended}
    if cpu:
        run.left_out.append("kernels and launches, CUDA graphs, tables by value: need a GPU")


def blank(operation: Operation, rung: str, count: int, device: torch.device) -> Row:
    """A row of which nothing is known."""
    about = {"what": "count", "operation": operation.name, "rung": rung, "count": count, "device": device.type}
    return about | dict.fromkeys(("operators", "kernels", "launches", "expected", "ended"))


def row(operation: Operation, rung: str, count: int, device: torch.device) -> Row:
    """What a step over so many tensors of (2, 3) launches, once it has run a few times."""
    shapes = [(2, 3)] * count
    step = operation.builds[rung](Work("counted", shapes).parameters(device)).step
    for _ in range(3):
        step()
    found = blank(operation, rung, count, device)
    if rung != COMPILED:  # what listens to the dispatcher keeps a compiler out
        found["operators"] = dispatched(step).total()
    if device.type == "cpu":
        return {**found, "expected": operation.operators(rung, count)}
    try:
        counts = counted(step)
    except Incomplete as error:
        return {**found, "ended": str(error)}
    expected = operation.expected(rung, [2 * 3] * count, installed())
    return {**found, "kernels": counts.kernels, "launches": counts.launches, "expected": expected}


def compiled_counts(device: str, operation: str, counts: Sequence[int]) -> Iterator[Row]:
    """In a process of its own: rows of the compiled rung, with the kernels that Inductor wrote for each."""
    from torch._inductor import metrics

    (asked,) = (one for one in OPERATIONS if one.name == operation)
    where = chosen_device(device)
    for count in counts:
        torch._dynamo.reset()  # each list is a graph of its own, and eight of one function are the most
        metrics.reset()
        found = row(asked, COMPILED, count, where)
        generated = getattr(metrics, "generated_kernel_count", None)
        kernels = generated if where.type == "cpu" else found["kernels"]
        yield {**found, "kernels": kernels, "expected": None, "generated": generated}


def derive(rows: Rows) -> Rows:
    """What is held to what ought to be, how far it is from that, and a line through the counts of each rung.

    Seen are kernels on a GPU; on a CPU operators, or the kernels that Inductor wrote, those of the first step among
    them.
    """
    found = Rows()
    for counts in rows.groups("operation", "rung"):
        column = "operators" if counts[0]["device"] == "cpu" and counts[0]["rung"] != COMPILED else "kernels"
        for one in counts:
            seen, due = one[column], one["expected"]
            off = None if seen is None or due is None else abs(seen - due)
            batched = off if one["rung"] in (FOREACH, FUSED) else None
            found.append({**one, "seen": seen, "off": off, "off_batched": batched})
        known = [(one["count"], one[column]) for one in counts if one[column] is not None]
        if len(known) > 2:
            about = {name: counts[0][name] for name in ("operation", "rung", "device")}
            found.append({**about, "what": "line", **line(known)})
    return found


def line(points: Sequence[tuple[int, int]]) -> dict[str, float]:
    """a + b N through (N, count), and how far the farthest point is from it."""
    across, up = np.array(points, float).T
    b, a = np.polyfit(across, up, 1)
    farthest = abs(up - a - b * across).max()
    return {"a": round(float(a), 6) + 0.0, "b": round(float(b), 6) + 0.0, "farthest": round(float(farthest), 6)}


def shown(row: Row) -> str:
    """Kernels (launches, if they are not as many); on a CPU operators; what ought to be where it is not."""
    seen = row["seen"]
    if seen is None:
        return last_line()(row) or "-"
    launched = f"{seen:,}" if row["launches"] in (None, seen) else f"{seen:,} in {row['launches']:,}"
    return f"{launched} (not {row['expected']:,})" if row["off"] else launched


def default(rows: Rows) -> str | None:
    """Which rung torch takes by itself."""
    steps = rows.where(what="count", operation="AdamW")
    seen = {rung: [(one["count"], one["seen"]) for one in steps.where(rung=rung)] for rung in (LOOP, FOREACH, FUSED)}
    mine = [(one["count"], one["seen"]) for one in steps.where(rung=DEFAULT)]
    same = " and ".join(rung for rung, its in seen.items() if mine and its == mine)
    return f"Left to itself, `torch.optim.AdamW(params)` on {rows[0]['device']} does as {same} does." if same else None


TITLE = "{operation}: kernels of a step over N tensors of (2, 3); on a CPU operators"
#: Numbers of tensors whose column says no more than its neighbours'.
LIKE_OTHERS = (10, 48)
GRID: dict[str, Any] = {"down": "rung", "across": "count", "cell": shown, "corner": "N"}


def report(page: Page, rows: Rows) -> None:
    """A table, what follows, and what is held to a limit."""
    steps = rows.where(what="count", operation="AdamW")
    some = Rows(row for row in steps if row["rung"] not in (DEFAULT, GRAPH) and row["count"] not in LIKE_OTHERS)
    page.grid(TITLE, some, **GRID)
    page.say(default(rows))
    page.bar("the loop launches M x N, off by", rows.where(rung=LOOP), "off", "≤ 0")
    page.bar("foreach and fused launch what the header says, off by", rows, "off_batched", "≤ 0")
    page.bar("ours in structs of 4 KB launches what its table says, off by", rows.where(rung=STRUCT), "off", "≤ 0")
    page.bar("launches of ours, at any N", rows.where(rung=LIST), "launches", "≤ 1")
