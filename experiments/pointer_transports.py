"""Which way should a list of pointers take into a kernel, and what decides it?

Shows the lecture's attempts that fail (:mod:`experiments.attempts`), ``torch._foreach_norm`` around its old limit of
422 tensors, every transport and every advice for managed memory over 10 to 65,536 tiny tensors, and the same inside a
CUDA graph.  On a CPU it runs what exists there and says what it left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

import pagedopt
from experiments import attempts, report, transport_tables
from experiments.bench import Case, kernel_launches, measure
from experiments.works.tiny_lists import ADVICE, TRANSPORTS, Lists, Make
from pagedopt.system.driver import capabilities
from pagedopt.transports.transport import Transport

COUNTS = (10, 100, 1000, 4096, 16384, 65536)
NORM_COUNTS = (10, 100, 423, 424, 1000, 4096, 16384, 65536)
GRAPH_COUNTS = (10, 1000, 16384)
MODES = ("rewritten", "new scalars", "unchanged")
#: Launches that a gated sample may queue; a stream holds about a thousand.
QUEUE = 600


class Run:
    """One run of the experiment: its options and what it has left out."""

    def __init__(self, device: torch.device, quick: bool, console: Console) -> None:
        self.device, self.quick, self.console = device, quick, console
        self.left_out: list[str] = []
        self.rounds, self.seconds = (3, 0.2) if quick else (100, 1.0)

    def counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """All of them, or two small ones."""
        return (10, 424) if self.quick else tuple(counts)

    def measure(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Timings by name of case, as plain values."""
        timings = measure(cases, self.device, rounds=self.rounds, seconds=self.seconds)
        return {name: timing.as_dict() for name, timing in timings.items()}

    def ways(self, make: dict[str, Make], lists: Lists) -> dict[str, Transport | None]:
        """The transports that work here, each of which has updated ``lists`` rightly once per set."""
        if self.device.type == "cpu":
            return {"Numba": None}
        found: dict[str, Transport | None] = {}
        for name, maker in make.items():
            try:
                way = maker(self.device.index)
                lists.sweep.transport = way
                lists.sweep.prepare()
                for _ in range(3):
                    lists.step(way)
                    lists.rewrite()
                lists.check(name)
            except (RuntimeError, MemoryError) as error:  # the driver refuses, or the table does not fit
                self.left_out.append(f"{name} at {len(lists.tensors[0]):,} tensors: {error}")
                continue
            found[name] = way
        return found


def sweep_counts(run: Run, make: dict[str, Make], lists: int) -> list[dict[str, Any]]:
    """Every way, count and mode: times, launches and explicitly copied bytes per step."""
    rows = []
    for count in run.counts(COUNTS):
        work = Lists(lists, count, run.device)
        ways = run.ways(make, work)
        for mode in MODES:
            before = {"rewritten": work.rewrite, "new scalars": work.other_scalar, "unchanged": None}[mode]
            counters = {name: _counters(work, way, before) for name, way in ways.items()}
            cases = [
                Case(name, work.stepper(way), before, _repeats(mode, counters[name]["launches"]))
                for name, way in ways.items()
            ]
            for name, timing in run.measure(cases).items():
                rows.append({"lists": lists, "count": count, "mode": mode, "way": name, **counters[name], **timing})
        work.check("after timing")
        run.console.print(f"  {lists} x {count:,} tensors: {len(ways)} ways, every update counted", highlight=False)
    return rows


