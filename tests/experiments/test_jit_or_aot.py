"""Compiling late and early: processes without compilers, real wheels, and altered caches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.harness.run import Run
from experiments.harness.show import console
from experiments.jit import caches, resolver, start
from experiments.works import compiling, wheels
from experiments.works.compiling import AHEAD, OURS, WAYS, Way
from experiments.works.fresh import Fresh

CPU = torch.device("cpu")
ONE: wheels.Axes = {"python": ("3.12",), "cuda": ("13.0",), "torch": ("2.10", "2.11"), "system": ("win_amd64",)}


# --- start


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
def test_files_that_are_taken_though_they_count_as_altered_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(caches.ALTERED, "nothing", lambda _: None)
    tmp_path.chmod(0o700)
    assert caches.looked_at(caches.EMPTY, tmp_path, "cpu")["wrong"] == 0
    row = caches.looked_at("nothing", tmp_path, "cpu")
    assert row["believed"] == row["found"] >= 4
    planted = caches.looked_at("whole kernels planted under each other's names", tmp_path, "cpu")
    assert (planted["believed"], planted["anew"], planted["wrong"]) == (0, row["found"], 0)
