"""`python -m pagedopt doctor` and the rates it measures, on a machine without a GPU."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import run
from command_line import Program, assert_has
from paths import ROOT
from stand_ins import raising

from pagedopt import PagedAdamW, Rates
from pagedopt.commands import examine
from pagedopt.commands.doctor import about_card
from pagedopt.placements import choose
from pagedopt.planning import rates
from pagedopt.system import driver, machine
from pagedopt.system import look as build
from pagedopt.system.state_file import FOLDER_VARIABLE


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with a few MiB."""
    monkeypatch.setattr(rates, "SAMPLE", 4 << 20)
    monkeypatch.setattr(rates, "FILE_SAMPLE", 2 << 20)
    monkeypatch.setattr(rates, "SECONDS", 0.05)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys, "doctor", "--device", "cpu")


def test_a_healthy_machine(doctor: Program, small: None) -> None:
    report = doctor.reports()
    assert (report["problems"], report["device"], report["packages"]["torch"]) == ([], "cpu", torch.__version__)
    assert report["packages"]["numba"]
    assert 0 < report["host"]["available"] <= report["host"]["limits"][0]["limit"]
    assert report["state_folder"]["free"] > 0
    assert report["step"] == {"works": True, "reason": ""}
    found = Rates.from_dict(report["rates"])
    assert (found.assumed, found.both) == (False, None)
    assert all([found.ram, found.file_read, found.file_write]), found
    placements = {t["placement"]: t for t in report["placements"]}
    assert placements.keys() == choose.ARENAS["cpu"].keys()
    assert all(t["works"] for t in placements.values())
    assert [name for name, t in placements.items() if t["default"]] == ["file"]
    assert (placements["file"]["ways"], placements["device"]["ways"]) == (["staged"], [])


def test_quick_measures_nothing(doctor: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_, **__: pytest.fail("measured"))
    assert doctor.reports("--quick")["rates"] is None


def test_the_report_is_rates_for_a_plan(doctor: Program, plan: Program, small: None, tmp_path: Path) -> None:
    report = doctor.reports()
    (file := tmp_path / "here.json").write_text(json.dumps(report))
    assert Rates.load(file).as_dict() == report["rates"]
    assert machine.processor() in plan.says("--params", "1B", "--device", "cpu", "--rates", file)


def test_it_is_readable(doctor: Program, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.VARIABLE, "python")
    text = doctor.says()
    assert_has(text, "this machine", torch.__version__, "placements on cpu, each tried", "free of the machine")
    assert_has(text, "change detection", "Python (PAGEDOPT_LOOK=python)")
    assert_has(text, "state folder, writing", "works, staged (what an optimizer with a budget gets)")
    assert_has(text, "Everything that should work here does.")
    assert max(map(len, (line for line in text.splitlines() if line.startswith("│")))) <= 80


