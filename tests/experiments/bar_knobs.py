"""For every bar of every experiment a knob: what changes in rows as they are measured until the bar is missed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ladder_rows import clocks

from experiments.boxes import epilogues, pasted
from experiments.compiled import coverage
from experiments.copies import direction, peer
from experiments.harness import question, rows
from experiments.harness.main import KEPT
from experiments.harness.question import Question
from experiments.harness.rows import Row, Rows
from experiments.harness.show import Bar
from experiments.harness.time import PERCENTILES, series
from experiments.ladder import effort, trucks
from experiments.launch import puzzlers
from experiments.lifetime import hazards, owners, tables
from experiments.operators import told
from experiments.overlap import loader, seven_billion
from experiments.paging import graph, hidden, spike, state_file, sweep
from experiments.step import clip_and_scale
from experiments.vertical import roofline, spill, traffic
from experiments.works import finetunes, mishaps, muladd_used
from experiments.works.contenders import COPY, FUSED, OURS
from experiments.works.fusible import RULE, RULES

#: A series is from 1/1024 to 1024 times as long.
DOUBLINGS = 10
#: Kinds of knobs: a real number, a count that goes up by one each time, and one that is only on or off.
REAL, COUNT, SWITCH = "real", "count", "switch"


@dataclass(frozen=True)
class Knob:
    """Turned to 0 the bar is met, to 1 (of a count: to some number) it is missed.

    Attributes:
        turn: a row, and how far; it returns the row as it would have been measured.
        where: of which rows, besides those that the bar is about; of several values any.
    """

    turn: Callable[[Row, float], Row]
    where: Mapping[str, Any]
    kind: str = REAL

    def turned(self, measured: Rows, bar: Bar, far: float) -> Rows:
        """All rows, those of one contender changed."""
        # Some columns by which a bar chooses its rows are derived from those that are measured.
        known = {name: value for name, value in bar.where.items() if measured.where(**{name: value})}
        return Rows(self.turn(row, far) if chosen(row, known | dict(self.where)) else row for row in measured)


def chosen(row: Row, where: Mapping[str, Any]) -> bool:
    """Whether a row has these values; a tuple is for any of them."""
    return all(row.get(name) in (value if isinstance(value, tuple) else (value,)) for name, value in where.items())


def times(value: Any, factor: float) -> Any:
    """A number, a series or all series in a cell so many times as large."""
    if isinstance(value, dict):
        is_series = "median" in value
        return {name: times(v, factor) if not is_series or name in PERCENTILES else v for name, v in value.items()}
    return value * factor if isinstance(value, (int, float)) else value


def longer(*columns: str, kind: str = REAL, least: int = -DOUBLINGS, sign: int = 1, **where: Any) -> Knob:
    """Numbers and series of these columns, or all series of a row, grow from 2**least to 2**10 times what they are."""

    def turn(row: Row, far: float) -> Row:
        factor = 2.0 ** (sign * (least + (DOUBLINGS - least) * far))
        names = columns or [name for name, value in row.items() if isinstance(value, dict) and "median" in value]
        return {**row, **{name: times(row[name], factor) for name in names if name in row}}

    return Knob(turn, where, kind)


#: The series shrink: those of a rival, or ratios that have to be large.
shorter = functools.partial(longer, sign=-1)


def more(column: str, by: float = 1, kind: str = REAL, **where: Any) -> Knob:
    """So much is added to a number at most; of a count, one each time."""

    def turn(row: Row, far: float) -> Row:
        return row if row.get(column) is None else {**row, column: row[column] + far * by}

    return Knob(turn, where, kind)


count = functools.partial(more, kind=COUNT)


def other(column: str, value: Any, **where: Any) -> Knob:
    """Another value stands in the place of one."""
    return Knob(lambda row, far: {**row, column: value} if far else row, where, SWITCH)


def made_anew(row: Row, far: float) -> Row:
    """A kernel is made once more, behind the last step."""
    return {**row, "by_step": [*row["by_step"][:-1], row["by_step"][-1] + far]} if row["by_step"] else row


#: By title, or by question and column or function: whatever is not the time of the rows that a bar is about.
KNOBS: dict[str, Knob] = {
    "codes.of_rival": longer("error"),
    "codes.off": longer("bias"),
    "rare_rows.off": longer("mean", least=0),
    "rare_rows.of_most": longer("most"),
    "rare_rows.of_tied": longer("tied"),
    "first_call.off": longer("first", least=0),
    "recompiles.again": Knob(made_anew, {}, COUNT),
    "kernels.error": more("error"),
    "kernels.kernels": count("kernels"),
    "coverage.unclassified": other("name", "no class", name=coverage.names()[0]),
    "coverage.error": longer("error"),
    "kinds of memory in which the two numbers differ": other("same", False),
    "direction.default": other("outcome", direction.WRONG, direction="Default"),
    "size.spoiled": other("right", False),
    "cpu_step.ratio": shorter("ratio"),
    "step_host.ratio": shorter("ratio"),
    "clip_and_scale.launches": count("launches"),
    "matrix.wheels": count("wheels"),
    "caches.believed": count("believed"),
    "caches.wrong": count("wrong"),
    "puzzlers.off": count("kernels"),
    "puzzlers.kernels": count("kernels"),
    "puzzlers.fewest": count("kernels"),
    "split_stack ÷ combined, wall": shorter(case=puzzlers.SPLIT),
    "replays.off": count("kernels"),
    "replays.launches": count("launches"),
    "replays.operators": count("operators"),
    "replays.allocations": count("allocations"),
    "replays.different": count("different"),
    "numerics.difference": more("difference", 1e-5),
    "numerics.of_eager": longer("error"),
    "counts.off": count("kernels"),
    "counts.off_batched": count("kernels", rung=FUSED),
    "counts.launches": count("launches"),
    "trucks.off": Knob(lambda row, far: {**row, "trips": row["trips"] + far}, {"size": 1}, COUNT),
    "trucks.from_one": longer("extra", least=0),
    "trucks.extra": more("extra", 2 << 20),
    "largest group of ours within the memory limit": other("passes", False, way=trucks.OURS),
    "pareto.fronts": longer(kind=SWITCH),
    "pareto.beyond": more("extra", 2 << 20),
    "pareto.from_one": longer("extra", least=0),
    "alignment.aligned": more("aligned", 1e-3),
    "effort.shorter": other("lines", 1, case=effort.COMPILED),
    "seven_billion.taken": longer("taken"),
    "seven_billion.hooks_ms": longer("hooks"),
    "sweep.of_ceiling": longer(case=sweep.STEP, share=0.0),
    "sweep.worst": longer(case=sweep.STEP, share=0.5),
    "sweep.near": longer(case=sweep.STEP, share=1.0),
    "ways whose bits differ from placement='device'": other("same", False, way="mapped, staged"),
    "iteration.of_estimate": longer("time"),
    "graph.host_ms": longer("host"),
    "graph.of_calls": longer(way=graph.GRAPH),
    "graph.steps": longer("made"),
    "graph.mib": more("taken", 64 << 20),
    "rivals.over": shorter(),
    "hidden.hidden": longer(hidden.TOGETHER),
    "memory.beyond": more("device_extra", 8 << 20),
    "spike.finished": other("helpless", "finished", kind=spike.CARD),
    "spike.slower": longer("ms", loop=spike.SPILL_ALL),
    f"spikes: losses that differ from '{spike.UNPAGED}'": other("same", False, kind=spike.CARD),
    "bytes.of_must": longer("up", "down"),
    "state_file.beyond": more("resident", 256 << 20),
    state_file.DIFFERENT: other("digest", "other bits", share=0.25),
    "hazards.unnoticed": other("outcome", mishaps.WRONG, way=hazards.OURS),
    "hazards.missed": other("outcome", hazards.NAMED, way="memcheck"),
    "tables.wrong": other("found", tables.OTHER, who=tables.OURS),
    "owners.shared": other("updates", owners.ORIGINAL, holder="Sweep", how="deepcopy"),
    "leaks.most": more("ram", 4 << 20),
    "leaks.descriptors": count("descriptors"),
    "attempts.unexpected": other("as_expected", False),
    "transports.worst": longer(way="managed"),
    "advice.sharing": other("beside", ["another"]),
    **{bar.title: longer(bar.value.keywords["witness"], least=0)
       for bar in traffic.BARS if isinstance(bar.value, functools.partial)},
    "traffic.more_kernels": count("kernels", case=RULE),
    "square of square, two rules against one": shorter(case=RULES),
    "square of square, two rules against one, no more than": longer(case=RULES),
    "roofline.free": longer(kind=SWITCH, case=roofline.FUSED, k=roofline.LENGTHS[4:]),
    "kernels that lose by fusing": shorter(spill.FUSED, kind=SWITCH),
    "composed rules that are wrong without a word": other("found", pasted.WRONG),
    "pasted texts that are wrong without a word": other("found", pasted.RIGHT),
    "opaque.all": count("kernels"),
    "compiled, opaque: kernels": other("kernels", 0),
    "epilogues that are wrong with the default setting": other("right", False),
    "epilogues that the setting fuses": other("kernels", 2),
    "told.missing": other(muladd_used.CALLED, told.WRONG),
    "told.graphs": other("graphs", 1),
    "lies that somebody catches": other("opcheck", ""),
    "lies that opcheck catches": other("opcheck", ""),
}  # fmt: skip

#: Of what no file of results that is kept has: two GPUs, a torch whose compiler fuses epilogues, clipped steps.
MADE = {
    "epilogues": Rows({"epilogue": "relu", "setting": setting, "kernels": kernels, "right": True}
                      for setting, kernels in ((epilogues.OFF, 2), (epilogues.ON, 1))),
    "peer": Rows({"what": "copy", "case": name, "bytes": 1 << 28, **clocks(9.0, 9.0)}
                 for name in (peer.API, peer.PULL, peer.PUSH)),
    "loader": Rows({"state": state, "way": way, "stream": stream, "time": series([9.0], "GPU"),
                    "p99": series([9.0], "GPU")}
                   for state, way in loader.PLAN for stream in (loader.OWN, loader.MODELS_STREAM)),
    "seven_billion": Rows(
        {**seven_billion.WITHIN, "case": case, "batch": batch, "tokens": 2048, "ended": None, "losses": [9.0],
         "time": series([3e5], "wall"), "hooks": series([9e3], "host"), "taken": 15 << 30, "allocated": 14 << 30}
        for case in finetunes.WAYS for batch in (4, 1)
    ),
    "clip_and_scale": Rows(
        {"key": key, "work": key, "what": what, "case": case, "device": "cuda", "numel": 1, "bytes": 32, "launches": 3,
         "error": None, **clocks(1.0, 1.0)}
        for key, what, cases in (
            (clip_and_scale.GPT2, clip_and_scale.CLIP, (OURS, COPY)),
            (clip_and_scale.GPT2, clip_and_scale.SCALE, (clip_and_scale.GIVEN, clip_and_scale.UNSCALED)),
            (clip_and_scale.TINY, clip_and_scale.CLIP, (OURS, clip_and_scale.TORCH, clip_and_scale.IN_GRAPH)),
        )
        for case in cases
    ),
}  # fmt: skip


def names(asked: Question, bar: Bar) -> tuple[str, str]:
    """By which :data:`KNOBS` may have a bar: its title; its question and the column or function."""
    value = bar.value if isinstance(bar.value, str) else getattr(bar.value, "__name__", "")
    return bar.title, f"{asked.name}.{value}"


def knob(asked: Question, bar: Bar) -> Knob:
    """The bar's own; or, as of most, the times of the rows that it is about."""
    return next((KNOBS[name] for name in names(asked, bar) if name in KNOBS), longer())


def bars() -> Iterator[tuple[question.Experiment, Question, Bar]]:
    """Every bar there is."""
    for experiment in question.every():
        for asked in experiment.questions:
            for bar in asked.listed("BARS"):
                yield experiment, asked, bar


def measured(experiment: question.Experiment, asked: Question, bar: Bar) -> Rows | None:
    """Rows of which the bar says something, as they were measured: of a GPU, or else of a CPU, or made up."""
    found = [Rows(parts[asked.name]["rows"]) for parts in kept(experiment) if asked.name in parts]
    found.append(MADE.get(asked.name, Rows()))
    return next((each for each in found if each and bar.verdict(asked.derive(each)).met is not None), None)


@functools.cache
def kept(experiment: question.Experiment) -> list[dict[str, Any]]:
    """Parts of each file of results that is kept, a GPU's first."""
    paths = sorted(KEPT.glob(f"{experiment.name}-*.json"), key=lambda path: path.stem.endswith("-cpu"))
    return [rows.read(path, experiment)["parts"] for path in paths]
