"""Where int8 state is, where it has been, and in which process it goes on change no bit of it."""

from __future__ import annotations

import copy
import itertools
import json
import signal
import time
from pathlib import Path
from typing import Any

import int8_training as training
import pytest
import torch
from children import python, start
from int8_support import same
from int8_training import LONG, PLACES, STEPS, bits, made, save, train
from pairwise import cover
from support import threads

pytestmark = pytest.mark.usefixtures("folder")
HALF = STEPS // 2
FACTORS: dict[str, tuple[Any, ...]] = {
    "late": (False, True), "place": tuple(PLACES), "resumed": ("no", "loaded", "copied", "new process"),
    "kind": ("stochastic", "nearest"), "seed": (0, 7), "own": (False, True),
}  # fmt: skip
#: A gradient that comes late, state that is away, and a resume: every combination.
CASES = cover(FACTORS, together=("late", "place", "resumed"))


def test_the_cases_hold_all_pairs_and_the_triple() -> None:
    for names in (*itertools.combinations(FACTORS, 2), ("late", "place", "resumed")):
        held = {tuple(case[name] for name in names) for case in CASES}
        assert held == set(itertools.product(*(FACTORS[name] for name in names))), names
    assert len(CASES) < 50


def halfway(case: dict[str, Any], folder: Path) -> list[torch.Tensor] | None:
    """Train a case to the middle, and to the end unless a new process does that; its bits, if they are known here."""
    opt, params = made(case)
    train(opt, params, range(HALF), case["late"], case["place"])
    if case["resumed"] == "new process":
        save(folder / f"{case['number']}.pt", opt, params)
        return None
    if case["resumed"] == "copied":
        opt, params = copy.deepcopy((opt, params))
    if case["resumed"] == "loaded":
        save(folder / "loaded.pt", opt, params)
        opt, params = made({**case, "seed": 99})
        training.load(opt, params, torch.load(folder / "loaded.pt", weights_only=True))
    train(opt, params, range(HALF, STEPS), case["late"], case["place"])
    return bits(opt, params)


@pytest.mark.long
def test_budgets_files_spills_and_resumes_change_no_bit(tmp_path: Path) -> None:
    """One test, so that one new process goes on with all cases that need one."""
    cases = [{**case, "number": i} for i, case in enumerate(CASES)]
    whole: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    with threads(1):
        found = [halfway(case, tmp_path) for case in cases]
        others = [case for case in cases if case["resumed"] == "new process"]
        (tmp_path / "cases.json").write_text(json.dumps(others))
        python("-c", f"import int8_training; int8_training.go_on({str(tmp_path)!r})")
        for case, result in zip(cases, found, strict=True):
            key = tuple(case[name] for name in ("late", "kind", "seed", "own"))
            if key not in whole:
                opt, params = made({**case, "place": "resident"})
                train(opt, params, range(STEPS), case["late"])
                whole[key] = bits(opt, params)
            if result is None:
                result = torch.load(tmp_path / f"{case['number']}.done", weights_only=True)
            assert len(result) == len(whole[key])
            assert same(result, whole[key]), case
    ends = list(whole.values())
    assert not any(same(a[:1], b[:1]) for a, b in itertools.pairwise(ends)), "cases differ, so something was compared"


def test_state_was_where_a_case_says() -> None:
    """In each place state moves, or the cases above would show nothing."""
    seen: dict[str, list[dict[str, int]]] = {}
    for place in PLACES:
        opt, params = made({"kind": "stochastic", "place": place, "seed": 0, "own": False})
        for step in range(STEPS):
            train(opt, params, range(step, step + 1), True, place)
            seen.setdefault(place, []).append(dict(opt.memory_report().by_place))
    away = {place: [report.get("file", 0) > 0 for report in reports] for place, reports in seen.items()}
    assert away["resident"] == [False] * STEPS
    assert away["file"] == away["part"] == [True] * STEPS
    assert away["spill()"] == [False] * 2 + [True] * 4 + [False] * 2
    assert away["budgets"] == [True] * 2 + [False] * 3 + [True] * 3
    assert seen["part"][0]["host"] > 0


def test_the_number_of_threads_changes_no_bit() -> None:
    results = []
    for count in (1, 5):
        with threads(count):
            opt, params = made({"kind": "stochastic", "place": "part", "seed": 3, "own": False})
            train(opt, params, range(3))
            results.append(bits(opt, params))
    assert same(*results)


def kill_at_work(folder: Path) -> None:
    """Begin the long training in a process, and kill that once its checkpoint is there and it goes on."""
    code = f"import int8_training; int8_training.train_until_killed({str(folder)!r})"
    child = start("-c", code)
    try:
        until = time.monotonic() + 90
        while not (folder / "half.pt").exists():
            assert child.exitcode is None, "it ended before its checkpoint"
            assert time.monotonic() < until, "no checkpoint yet"
            time.sleep(0.02)
        time.sleep(0.1)
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL


def test_200_steps_killed_and_resumed_are_200_steps(tmp_path: Path) -> None:
    """In this process, which has not taken the steps before the checkpoint."""
    kill_at_work(tmp_path)
    with threads(1):
        opt, params = training.long_training("part")
        training.load(opt, params, torch.load(tmp_path / "half.pt", weights_only=True))
        train(opt, params, range(LONG // 2, LONG))
        whole, theirs = training.long_training("resident")
        train(whole, theirs, range(LONG))
    assert same(bits(opt, params), bits(whole, theirs))
    assert float(opt.state[params[0]]["step"]) == LONG
