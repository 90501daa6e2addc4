"""Train 5, save, a new process, load, train 5: the bits of 10 uninterrupted, wherever state is before and after."""

from __future__ import annotations

import itertools
from pathlib import Path

import resume
from resume import STEPS, Case
from support import threads

#: (placement, budget): a budget below 1 is a share of the state.
PLACES: dict[str, tuple[str | None, float | None]] = {
    "device": ("device", None),
    "host": ("host", None),
    "host 0": ("host", 0),
    "file": ("file", None),
    "file 0": ("file", 0),
    "file half": ("file", 0.5),
    "default half": (None, 0.5),
}
LOCATIONS = (None, "cpu", "mmap")
#: Every placement reads what every other wrote; with bfloat16 parameters, what it wrote itself.
CASES = [
    Case(file, *place, "float32", location)
    for (file, place), location in zip(
        itertools.product(PLACES, PLACES.values()), itertools.cycle(LOCATIONS), strict=False
    )
] + [Case(file, *place, "bfloat16") for file, place in PLACES.items()]


def test_a_new_process_goes_on_to_the_same_bits_and_saving_changes_none(tmp_path: Path) -> None:
    """One test, so that there is one new process for all cases."""
    found, whole = {}, {}
    with threads(1):
        for dtype in resume.DTYPES:
            params = resume.parameters("cpu", dtype)
            opt = resume.optimizer(params, "device", None)
            resume.train(params, opt, 0, 2 * STEPS)
            whole[dtype] = resume.digest(params, opt)
            for name, place in PLACES.items():
                params = resume.parameters("cpu", dtype)
                opt = resume.optimizer(params, *place)
                resume.train(params, opt, 0)
                resume.save(tmp_path, name, dtype, params, opt)
                resume.train(params, opt, STEPS)
                found[f"{name} went on itself, {dtype}"] = resume.digest(params, opt) == whole[dtype]
    results = resume.in_new_process(tmp_path, CASES, "cpu")
    found |= {case.name: results[case.name] == whole[case.dtype] or results[case.name] for case in CASES}
    assert {name: result for name, result in found.items() if result is not True} == {}


def test_files_hold_little_more_than_the_state(tmp_path: Path) -> None:
    params = resume.parameters("cpu", "float32")
    opt = resume.optimizer(params, "file", 0)
    resume.train(params, opt, 0)
    resume.save(tmp_path, "one", "float32", params, opt)
    size = (tmp_path / "one-float32.pt").stat().st_size
    granules = 4 * (64 << 10)  # to which both moments are rounded, in two arenas
    assert size <= 1.5 * resume.state_bytes("cpu") + granules + 8192  # parameters are half as large as their state
