"""Compiling late and early: a real run of toys, real wheels, real caches, and what is made of their rows."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import experiment, judged, regenerated, run_quick

from experiments.harness.rows import Rows
from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.harness.time import series
from experiments.jit import caches, resolver, start
from experiments.works import compiling, wheels
from experiments.works.compiling import AHEAD, ON_CPU, OURS, WAYS, Way
from experiments.works.fresh import Fresh
from experiments.works.reference import Bound, Reference

CPU = torch.device("cpu")
ONE: wheels.Axes = {"python": ("3.12",), "cuda": ("13.0",), "torch": ("2.10", "2.11"), "system": ("win_amd64",)}


def verdicts(question: str, rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    (asked,) = (q for q in experiment("jit_or_aot").questions if q.name == question)
    return {bar.title: bar.verdict(asked.derive(Rows(rows))).met for bar in asked.listed("BARS")}


@pytest.mark.long
def test_toys_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("jit_or_aot", tmp_path, plots=["start"])
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    assert list(parts) == ["start", "matrix", "resolver", "caches"]
    (ours,) = parts["start"]
    assert ours["case"] == ON_CPU
    assert 0 < ours["cold"]["median"] < ours["process"]["median"]
    assert ours["warm"] is None
    counts = {row["kind"]: row["wheels"] for row in parts["matrix"]}
    assert counts == {"pagedopt": 1, "any_torch": 1, "any_python": 2, "full": 2}
    assert [row["host"] for row in parts["resolver"]] == ["2.0", "1.0"]
    (first,) = parts["caches"]
    assert (first["case"], first["found"], first["wrong"]) == (caches.EMPTY, 0, 0)
    assert first["beside"] >= 4
    for name in WAYS.keys() - {ON_CPU}:
        assert name in found["left_out"][0]


def test_committed_results_hold_and_make_the_committed_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("jit_or_aot", "nvidia-h200") == judged("jit_or_aot", "cpu") == 5
    regenerated("jit_or_aot", tmp_path, monkeypatch)


# --- start


def test_the_scalars_are_adamws() -> None:
    """The update in torch's operators, not compiled, is right; with those of another step it is not."""
    for shift, right in ((0, True), (1, False)):
        params = compiling.work(2).parameters(CPU)
        kept = compiling.lists(params)
        for step in range(1, 5):
            compiling.update(kept, *(torch.tensor(x) for x in compiling.scalars(step + shift)[3:5]))
        error = Reference(compiling.work(2).parameters(CPU)).error(params, Bound(lambda: None, 4))
        assert (error < compiling.work(2).tolerance) is right


def test_a_row_of_the_list_is_four_addresses_and_a_length() -> None:
    params, seen = compiling.work(2).parameters(CPU), []
    step = compiling.by_addresses(params, lambda rows, stream, *given: seen.append((rows, stream, given)))
    step()
    step()
    rows, stream, given = seen[1]
    assert rows.shape == (2, 5)
    assert [row[0].item() for row in rows] == [p.data_ptr() for p in params]
    assert [row[1].item() for row in rows] == [p.grad.data_ptr() for p in params if p.grad is not None]
    assert rows[:, 4].tolist() == [4096, 4096]
    assert (stream, given) == (0, compiling.scalars(2))


#: The kernel as g++ takes it, and a loop that plays its threads.
PLAYED = f"""
#include <cmath>
#define __CUDACC__
#define __device__
#define __global__
struct Index {{ int x, y; }};
static Index blockIdx, threadIdx, blockDim, gridDim;
{compiling.KERNEL}
extern "C" void play(const long long* rows, int count, SCALARS) {{
    gridDim = {{{compiling.BLOCKS}, count}}, blockDim = {{{compiling.THREADS}, 1}};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) adamw(rows, GIVEN);
}}
"""


def test_the_cuda_kernel_is_right_where_a_loop_plays_its_threads(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    library = tmp_path / "played.so"
    command = ["g++", "-O2", "-fPIC", "-shared", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=PLAYED, text=True, check=True, timeout=60)
    play = ctypes.CDLL(str(library)).play
    play.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_double] * 6]
    params = compiling.work(3).parameters(CPU)
    step = compiling.by_addresses(params, lambda rows, _, *given: play(rows.data_ptr(), len(rows), *given))
    error = Reference(compiling.work(3).parameters(CPU)).error(params, Bound(step))
    assert error < compiling.work(3).tolerance


def planted(monkeypatch: pytest.MonkeyPatch, begin: Callable[..., Any]) -> None:
    monkeypatch.setitem(WAYS, "planted", Way(begin))


def test_a_wrong_update_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda params, _: lambda: [p.data.mul_(0.5) for p in params])
    with pytest.raises(AssertionError, match="its update is off by"):
        next(start.started("planted", "cpu", 1, "", True))


@pytest.mark.parametrize("compilers", [True, False])
def test_a_process_without_compilers_finds_none(compilers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is none here anyway")
    for variable in ("PATH", "CC", "CXX", "CUDA_HOME"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))  # so that it is put back

    def begin(params: list[torch.nn.Parameter], _: Path) -> Callable[[], object]:
        assert (shutil.which("g++") is not None) is compilers
        return torch.optim.AdamW(params, **compiling.HYPER).step

    planted(monkeypatch, begin)
    assert next(start.started("planted", "cpu", 1, "", compilers))["first"] > 0


@pytest.mark.long
def test_a_warm_start_finds_what_the_cold_one_kept(tmp_path: Path) -> None:
    row = start.timed(1, ON_CPU, "cpu", 1, str(tmp_path), False)
    assert 0 < row["warm"]["median"] < row["cold"]["median"] < row["process"]["median"]


