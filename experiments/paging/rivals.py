"""What does a step of others cost over the same parameters, with their state where ours is: on the host?

Answer (H200, 2026-11, wall): from the host and back to the host ours takes 44 ms and bitsandbytes' PagedAdamW32bit 143
(3.25 times), its step alone 54 (1.23 times); torchao's CPUOffloadOptimizer takes 59 for a backward that does next to
nothing and a step, of which some 19 are gradients on their way down; torch's fused step with all state on the device
takes 2.4.

Pages of bitsandbytes are pushed out after each step: a bar is as long as both take together, and solid as far as the
step alone; pushing out alone, in the table, takes not quite the rest.  Updates of others are held to float64.
bitsandbytes and torchao run in processes of their own, behind ours and not in turn with it: they may be absent, and may
end the process.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.child import Child
from experiments.clock import Case, Series
from experiments.columns import error, ms, ratio
from experiments.comparing import over
from experiments.lab import Column, Page, Row, Rows, Run
from experiments.pictures import ORANGE, Bars
from experiments.works import builds, contenders
from experiments.works.models import HYPER, Bound, Build
from experiments.works.paged import Problem
from experiments.works.reference import off_by
from experiments.works.states import push_out

NEEDS_GPU = True
MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
OURS, FUSED = "PagedAdamW, mapped, staged, budget 0", "torch fused, all on the device"
OURS_IN_PLACE = "PagedAdamW, mapped, in place, budget 0"
RIVAL, RIVAL_8BIT = "bitsandbytes PagedAdamW32bit", "bitsandbytes PagedAdamW8bit"
HERE = {
    OURS: builds.ours(placement="mapped", host_access="staged", device_budget=0),
    OURS_IN_PLACE: builds.ours(placement="mapped", host_access="in_place", device_budget=0),
    FUSED: builds.theirs(fused=True),
}
#: What is timed of a paged rival.
SAME, ALONE, BACK, WARM = "step and pushed out again", "step alone", "pushing out alone", "step, state still there"
#: Seconds until a rival's process is stopped.
LONGEST = 150
#: bitsandbytes never frees its managed memory: four optimizers' worth, two of them of a quarter of the size.
TAKEN = 2.5
#: Managed memory stays below this, and below a quarter of what is free.
MOST_MANAGED = 8 << 30


def measure(run: Run) -> Iterator[Row]:
    """Rows of (contender, what is timed) with their times."""
    problem = Problem(run)
    with run.attempt("ours and torch fused"):
        steps = [Case(name, build(problem.parameters()).step) for name, build in HERE.items()]
        for name, times in run.measure(steps, seconds=2.0).items():
            yield {"name": name, "what": "step", "numel": problem.work.numel, **times}
        del steps
    for package, function in run.each(PACKAGES.items()):
        if importlib.util.find_spec(package) is None:
            run.leave_out(f"{package}: not installed")
            continue
        child = Child(function, str(run.device), run.quick, limit=LONGEST)
        for row in child:
            run.say(f"{row['name']}, {row['what']}: {row['wall']['median'] / 1e3:,.1f} ms")
            yield row
        if child.ended:
            run.leave_out(f"{package}: its process {child.ended}")


# --- in a process of its own


def _begun(device: str, quick: bool) -> Problem:
    torch.cuda.set_device(torch.device(device))
    return Problem(Run(torch.device(device), quick))


def waited(run: Run, case: Case, rounds: int, seconds: float) -> Series:
    """Wall times of what blocks the host or moves pages: it is waited for, and so is what comes before it."""

    def call(part: Callable[[], object]) -> None:
        part()
        torch.cuda.synchronize()

    both = Case(case.name, functools.partial(call, case.run), functools.partial(call, case.prepare))
    times = run.measure([both], rounds=rounds, seconds=seconds, warmup=1, device=torch.device("cpu"))
    wall: Series = times[case.name]["wall"]
    return wall


def bitsandbytes(device: str, quick: bool) -> Iterator[Row]:
    """Paged state from the host and back to the host: a step, then its pages pushed out; and the pieces alone."""
    from bitsandbytes import functional  # type: ignore[import-not-found]

    problem = _begun(device, quick)
    needed, most = TAKEN * problem.state_bytes, min(MOST_MANAGED, torch.cuda.mem_get_info(problem.device)[0] // 4)
    if needed > most:
        raise MemoryError(f"bitsandbytes would take {needed:,.0f} bytes of managed memory; {most:,} are allowed")
    paged: list[torch.Tensor] = functional.GlobalPageManager.get_instance().paged_tensors
    for name in (RIVAL, RIVAL_8BIT):
        build = contenders.other("bitsandbytes.optim", name.split()[1]).build
        off = off_by(build, problem.parameters())
        paged.clear()
        problem.run.free()
        yield from ({"name": name, "error": off, **row} for row in _pieces(problem, build, paged))
        paged.clear()
        problem.run.free()


def _pieces(problem: Problem, build: Build, paged: list[torch.Tensor]) -> Iterator[Row]:
    """A step and pushing out, together and alone: what brings pages where a case wants them is outside of the clock."""
    step = build(problem.parameters()).step
    step()
    places = [(t.data_ptr(), t.nbytes) for t in paged]
    out = functools.partial(push_out, places, problem.device)

    def step_and_out() -> None:
        step()
        out()

    out()
    for case, rounds, seconds in (
        (Case(SAME, step_and_out), 8, 3.0),
        (Case(ALONE, step, before=out), 6, 2.0),
        (Case(BACK, out, before=step), 6, 2.0),
        (Case(WARM, step), 6, 1.0),
    ):
        wall = waited(problem.run, case, rounds, seconds)
        about = {"what": case.name, "paged_bytes": sum(nbytes for _, nbytes in places), "numel": problem.work.numel}
        yield {**about, "wall": wall, "gpu": None}


def offloaded(params: list[torch.nn.Parameter]) -> Bound:
    """torchao's optimizer, with a backward that does nothing but hand gradients out."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    grads = [p.grad for p in params if p.grad is not None]
    optimizer = CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True, **HYPER)

    def backward_and_step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(params, grads)
        optimizer.step()

    return Bound(backward_and_step)