@pytest.mark.parametrize("name", ["cupy", "cuda.bindings"])
def test_what_a_cpu_does_not_need_is_a_note(name: str, doctor: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    report = doctor.reports("--quick")
    assert report["packages"][name] is None
    assert any(note.startswith(f"{name} is not installed") for note in report["notes"])


def test_nothing_but_torch_numpy_and_rich() -> None:
    """In a process of its own, where nothing has imported them before."""
    program = """
import sys
for name in ("numba", "cupy", "cuda", "cuda.bindings", "matplotlib"):
    sys.modules[name] = None
from pagedopt.commands.main import main
sys.exit(main(["doctor", "--json", "--quick", "--device", "cpu"]))
"""
    done = run("-c", program, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [report["packages"][name] for name in ("numba", "cupy", "cuda.bindings")] == [None] * 3
    assert report["cuda"]["nvrtc"] is None
    (problem,) = report["problems"]
    assert "numba is missing, which parameters on cpu need" in problem
    assert {t["placement"] for t in report["placements"] if t["works"]} == choose.ARENAS["cpu"].keys()


LOOKS = [
    ("python", None, "Python", "PAGEDOPT_LOOK=python"),
    ("", object(), "compiled", "one call for a step that repeats the last one"),
    ("", None, "Python", "it is being compiled"),
]


@pytest.mark.parametrize(("variable", "look", "used", "reason"), LOOKS)
def test_the_look_in_use_and_why(
    variable: str, look: Any, used: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.VARIABLE, variable)
    monkeypatch.setattr(build, "compiled_look", lambda: look)
    monkeypatch.setattr(build, "_build", build._Build())
    assert examine.look() == {"used": used, "reason": reason}


class Broken(choose.Arena):
    """Claims to work, and fails in some way."""

    name = "file"
    away = "file"
    paged = True
    granule = 2 << 20

    def __init__(self, layout: Any, device: torch.device, resident: int) -> None:
        super().__init__(layout, device, resident)
        self.tensor = torch.zeros(layout.nbytes, dtype=torch.uint8)

    def move(self, resident: int) -> None:
        for offset, nbytes in self.layout.stretches(self.layout.pages - 1, self.layout.pages):
            self.tensor[offset : offset + nbytes] = 0


class Full(Broken):
    name = "file"
    __init__ = raising(MemoryError("no room\nat all"))


class Refusing(Broken):
    name = "file"

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        return "it is Sunday"


@pytest.mark.parametrize(
    ("kind", "reason", "status"),
    [(Broken, "state read back is not what was written", 1), (Full, "no room", 1), (Refusing, "it is Sunday", 0)],
)
def test_a_placement_that_breaks_its_promise_is_a_problem(
    kind: type[choose.Arena], reason: str, status: int, doctor: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choose.ARENAS["cpu"], "file", kind)
    report = doctor.reports("--quick", status=status)
    tried = next(t for t in report["placements"] if t["placement"] == "file")
    assert (tried["works"], tried["reason"], tried["default"], len(report["problems"])) == (
        False,
        reason,
        False,
        status,
    )
    assert f"{'BROKEN' if status else 'no'}: {reason}" in doctor.says("--quick", status=status)


@pytest.mark.parametrize(
    ("lost", "far", "option"),
    [
        (("exp_avg.absmax", "exp_avg_sq.absmax"), r"0.02\d", "state_format='int8'"),
        (("param.low16",), r"0.00\d+", r"param_format='bfloat16\+16'"),
    ],
)
def test_state_that_is_not_stored_is_a_problem(
    lost: tuple[str, ...], far: str, option: str, doctor: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = PagedAdamW.step

    def forgetful(self: PagedAdamW) -> None:
        step(self)
        for entry in self.state.values():
            for name in lost:
                if name in entry:
                    entry[name].zero_()

    monkeypatch.setattr("pagedopt.optim.PagedAdamW.step", forgetful)
    report = doctor.reports("--quick", "--device", "cpu", status=1)
    assert re.fullmatch(rf"parameters are {far} from torch's after 2 steps with {option}", report["step"]["reason"])
    assert report["problems"] == [f"a step of AdamW on cpu failed: {report['step']['reason']}"]


def test_a_failing_step_is_a_problem(doctor: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedopt.optim.PagedAdamW.step", lambda self: None)
    report = doctor.reports("--quick", status=1)
    assert "parameters are 0.1" in (reason := report["step"]["reason"])
    assert report["problems"] == [f"a step of AdamW on cpu failed: {reason}"]


def test_the_default_on_a_gpu_is_the_first_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: dict[str, str] = {}

    def played(kind: type[choose.Arena], device: torch.device) -> dict[str, Any]:
        return {"works": kind.name not in broken}

    def default() -> list[str]:
        return [t["placement"] for t in examine.try_placements(torch.device("cuda", 0)) if t["default"]]

    monkeypatch.setattr(examine, "_try", played)
    for name in ("mapped", "managed", "host"):
        assert default() == [name]
        broken[name] = "it is Sunday"
    assert default() == []


def test_a_card_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="a card", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 << 30, 24 << 30))
    able = driver.Capabilities(managed=True, concurrent_managed=False, mapped=True)
    monkeypatch.setattr(driver, "capabilities", lambda index: able)
    known = examine.card(0)
    assert known["can"] == {"managed": True, "concurrent_managed": False, "mapped": True, "host_pages": False}
    said = dict(about_card(known))
    assert said["memory"] == "10.0 GiB free of 24.0 GiB"
    assert said["memory of the host"] == "managed yes, concurrent managed no, mapped yes, host pages no"
    monkeypatch.setattr(driver, "capabilities", raising(RuntimeError("no cuda-bindings")))
    assert dict(about_card(examine.card(0)))["memory of the host"] == "not known without cuda-bindings"


NVRM = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:19:55 2025\nGCC 12.3": "580.65.06",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45  Release Build": "595.45",
}


@pytest.mark.parametrize(("line", "version"), NVRM.items())
def test_the_drivers_version(line: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    assert machine.driver_version() == version


NO_GPU = {None: "is built without CUDA", "13.0": "sees no GPU", "nothing": "no NVIDIA driver"}


@pytest.mark.parametrize(("cuda", "text"), NO_GPU.items())
def test_a_gpu_that_torch_cannot_use_is_a_note(cuda: str | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: None if cuda == "nothing" else "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert text in examine.notes(dict.fromkeys(examine.PACKAGES, "2"))[0]


@pytest.mark.parametrize(("value", "noted"), [("1", True), ("0", False)])
def test_a_compiler_that_is_turned_off_is_a_note(value: str, noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
    assert any("NUMBA_DISABLE_JIT" in note for note in examine.notes(dict.fromkeys(examine.PACKAGES, "1"))) == noted


def test_devices_that_are_not_here_are_refused(doctor: Program) -> None:
    assert "--device cuda:99: torch" in doctor.refuses("--device", "cuda:99")


def test_measuring_leaves_no_file_and_says_what_there_is(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    found = Rates.measured("cpu")
    assert not list(tmp_path.iterdir())
    assert (found.machine, found.assumed, found.up) == (machine.processor(), False, None)
    assert found.ram
    assert found.file_read
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "absent"))
    monkeypatch.setattr("pagedopt.system.host.available", lambda: 1 << 20)  # it is measured with little, then
    found = Rates.measured("cpu")
    assert (found.file_read, found.file_write) == (None, None)
    assert found.ram


def test_a_rate_is_bytes_by_the_median_of_seconds_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], [9.0, 2.0, 1.0, 4.0]

    def work() -> None:
        now[0] += took.pop(0)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert rates._rate(1000, [work], before=lambda: now.append(0.0)) == 500
    assert (took, len(now)) == ([], 5)


def test_rates_come_back_from_a_file(tmp_path: Path) -> None:
    rates.ASSUMED.save(tmp_path / "r.json")
    assert Rates.load(tmp_path / "r.json") == rates.ASSUMED
    for name, value in (("up", 0), ("both", float("inf")), ("ram", True)):
        with pytest.raises(ValueError, match=f"rate {name} is {value}"):
            Rates(**{name: value})  # type: ignore[arg-type]
