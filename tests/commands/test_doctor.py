"""`python -m pagedopt doctor` and the rates it measures, on a machine without a GPU."""

from __future__ import annotations

import json
import re
import sys
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
from pagedopt.commands.doctor import examine, facts, trial
from pagedopt.kernels import team
from pagedopt.placements import choose
from pagedopt.planning import rates
from pagedopt.system import machine
from pagedopt.system.cuda import driver
from pagedopt.system.look import parts

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with a few MiB."""
    monkeypatch.setattr(rates, "SAMPLE", 4 << 20)
    monkeypatch.setattr(rates, "FILE_BLOCK", 2 << 20)


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
    placements = {t["placement"]: t for t in report["placements"] if t["device"] == "cpu"}
    assert placements.keys() == choose.ARENAS["cpu"].keys()
    assert all(t["works"] for t in placements.values())
    without, with_budget = report["choices"]
    assert (without["device_budget"], without["placement"]) == (None, "device")
    assert (with_budget["placement"], with_budget["host_access"]) == ("file", choose.ARENAS["cpu"]["file"].ways[0])


def test_quick_measures_nothing(doctor: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_, **__: pytest.fail("measured"))
    assert doctor.reports("--quick")["rates"] is None


def test_the_report_is_rates_for_a_plan(doctor: Program, plan: Program, small: None, tmp_path: Path) -> None:
    report = doctor.reports()
    (file := tmp_path / "here.json").write_text(json.dumps(report))
    assert Rates.load(file).as_dict() == report["rates"]
    assert machine.processor() in plan.says("--params", "1B", "--device", "cpu", "--rates", file)


def test_it_is_readable(doctor: Program, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parts.VARIABLE, "python")
    text = doctor.says()
    assert_has(text, "this machine", torch.__version__, "placements, each tried", "mapped", "file")
    assert_has(text, "look of a step", "Python (PAGEDOPT_LOOK=python)")
    assert_has(text, "state folder, writing", "placement='file'", "Everything that should work here does.")
    assert max(map(len, (line for line in text.splitlines() if line.startswith(("│", "┃"))))) <= 80
    headings = [re.split("[┃]", line)[1:-1] for line in text.splitlines() if line.startswith("┃")]
    assert len(headings) == 2
    assert all(cell.strip() for row in headings for cell in row)


def test_placements_of_a_gpu_are_listed_where_there_is_none(doctor: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = doctor.reports("--quick")
    there = {t["placement"]: t for t in report["placements"] if t["device"] == "cuda"}
    assert there.keys() == choose.ARENAS["cuda"].keys()
    assert {t["reason"] for t in there.values()} == {"there is no CUDA device here"}
    assert not any(t["works"] or t["promised"] for t in there.values())
    assert report["cards"] == []


@pytest.mark.parametrize("name", ["cupy", "cuda.bindings", "matplotlib"])
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


def test_without_torch_it_says_so(doctor: Program, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch cannot be imported" in doctor.reports(status=1)["problems"][0]
    assert program.says("doctor", status=1).startswith("problem: torch")


LOOKS = [
    ("python", None, False, "Python", "PAGEDOPT_LOOK=python"),
    ("", object(), False, "compiled", "its parts passed their test"),
    ("", None, True, "Python", "the test of the compiled one's parts has not ended yet"),
    ("", None, False, "Python", "a part of torch is not as expected, or could not be tested"),
]


@pytest.mark.parametrize(("variable", "look", "pending", "used", "reason"), LOOKS)
def test_the_look_in_use_and_why(
    variable: str, look: Any, pending: bool, used: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(parts.VARIABLE, variable)
    monkeypatch.setattr(parts, "compiled_look", lambda: look)
    monkeypatch.setattr(parts, "pending", lambda: pending)
    assert facts.look() == {"used": used, "reason": reason}


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
    tried = next(t for t in report["placements"] if t["placement"] == "file" and t["device"] == "cpu")
    assert (tried["works"], tried["reason"], len(report["problems"])) == (False, reason, status)
    assert reason in doctor.says("--quick", status=status)


def test_state_in_8_bits_that_is_not_stored_is_a_problem(doctor: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    step = PagedAdamW.step

    def forgetful(self: PagedAdamW) -> None:
        step(self)
        for entry in self.state.values():
            for name in ("exp_avg.absmax", "exp_avg_sq.absmax"):
                if name in entry:
                    entry[name].zero_()

    monkeypatch.setattr("pagedopt.optim.PagedAdamW.step", forgetful)
    report = doctor.reports("--quick", "--device", "cpu", status=1)
    assert re.fullmatch(
        r"parameters are 0.02\d from torch's after 2 steps with state in int8", report["step"]["reason"]
    )
    assert report["problems"] == [f"a step of AdamW on cpu failed: {report['step']['reason']}"]


def test_a_failing_step_is_a_problem(doctor: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedopt.optim.PagedAdamW.step", lambda self: None)
    report = doctor.reports("--quick", status=1)
    assert "parameters are 0.1" in (reason := report["step"]["reason"])
    assert report["problems"] == [f"a step of AdamW on cpu failed: {reason}"]


def test_what_is_chosen_on_a_gpu_and_why() -> None:
    cuda = torch.device("cuda", 0)
    found = Rates(both=101.7e9, in_place=84.4e9)
    tried = [{"placement": n, "device": "cuda:0", "works": True, "reason": ""} for n in choose.ARENAS["cuda"]]
    without, with_budget = trial.choices(cuda, tried, found)
    assert without["placement"] == "device"
    assert (with_budget["placement"], with_budget["host_access"]) == ("mapped", "staged")
    assert "102 GB/s staged, 84.4 GB/s in place" in with_budget["why"]
    tried[0].update(works=False, reason="no host pages")
    assert tried[0]["placement"] == "mapped"
    _, with_budget = trial.choices(cuda, tried, None)
    assert (with_budget["placement"], with_budget["host_access"]) == ("managed", "in_place")
    assert "mapped does not work: no host pages" in with_budget["why"]
    for one in tried:
        one.update(works=False, reason="nothing goes")
    assert trial.choices(cuda, tried, None)[1]["placement"] is None


def test_a_card_is_asked_for_its_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"CU_DEVICE_ATTRIBUTE_{a}" for a in facts.ATTRIBUTES.values()]
    known = SimpleNamespace(**{name: name for name in names if "HOST_VIRTUAL" not in name})  # as in CUDA 12.0

    def ask(name: str, handle: int) -> tuple[int, int]:
        return (801, 0) if "INTEGRATED" in name else (0, 2 if "ASYNC" in name else 1)

    fake = SimpleNamespace(CUdevice_attribute=known, cuDeviceGet=lambda i: (0, i), cuDeviceGetAttribute=ask)
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    assert facts.attributes(0) == {
        **dict.fromkeys(facts.ATTRIBUTES, 1),
        "asyncEngineCount": 2,
        "hostVirtualMemoryManagement": None,
        "integrated": None,
    }
    monkeypatch.setattr(driver, "bindings", raising(RuntimeError("no cuda-bindings")))
    assert facts.attributes(0) == dict.fromkeys(facts.ATTRIBUTES)


NVRM = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:19:55 2025\nGCC 12.3": "580.65.06",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45  Release Build": "595.45",
}


@pytest.mark.parametrize(("line", "version"), NVRM.items())
def test_the_drivers_version(line: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    assert machine.driver_version() == version


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.driver_version() is None


NO_GPU = {None: "is built without CUDA", "13.0": "sees no GPU", "nothing": "no NVIDIA driver"}


@pytest.mark.parametrize(("cuda", "text"), NO_GPU.items())
def test_a_gpu_that_torch_cannot_use_is_a_note(cuda: str | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "driver_version", lambda: None if cuda == "nothing" else "580.65.06")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert text in examine.notes(CPU, {"torch": "2"})[0]


@pytest.mark.parametrize(("value", "noted"), [("1", True), ("0", False)])
def test_a_compiler_that_is_turned_off_is_a_note(value: str, noted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", value)
    assert any("NUMBA_DISABLE_JIT" in note for note in examine.notes(torch.device("cpu"), {})) == noted


def test_a_torch_without_a_team_of_threads_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = dict.fromkeys(facts.PACKAGES, "1")
    assert not any("one thread" in note for note in examine.notes(CPU, packages))
    monkeypatch.setattr(team, "openmp", lambda: None)
    assert "steps on a CPU take one thread" in examine.notes(CPU, packages)[-1]
    assert not any("one thread" in note for note in examine.notes(torch.device("cuda"), packages))


def test_the_cpu_is_one_whatever_its_number(doctor: Program) -> None:
    status, said, _ = doctor.run("--device", "cpu:1", "--quick", "--json")
    assert status in (0, 1)
    assert {one["device"] for one in json.loads(said)["placements"]} >= {"cpu"}


def test_devices_that_are_not_here_are_refused(doctor: Program) -> None:
    assert "--device cuda:99: torch" in doctor.refuses("--device", "cuda:99")


def test_measuring_leaves_no_file_and_stays_in_its_folder(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rates.measure("cpu", seconds=0.05, folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert found.machine == machine.processor()
    assert found.versions["torch"] == torch.__version__
    found = rates.measure("cpu", seconds=0.05, folder=tmp_path / "absent")
    assert (found.file_read, found.file_write) == (None, None)
    assert found.ram
    with pytest.raises(ValueError, match="device is meta"):
        rates.measure("meta")
    monkeypatch.setattr("pagedopt.system.files.host.available", lambda: 1 << 20)
    with pytest.raises(MemoryError, match="host memory are free"):
        rates.measure("cpu")


def test_rates_come_back_from_a_file(tmp_path: Path) -> None:
    rates.ASSUMED.save(tmp_path / "r.json")
    assert Rates.load(tmp_path / "r.json") == rates.ASSUMED
    for name, value in (("up", 0), ("both", float("inf")), ("ram", True)):
        with pytest.raises(ValueError, match=f"rate {name} is {value}"):
            Rates(**{name: value})  # type: ignore[arg-type]