def torchao(device: str, quick: bool) -> Iterator[Row]:
    """State, and the update itself, on the CPU; gradients go down during a backward that costs next to nothing."""
    problem = _begun(device, quick)
    more = {
        "error": off_by(offloaded, problem.parameters()),
        "threads": torch.get_num_threads(),
        "numel": problem.work.numel,
    }
    problem.run.free()
    case = Case("backward and step", offloaded(problem.parameters()).step)
    wall = waited(problem.run, case, 8, 3.0)
    yield {"name": "torchao CPUOffloadOptimizer", "what": case.name, "wall": wall, "gpu": None, **more}


PACKAGES: dict[str, Callable[[str, bool], Iterator[Row]]] = {"bitsandbytes": bitsandbytes, "torchao": torchao}


def derive(rows: Rows) -> Rows:
    """How many times as long as ours each takes, by the wall's clock; beside a step and pushing out, the step alone."""
    ours: Any = (rows.first(name=OURS) or {}).get("wall")
    alone = {(row["name"], SAME): row["wall"] for row in rows.where(what=ALONE)}
    return Rows({**row, "clock": "wall", "over": over(row["wall"], ours), "piece": row["what"] in (ALONE, BACK, WARM),
                 "alone": alone.get((row["name"], row["what"])), "label": label(row)} for row in rows)  # fmt: skip


def label(row: Row) -> str:
    """In a picture of steps: a step, unless it says what else."""
    return f"{row['name']}, {row['what']}" if row["what"] not in ("step", SAME) else str(row["name"])


COLUMNS: dict[str, Column] = {
    "contender": "name",
    "what": "what",
    "wall ms": ms("wall"),
    "÷ ours": ratio("over"),
    "error": error(),
}


def color(name: str) -> str:
    """Other packages' alike."""
    return ORANGE if name.startswith(tuple(PACKAGES)) else contenders.color(name)


STEPS = Bars(title="{numel:,} parameters", unit="ms", name="label", length="wall", scale=1e3, wrap=32, colors=color,
             where={"piece": False}, first="alone")  # fmt: skip


def report(page: Page, rows: Rows) -> None:
    """A table, a picture, and what is held to a limit."""
    page.table(lambda rows: f"a step over {rows[0]['numel'] / 1e6:,.0f} M parameters", rows, COLUMNS)
    page.picture("rivals", rows, [STEPS],
        "With float32 state on the host ours is the fastest; pale: pushing pages out again")  # fmt: skip
    page.bar(f"speed over {RIVAL}, same start and end", rows.where(name=RIVAL, what=SAME), "over", "≥ 3.5 x")