def test_a_way_that_needs_a_compiler_is_started_again_with_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def played(_: object, name: str, device: str, count: int, folder: str, compilers: bool, **__: Any) -> Fresh:
        needs = "ended with 1: a\nError: no g++\nfor more"
        return Fresh([{"first": 2.0}], 3.0, None if compilers or name == OURS else needs)

    monkeypatch.setattr(start, "fresh", played)
    for name, refusal in ((OURS, ""), ("load_inline", "Error: no g++")):
        found = start.of_way(WAYS[name], 1, name, "cpu", 1, str(tmp_path))
        assert (found["refusal"], found["cold"]["median"], found["process"]["median"]) == (refusal, 2.0, 3.0)
    with pytest.raises(RuntimeError, match=r"^Error: no g\+\+$"):
        start.timed(1, "load_inline", "cpu", 1, "", False)


@pytest.mark.long
def test_an_extension_is_built_and_right(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    found = start.of_way(WAYS[AHEAD], 0, AHEAD, "cpu", 2, str(tmp_path))
    assert found["tag"].startswith("cp3")
    assert found["cold"]["median"] < 1 < found["build"]["median"]
    assert found["refusal"] == ""


def begun(case: str, cold: float, warm: float = 0.2, refusal: str = "", build: object = None) -> dict[str, Any]:
    times = {"cold": series([cold], "wall"), "warm": series([warm], "wall")}
    return {"case": case, "device": "cuda", "refusal": refusal, "build": build, **times}


def test_who_starts_soon_and_needs_nothing_is_named() -> None:
    rivals = [begun("slow", 1.1), begun("compiler", 0.9, refusal="no g++"), begun("ahead", 0.1, build={"median": 9})]
    assert set(verdicts("start", [begun(OURS, 0.4), *rivals]).values()) == {True}
    found = verdicts("start", [begun(OURS, 0.6, 0.4), *rivals, begun("CuPy RawKernel", 0.3)])
    assert set(found.values()) == {False}
    said = start.convenient(Rows([begun(OURS, 0.6), *rivals, begun("CuPy RawKernel", 0.3)]))
    assert said is not None
    assert said.endswith(f": {OURS}, CuPy RawKernel.")
    assert set(verdicts("start", [{**begun(ON_CPU, 5.0), "device": "cpu"}]).values()) == {None}


# --- wheels


@pytest.mark.parametrize(("kind", "count"), [("any_torch", 9), ("any_python", 45), ("full", 225)])
def test_a_kind_has_a_wheel_for_each_value_of_its_axes(kind: str, count: int, tmp_path: Path) -> None:
    wheels.put_all(tmp_path, kind, wheels.AXES)
    assert len(list(tmp_path.rglob("*.whl"))) == count


def test_pip_takes_the_wheel_of_the_machine_or_none(tmp_path: Path) -> None:
    for torch_version in ONE["torch"]:
        wheels.put(tmp_path, "torch", f"{torch_version}.0")
    wheels.put_all(tmp_path, "full", ONE)
    machine = next(iter(wheels.machines(ONE)))
    wheel = "13.0/full-1.0%2Btorch2.10-cp312-cp312-win_amd64.whl"
    assert wheels.chosen(tmp_path, ["full"], machine)["full"] == wheel
    (tmp_path / wheel.replace("%2B", "+")).unlink()
    assert wheels.chosen(tmp_path, ["full"], machine) == {}


def test_a_wheel_too_many_misses_the_bar() -> None:
    for taken in (1, 2):
        assert verdicts("matrix", [{"kind": "pagedopt", "wheels": taken}]) == {"wheels of ours": taken == 1}


@pytest.mark.long
def test_pip_takes_a_newer_host_back() -> None:
    rows = list(resolver.measure(Run(CPU, False, console())))
    assert [(row["host"], row["code"], row["warned"]) for row in rows] == [
        ("2.0", 0, False),
        ("1.0", 0, False),
        ("2.0", 0, True),
        ("2.0", 1, True),
    ]
    assert rows[1]["installed"] == "add_on 1.0, host 1.0"


# --- caches


def filled(folder: Path) -> dict[str, bytes]:
    for name in ("a.numba", "b.numba", "a.sealed", "b.sealed"):
        (folder / name).write_bytes(name.encode())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("alter", [caches.flip, caches.exchange, caches.open_to_all])
def test_every_file_is_altered(alter: Callable[[Path], None], tmp_path: Path) -> None:
    before = filled(tmp_path)
    alter(tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    if alter is caches.open_to_all:
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666}
    else:
        assert all(before[name] != after[name] for name in before)
    if alter is caches.exchange:
        assert (after["a.numba"], after["b.sealed"]) == (b"b.numba", b"a.sealed")


def test_a_kernel_that_computes_something_else_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDOPT_CACHE_DIR", str(tmp_path))
    assert next(caches.used("cpu", "sm_90", ""))["right"] is True
    monkeypatch.setitem(caches.KERNELS, "mul_scalar", 5.0)  # as if x + 3 were run in its place
    assert next(caches.used("cpu", "sm_90", ""))["right"] is False


@pytest.mark.long
def test_files_that_are_taken_though_they_count_as_altered_miss_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(caches.ALTERED, "nothing", lambda _: None)
    tmp_path.chmod(0o700)
    assert caches.looked_at(caches.EMPTY, tmp_path, "cpu")["wrong"] == 0
    row = caches.looked_at("nothing", tmp_path, "cpu")
    assert row["believed"] == row["found"] >= 4
    assert list(verdicts("caches", [row]).values()) == [False, True]
    planted = caches.looked_at("whole kernels planted under each other's names", tmp_path, "cpu")
    assert (planted["believed"], planted["anew"], planted["wrong"]) == (0, row["found"], 0)
    assert list(verdicts("caches", [{**row, "believed": 0, "wrong": 1}]).values()) == [True, False]
