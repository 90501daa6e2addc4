"""What does a step of others cost over the same parameters, with their state where ours is: on the host?

Answer (H200, 2026-11): from the host and back to the host ours takes 44 ms and bitsandbytes' PagedAdamW32bit 143
(3.25 times); torchao's CPUOffloadOptimizer takes 59 with a backward that does next to nothing; torch's fused step
with all state on the device takes 2.4.

Pages of bitsandbytes are pushed out after each step, and that belongs to its time.  Updates of others are held to
float64.  bitsandbytes and torchao run in processes of their own: they may be absent, and may end the process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from experiments.harness.child import Child
from experiments.harness.columns import ms, spread_ms
from experiments.harness.plot import BLUE, GRAY, GREEN, LETTERS, PAGE, Plot, bars, spread
from experiments.harness.rows import Row, Rows
from experiments.harness.run import Run
from experiments.harness.show import Bar, Table, console
from experiments.harness.time import Case
from experiments.works.models import HYPER
from experiments.works.paged import MOST_MANAGED, Problem, adamw, push_out
from experiments.works.reference import Contender, Reference

NEEDS_GPU = True
OURS, FUSED = "PagedAdamW, mapped, staged, budget 0", "torch fused, all on the device"
OURS_IN_PLACE = "PagedAdamW, mapped, in place, budget 0"
RIVAL, RIVAL_8BIT = "bitsandbytes PagedAdamW32bit", "bitsandbytes PagedAdamW8bit"
#: What is timed of a paged rival.
SAME, ALONE, BACK, WARM = "step and pushed out again", "step alone", "pushing out alone", "step, state still there"
#: Seconds until a rival's process is stopped.
LONGEST = 150
#: bitsandbytes never frees its managed memory: four optimizers' worth, two of them of a quarter of the size.
TAKEN = 2.5


def measure(run: Run) -> Iterator[Row]:
    """Rows of (contender, what is timed) with their times."""
    problem = Problem(run)
    with run.attempt("ours and torch fused"):
        yield from _here(problem)
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


def _here(problem: Problem) -> list[Row]:
    """Ours and torch's, in interleaved rounds."""
    steps = {
        OURS: adamw(problem.parameters(), placement="mapped", host_access="staged", device_budget=0).step,
        OURS_IN_PLACE: adamw(problem.parameters(), placement="mapped", host_access="in_place", device_budget=0).step,
        FUSED: torch.optim.AdamW(problem.parameters(), **HYPER, fused=True).step,
    }
    times = problem.run.measure([Case(name, step) for name, step in steps.items()], seconds=2.0)
    return [{"name": name, "what": "step", "numel": problem.work.numel, **timing} for name, timing in times.items()]


# --- in a process of its own


def _begun(device: str, quick: bool) -> Problem:
    torch.cuda.set_device(torch.device(device))
    return Problem(Run(torch.device(device), quick, console()))


def _error(problem: Problem, make: Callable[[list[torch.nn.Parameter]], Callable[[], object]]) -> float:
    """How far four steps are from float64, as a share of the update."""
    params = problem.parameters()
    reference = Reference(params)
    return reference.error(params, Contender(make(params)))


