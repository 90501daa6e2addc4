"""The first step of an optimizer in a process that has done nothing else, and later ones.

Loads torch and nothing of pagedopt before the clock runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.clock import Case, measure, series
from experiments.works.models import HYPER, Bound, Step, Work
from experiments.works.phases import CACHES, LOADS, exclusive, recorded
from experiments.works.reference import Reference
from experiments.works.trace import Incomplete, counted

COLD, WARM, PORTABLE = "compiled, cold", "compiled, warm", "compiled, portable cache"
TRACED = "traced, no kernels"
OURS_COLD, OURS_WARM, FOREACH, FUSED = "ours, cold", "ours, warm", "torch foreach", "torch fused"
#: What is one compilation of the whole list.
WHOLE = (COLD, WARM, PORTABLE, TRACED)


def builder(way: str) -> Callable[[list[torch.nn.Parameter]], Step]:
    """What makes a step that was not yet taken; of ours with what it loads."""
    if way in (OURS_COLD, OURS_WARM):
        return ours
    from experiments.works import builds

    how: dict[str, Any] = {"backend": "aot_eager"} if way == TRACED else {}
    plain = {FOREACH: builds.theirs(foreach=True), FUSED: builds.theirs(fused=True)}
    build = plain.get(way, builds.compiled(**how))
    return lambda params: build(params).step


def ours(params: list[torch.nn.Parameter]) -> Step:
    """PagedAdamW, imported here."""
    from pagedopt import PagedAdamW

    return PagedAdamW(params, **HYPER).step


def first_step(device: str, way: str, count: int, artifacts: str) -> Iterator[dict[str, Any]]:
    """A row: seconds until the first step is done, by phase; wall times of later ones (µs), and what they launch.

    The file ``artifacts`` is the portable cache (:func:`torch.compiler.save_cache_artifacts`): cold steps write it.
    """
    where, kept = torch.device(device), Path(artifacts)
    wait: Callable[[], None] = torch.cuda.synchronize if where.type == "cuda" else (lambda: None)
    work = Work("first steps", [(64, 64)] * count)
    params = work.parameters(where)
    torch.optim.SGD(params)  # whichever optimizer is the first loads Dynamo
    build = builder(way)
    wait()
    with recorded() as events:
        begin = time.perf_counter()
        step = build(params)
        built = time.perf_counter()
        if way == PORTABLE:
            torch.compiler.load_cache_artifacts(kept.read_bytes())
        loaded = time.perf_counter()
        step()
        wait()
        end = time.perf_counter()
    phases = exclusive(events)
    phases[LOADS] += built - begin
    phases[CACHES] += loaded - built
    error = Reference(work.parameters(where)).error(params, Bound(step, 1))
    later = measure([Case(way, step)], where, rounds=40, seconds=0.5)[way]["wall"]
    if way == COLD:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None, "torch keeps nothing of what it compiled"
        kept.write_bytes(saved[0])
    yield {
        "first": series([end - begin], "wall"),
        "built": series([built - begin], "wall"),
        "phases": phases if way in WHOLE else None,
        "later": later,
        "kernels": kernels_of(step) if where.type == "cuda" and way == COLD else None,
        "error": error,
    }


def kernels_of(step: Step) -> int | None:
    """Of a step on a GPU; None: no trace was whole."""
    try:
        return counted(step).kernels
    except Incomplete:
        return None