def _repeats(mode: str, launches: int) -> int:
    """Runs per GPU sample: the ring has four tables, and a fifth rewrite would wait for the gate to open."""
    most = 4 if mode != "unchanged" else 20
    return max(1, min(most, QUEUE // max(1, launches)))


def _counters(work: Lists, way: Transport | None, before: Callable[[], None] | None) -> dict[str, int]:
    """Launches and copied bytes of one step in the steady state, in which every table of the ring has been written."""
    if way is None:
        work.step()
        return {"launches": 0, "copied_bytes": 0}
    launches = copied = 0
    for _ in range(6):
        launches, copied = work.sweep.launches, way.copied_bytes
        if before is not None:
            before()
        work.step(way)
    return {"launches": work.sweep.launches - launches, "copied_bytes": way.copied_bytes - copied}


def refresh_cost(run: Run) -> list[dict[str, Any]]:
    """What it costs in Python to compare every address of one list with the table, nothing having changed."""
    rows = []
    for count in run.counts(COUNTS):
        work = Lists(1, count, run.device)
        cases = [Case("refresh", lambda w=work: w.sweep.refresh(w.tensors))]  # type: ignore[misc]
        timings = measure(cases, torch.device("cpu"), rounds=run.rounds, seconds=0.5)  # the host's work alone
        rows.append({"count": count, **timings["refresh"].as_dict()})
    return rows


def norms(run: Run) -> list[dict[str, Any]]:
    """``torch._foreach_norm`` and ours over the same tensors."""
    rows = []
    for count in run.counts(NORM_COUNTS):
        # A buffer row each, as in a table of small layers; ours and torch's see the same tensors.
        tensors = list(torch.rand(count, 128, device=run.device)[:, :6].unbind())
        functions: dict[str, Callable[[], list[torch.Tensor]]] = {
            "torch": lambda t=tensors: list(torch._foreach_norm(t, 2)),  # type: ignore[misc]
            "pagedopt": lambda t=tensors: pagedopt.foreach_norm(t, 2),  # type: ignore[misc]
        }
        exact = torch.linalg.vector_norm(torch.stack(tensors).double(), dim=1)
        for name, function in functions.items():
            torch.testing.assert_close(torch.stack(function()).double(), exact, rtol=1e-5, atol=0, msg=name)
        repeats = 4 if count <= 1000 else 1
        timings = run.measure([Case(name, function, repeats=repeats) for name, function in functions.items()])
        for name, timing in timings.items():
            launches = None
            if run.device.type == "cuda" and count <= 1000 and name == "torch":
                launches = kernel_launches(functions[name])
            rows.append({"count": count, "way": name, "launches": launches, **timing})
    return rows


def graphs(run: Run) -> list[dict[str, Any]]:
    """One launch captured through each transport: what a replay costs, that its table is its own, that it refuses."""
    if run.device.type == "cpu":
        run.left_out.append("CUDA graphs: need a GPU")
        return []
    rows = []
    for count in run.counts(GRAPH_COUNTS):
        work = Lists(1, count, run.device)
        captured = {}
        ways = run.ways(TRANSPORTS, work)  # kept until the last replay: a captured table belongs to its transport
        for name, way in ways.items():
            assert way is not None
            try:
                captured[name] = _capture(work, way, name)
            except (RuntimeError, MemoryError) as error:
                run.left_out.append(f"graph through {name} at {count:,} tensors: {error}")
        timings = run.measure([Case(name, replay, repeats=20) for name, (replay, _) in captured.items()])
        work.check("after replays")
        rows += [{"count": count, "way": name, **captured[name][1], **timing} for name, timing in timings.items()]
    return rows


def _capture(work: Lists, way: Transport, name: str) -> tuple[Callable[[], None], dict[str, str]]:
    """A counted replay, and what came of two attempts to make it read another list."""
    if work.active:
        work.rewrite()  # the set whose tensors ``work.tensors`` are
    side = work.active
    work.sweep.transport = way
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.step(way)
    work.total[side] -= work._by  # a capture runs nothing
    by = work._by

    def replay() -> None:
        graph.replay()
        work.total[side] += by

    work.rewrite()
    for _ in range(6):  # more than the ring holds: were the captured table in it, it would now name the other set
        work.step(way)
    replay()
    work.check(f"{name}: a replay after the list was rewritten")
    work.rewrite()

    guarded = work.sweep.capture({"by": 1.0})
    guarded.replay(work.tensors)
    work.total[side] += 1.0
    moved = [[*tensors[:-1], tensors[-1].clone()] for tensors in work.tensors]
    for_rewritten = _refusal(guarded.replay, before=work.rewrite)
    work.rewrite()
    for_moved = _refusal(lambda: guarded.replay(moved))
    work.check(f"{name}: after the refused replays")
    return replay, {"own_table": "kept its addresses", "rewritten": for_rewritten, "moved": for_moved}


def _refusal(replay: Callable[[], None], before: Callable[[], None] | None = None) -> str:
    """The error a replay raises, which it must."""
    if before is not None:
        before()
    try:
        replay()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("a replay over moved tensors was not refused")


def bars(rows: Sequence[dict[str, Any]]) -> list[report.Bar]:
    """Managed against the best transport, list rewritten, per number of lists: the worst count decides."""
    found = []
    for lists in (1, 4):
        ratios = transport_tables.managed_over_best(rows, lists)
        worst = max(ratios.items(), key=lambda item: item[1], default=(0, None))
        where = f" (worst at {worst[0]:,} tensors)" if worst[1] is not None else ""
        name = f"managed ÷ best transport, list rewritten, {lists} list{'s' * (lists > 1)}{where}"
        found.append(report.Bar(name, worst[1], 1.15, "x"))
    return found


def experiment(run: Run) -> dict[str, Any]:
    """All sections, as plain values."""
    console, cuda = run.console, run.device.type == "cuda"
    console.print("attempts, each in its own process", style="bold")
    names = ("vector_nvrtc", "struct_too_large", "foreach_norm_424") if run.quick else tuple(attempts.ATTEMPTS)
    result: dict[str, Any] = {"device": run.device.type, "quick": run.quick, "attempts": attempts.run_all(names)}
    console.print("transports", style="bold")
    result["transports"] = [row for lists in (1, 4) for row in sweep_counts(run, TRANSPORTS, lists)]
    result["advice"] = []
    if not cuda:
        run.left_out.append("transports and advice: need a GPU; the CPU walks the table in place (shown as Numba)")
    elif not capabilities(run.device.index).concurrent_managed:
        run.left_out.append("advice: this GPU has no concurrent managed access (concurrentManagedAccess = 0)")
    else:
        console.print("managed memory under each advice", style="bold")
        result["advice"] = sweep_counts(run, ADVICE, 1)
    console.print("Python, norms, graphs", style="bold")
    result["refresh"] = refresh_cost(run)
    result["norms"] = norms(run)
    result["graphs"] = graphs(run)
    result["left_out"] = run.left_out
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write JSON and plots; or fill the note's tables from results."""
    parser = report.options("pointer_transports", __doc__)
    options = parser.parse_args(arguments)
    if report.refilled("pointer_transports", options, transport_tables.sections):
        return 0
    console = report.console()
    device = report.chosen_device(options.device)
    result = experiment(Run(device, options.quick, console))
    for attempt in result["attempts"]:
        console.print(f"\n{attempt['title']}: {attempt['outcome']}", style="bold", highlight=False)
        console.print(attempt["message"].strip(), highlight=False, markup=False)
    for title, (headings, rows) in transport_tables.tables(result).items():
        if rows and title != "attempts":
            report.show(console, title, headings, rows)
    met = bars(result["transports"])
    unexpected = [a["title"] for a in result["attempts"] if not a["as_expected"]]
    if unexpected:
        console.print(f"not as expected: {', '.join(unexpected)}", style="bold red")
    plots = {name: draw for name, draw in transport_tables.PLOTS.items() if result[name]}
    code = report.finish(console, options.out, "pointer_transports", device, result, met, plots)
    return max(code, int(bool(unexpected)))
