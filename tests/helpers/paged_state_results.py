"""Made-up results of the experiment on paged state."""

from __future__ import annotations

from typing import Any

from experiment_runs import experiment

from experiments.harness import rows
from experiments.harness.rows import Row, Rows
from experiments.harness.show import Verdict
from experiments.paging import bytes, hidden, link, rivals, spike, state_file, sweep
from experiments.works import paged
from experiments.works.link import BOTH, IN_PLACE, UP

STATE = 8 * paged.FULL.numel
PAGED_STATE = experiment("paged_state")


def stats(median: float) -> dict[str, float]:
    return {"median": median, "p10": median, "p90": median, "n": 9}


def timing(best: float) -> dict[str, Any]:
    return {"host": stats(best), "wall": stats(best), "gpu": stats(best), "best": best}


def sweep_rows(slower: float) -> list[Row]:
    """Staged 43.0 ms and in place 50.9 ms for all, 1.9 ms for nothing; in between ``slower`` times a straight line."""
    found: list[Row] = [{"kind": sweep.BITS, "way": "device", "same": True, "copy_bytes": 1 << 30}]
    for way in (*paged.PAGED, *sweep.ON_HOST):
        found.append({"kind": sweep.BITS, "way": way, "same": slower == 1 or way != "mapped, staged"})
        away = slower * (43.0e3 if way.endswith("staged") else 50.9e3)
        for share in sweep.SHARES if way in paged.PAGED else (0.0,):
            near = 1.9e3 * slower
            best = away if share == 0 else near if share == 1 else slower * ((1 - share) * away + near)
            beside = {0.0: {BOTH: timing(21.2e3), IN_PLACE: timing(50.8e3)}, 1.0: {sweep.DEVICE: timing(1.89e3)}}
            where = {"kind": sweep.TIME, "way": way, "share": share}
            bytes_away = {"away": 1 - share, "host_bytes": round((1 - share) * STATE)}
            found.append({**where, "case": sweep.STEP, **bytes_away, **timing(best)})
            found += [{**where, "case": case, **times} for case, times in beside.get(share, {}).items()]
    return found


def whole(slower: float = 1.0) -> dict[str, list[Row]]:
    """Rows by question of a GPU on which every bar is met, or, three times as slow, missed."""
    bad = slower > 1
    times = {hidden.PRODUCTS: stats(100e3), hidden.UPDATE: stats(50e3), hidden.TOGETHER: stats(105e3 + 20e3 * bad)}
    moved = {"moved_up": 1e9, "moved_down": 0.0, "counted_up": 1.1e9, "counted_down": 0.1e9}
    crossed = 1.005 * slower
    card = {"card": 8e9, "state_bytes": STATE, "normal": 3e9, "spiked": 7e9, "same": not bad,
            "helpless": "finished" if bad else "out of memory: x"}  # fmt: skip
    loops = {name: dict.fromkeys(("ordinary_ms", "large_ms", "behind_ms"), ms) for name, ms in (
        (spike.UNPAGED, 10.0), (spike.SPILL_ALL, 10.1 * slower), (spike.SPILL_SOME, 10.0))}  # fmt: skip
    return {
        "link": [{"kind": link.CEILING, "what": what, "copy_bytes": 1 << 30, "moved": 1 << 30, **timing(2e4)}
                 for what in (UP, BOTH, IN_PLACE)],
        "sweep": sweep_rows(slower),
        "rivals": [
            {"name": rivals.OURS, "what": "step", "numel": STATE // 8, **timing(43e3 * slower)},
            {"name": rivals.RIVAL, "what": rivals.SAME, "numel": STATE // 8, "wall": stats(160e3), "gpu": None,
             "error": 1e-6}],
        "driver": [
            {"kind": "pages", "name": "prefetch up", "range_bytes": 1 << 30, "moved": 1 << 30, "wall": stats(2e4),
             "blocks_host": stats(10)},
            {"kind": "steps", "name": "step", "wall": stats(1e5)}],
        "hidden": [{"placement": p, "access": "in_place", "blocks": 8, "width": 8192, **times}
                   for p in ("mapped", "managed")],
        "memory": [{"way": "mapped, staged", "share": 0.25, "budget": STATE // 4, "ring": 64 << 20,
                    "device_extra": STATE // 4 + (64 << 20) + (bad << 22), "away": 1, "host_extra": 1}],
        "spike": spike.as_rows(card, loops, {spike.UNPAGED: [1.0] * 20}, [2.0] * 20),
        "bytes": [{"kind": bytes.KNOWN, "what": "up", **moved}, {"kind": bytes.PROFILER, "what": "HtoD", "bytes": 5},
                  *({"kind": bytes.STEP, "way": way, "share": share, "must": must, "up": crossed * must,
                     "down": crossed * must} for way in paged.PAGED for share, must in ((0.0, 10), (1.0, 0)))],
        "state_file": [
            {"kind": state_file.STATE, "name": name, "share": share, "budget": 1 << 28, "numel": 1,
             "state_bytes": 4 << 28, "resident": (1 << 28) + (60 << 20) * slower, "on file": 3 << 28,
             "step": stats(1e5), "digest": f"{bad and name}"}
            for name, share in ((state_file.IN_RAM, None), ("file, 25% in RAM", 0.25))],
    }  # fmt: skip


def derived(name: str, measured: list[Row]) -> Rows:
    """Rows of a question with what it derives from them."""
    (question,) = (question for question in PAGED_STATE.questions if question.name == name)
    found = question.derive(Rows(measured))
    assert isinstance(found, Rows)
    return found


def verdicts(parts: dict[str, list[Row]]) -> list[Verdict]:
    """What rows by question say to every bar."""
    return [
        bar.verdict(derived(q.name, parts[q.name]) if q.name in parts else None)
        for q in PAGED_STATE.questions
        for bar in q.listed("BARS")
    ]


def result(parts: dict[str, list[Row]]) -> dict[str, Any]:
    """A file of results of a clean commit."""
    machine = {"gpu": "H200", "driver": "580", "torch": "2.11", "when": "2026-11-21T08:00:00+00:00", "commit": "a",
               "processor": "x", "cores": 2, "python": "3.12", "torch_cuda": "13.0", "versions": {}}  # fmt: skip
    return {
        "experiment": "paged_state", "layout": rows.LAYOUT, "machine": machine, "device": "cuda", "quick": False,
        "parts": {name: {"rows": found, "left_out": []} for name, found in parts.items()},
        "left_out": [], "verdicts": [verdict.as_dict() for verdict in verdicts(parts)],
    }  # fmt: skip
