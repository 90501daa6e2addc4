"""Made-up results of the experiment on paged state."""

from __future__ import annotations

from typing import Any

from experiments.paging import bars, hidden, link, problem, rivals, spike, sweep


def result(**changes: Any) -> dict[str, Any]:
    machine = {"gpu": "H200", "driver": "580", "torch": "2.11", "when": "2026-11-21T08:00:00+00:00", "commit": "a"}
    versions = {"numba": "0.68", "torch": "2.11"}
    found: dict[str, Any] = {
        "machine": {**machine, "versions": versions},
        "device": "cuda",
        "quick": False,
        "parts": {},
    }
    found["machine"].update(changes.pop("machine", {}))
    return {**found, **changes}


def stats(median: float) -> dict[str, float]:
    return {"median": median, "p10": median, "p90": median, "n": 9}


def timing(best: float) -> dict[str, Any]:
    return {"host": stats(best), "wall": stats(best), "gpu": stats(best), "best": best}


STATE = 8 * problem.FULL.numel


def sweep_part(slower: float) -> dict[str, Any]:
    """Staged 43.0 ms and in place 50.9 ms for all, 1.9 ms for nothing; in between ``slower`` times a straight line."""
    rows = []
    for way in (*sweep.PAGED, *sweep.ON_HOST):
        away = slower * (43.0e3 if way.endswith("staged") else 50.9e3)
        for share in sweep.SHARES if way in sweep.PAGED else (0.0,):
            near = 1.9e3 * slower
            best = away if share == 0 else near if share == 1 else slower * ((1 - share) * away + near)
            beside = {0.0: {link.BOTH: timing(21.2e3), link.IN_PLACE: timing(50.8e3)}, 1.0: {"device": timing(1.89e3)}}
            rows.append({"way": way, "share": share, "away": 1 - share, "host_bytes": round((1 - share) * STATE),
                         **timing(best), "beside": beside.get(share, {})})  # fmt: skip
    different = ["mapped, staged"] if slower > 1 else []
    return {"rows": rows, "link_bytes": 1 << 30, "numel": STATE // 8, "different": different, "error": 1e-7}


def whole_result(slower: float = 1.0) -> dict[str, Any]:
    """Results of a GPU on which every bar is met, or, three times as slow, missed."""
    bad = slower > 1
    times = {hidden.PRODUCTS: timing(100e3), hidden.UPDATE: timing(50e3), hidden.TOGETHER: timing(105e3 + 20e3 * bad)}
    known = {"moved": {"up": 1e9, "down": 0.0}, "counted": {"up": 1.1e9, "down": 0.1e9}}
    found: dict[str, Any] = {
        "link": {"bytes": 1 << 30, "blocks": 32, "rates": {link.UP: 55e9, link.BOTH: 1e11, link.IN_PLACE: 84e9},
                 "times": dict.fromkeys((link.UP, link.BOTH, link.IN_PLACE), timing(2e4))},
        "sweep": sweep_part(slower),
        "rivals": {"numel": STATE // 8, "rows": [
            {"name": rivals.OURS, "what": "step", **timing(43e3 * slower)},
            {"name": rivals.RIVAL, "what": rivals.SAME, "wall": stats(160e3), "gpu": None, "error": 1e-6}]},
        "driver": {"bytes": 1 << 30, "step": {"step": stats(1e5)}, "rows": [
            {"name": "prefetch up", "rate": 5e10, "wall": stats(2e4), "blocks_host": stats(10)}]},
        "hidden": {"width": 8192, "rows": [
            {"placement": p, "access": "in_place", "blocks": 8, "times": times, "hidden": 0.5 if bad else 0.9}
            for p in ("mapped", "managed")]},
        "memory": {"rows": [{"way": "mapped, staged", "share": 0.25, "budget": STATE // 4, "ring": 64 << 20,
                             "allowed": STATE // 4, "device_extra": STATE // 4 + (bad << 22), "away": 1,
                             "host_extra": 1}]},
        "spike": {"card": 8e9, "state_bytes": STATE, "normal": 3e9, "spiked": 7e9, "same": not bad,
                  "helpless": "finished" if bad else "out of memory: x",
                  "slowdown": {spike.SPILL_ALL: 1.01 * slower, spike.SPILL_SOME: 1.0},
                  "summary": {n: dict.fromkeys(("ordinary_ms", "large_ms", "behind_ms"), 10.0)
                              for n in (spike.UNPAGED, spike.SPILL_ALL, spike.SPILL_SOME)},
                  "timeline": {spike.UNPAGED: [1.0] * 20}},
        "bytes": {"known": {"up": known}, "profiler": {"HtoD": 5}, "rows": [
            {"way": way, "share": share, "must": must, "up": 1.0, "down": 1.0,
             "ratio": 1.005 * slower if must else None}
            for way in sweep.PAGED for share, must in ((0.0, 10), (1.0, 0))]},
        "cpu": {"numel": 1, "state_bytes": 4 << 28, "disk": {"write": 1e9, "read": 2e9},
                "different": ["file, 25% in RAM"] if bad else [], "rows": [
            {"name": "file, 25% in RAM", "share": 0.25, "budget": 1 << 28, "resident": (1 << 28) + (60 << 20) * slower,
             "by_place": {"file": 3 << 28, "host": 1 << 28}, "median_ms": 100.0}]},
    }  # fmt: skip
    machine = {"processor": "x", "cores": 2, "python": "3.12", "torch_cuda": "13.0"}
    whole = result(parts=found, left_out=[], machine=machine)
    return {**whole, "verdicts": [bar.as_dict() for bar in bars.bars(whole)]}