def bitsandbytes(device: str, quick: bool) -> Iterator[Row]:
    """Paged state from the host and back to the host: a step, then its pages pushed out; and the pieces alone."""
    from bitsandbytes import functional, optim  # type: ignore[import-not-found]

    problem = _begun(device, quick)
    run = problem.run
    needed, most = TAKEN * problem.state_bytes, min(MOST_MANAGED, torch.cuda.mem_get_info(run.device)[0] // 4)
    if needed > most:
        raise MemoryError(f"bitsandbytes would take {needed:,.0f} bytes of managed memory; {most:,} are allowed")
    for name, kind in ((RIVAL, optim.PagedAdamW32bit), (RIVAL_8BIT, optim.PagedAdamW8bit)):
        manager = functional.GlobalPageManager.get_instance()
        error = _error(problem, lambda params, kind=kind: kind(params, **HYPER).step)  # type: ignore[misc]
        manager.paged_tensors.clear()
        run.free()
        params = problem.parameters()
        optimizer = kind(params, **HYPER)
        optimizer.step()
        places = [(t.data_ptr(), t.nbytes) for t in manager.paged_tensors]

        def out(places: list[tuple[int, int]] = places) -> None:
            push_out(places, run.device)

        def step_and_out(step: Callable[[], object] = optimizer.step, out: Callable[[], None] = out) -> None:
            step()
            out()

        out()
        more = {"error": error, "paged_bytes": sum(nbytes for _, nbytes in places), "numel": problem.work.numel}
        for case, rounds, seconds in (
            (Case(SAME, step_and_out), 8, 3.0),
            (Case(ALONE, optimizer.step, before=out), 6, 2.0),
            (Case(BACK, out, before=optimizer.step), 6, 2.0),  # a step brings the pages back, outside of the clock
            (Case(WARM, optimizer.step), 6, 1.0),
        ):
            wall = run.wall([case], rounds=rounds, seconds=seconds)[case.name]
            yield {"name": name, "what": case.name, "wall": wall, "gpu": None, **more}
        manager.paged_tensors.clear()
        del optimizer, params, places, out, step_and_out, case
        run.free()


def torchao(device: str, quick: bool) -> Iterator[Row]:
    """State, and the update itself, on the CPU; gradients go down during a backward that costs next to nothing."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    problem = _begun(device, quick)
    run = problem.run

    def make(params: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
        grads = [p.grad for p in params if p.grad is not None]
        optimizer = CPUOffloadOptimizer(list(params), torch.optim.AdamW, fused=True, **HYPER)

        def backward_and_step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(list(params), grads)
            optimizer.step()

        return backward_and_step

    more = {"error": _error(problem, make), "threads": torch.get_num_threads(), "numel": problem.work.numel}
    run.free()
    case = Case("backward and step", make(problem.parameters()))
    wall = run.wall([case], rounds=8, seconds=3.0)[case.name]
    yield {"name": "torchao CPUOffloadOptimizer", "what": case.name, "wall": wall, "gpu": None, **more}


PACKAGES: dict[str, Callable[[str, bool], Iterator[Row]]] = {"bitsandbytes": bitsandbytes, "torchao": torchao}


# --- table, bar, plot


def old(part: dict[str, Any]) -> list[Row]:
    """Rows of its part of a file from before there were layouts."""
    return [{**row, "numel": part["numel"]} for row in part["rows"]]


def derive(rows: Rows) -> Rows:
    """How many times as long as ours each takes."""
    ours = rows.number("wall", name=OURS)
    return Rows({**row, "over": None if ours is None else row["wall"]["median"] / ours} for row in rows)


TABLES = [
    Table(lambda rows: f"a step over {rows[0]['numel'] / 1e6:,.0f} M parameters", {
        "contender": "name", "what": "what", "wall ms": ms("wall"), "p10 to p90": spread_ms("wall"),
        "GPU ms": ms("gpu"), "÷ ours": lambda row: "-" if row["over"] is None else f"{row['over']:.2f} x",
        "error": lambda row: f"{row['error']:.1e}" if "error" in row else "",
    })
]  # fmt: skip
BARS = [
    Bar("speed over bitsandbytes PagedAdamW32bit, same start and end", "over", at_least=3.5, unit="x",
        name=RIVAL, what=SAME)
]  # fmt: skip


def draw(figure: Any, rows: Rows) -> None:
    """Wall time of a step by contender."""
    known = {FUSED: GREEN, OURS: BLUE, OURS_IN_PLACE: BLUE}
    shown = [
        (f"{row['name']}:\n{row['what']}", row["wall"]["median"] / 1e3, known.get(row["name"], GRAY)) for row in rows
    ]
    figure.set_size_inches(PAGE, 1.2 + 0.42 * len(rows))
    axes = figure.subplots()
    bars(axes, shown, "ms a step, wall", spread([row["wall"] for row in rows], 1e3))
    title = f"{rows[0]['numel'] / 1e6:,.0f} M parameters; state on the host before and after, unless it says otherwise"
    figure.suptitle(title, fontsize=LETTERS + 1)


PLOTS = [Plot("rivals", draw)]
