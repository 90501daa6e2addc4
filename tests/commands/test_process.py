"""The program as a process: Ctrl-C anywhere is one line and 130; slips of the shell get a hint."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import run
from command_line import Program
from often import long_but
from paths import ROOT

from pagedopt.commands.main import build_parser

#: Runs a module as `python -m` does, and sends itself Ctrl-C when a module or file is looked for.
SELF = """
import runpy, signal, sys
program, module, when, handler, *arguments = sys.argv
def watch(event, found):
    if event in ("import", "open") and str(found[0]).endswith(when):
        signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, getattr(signal, handler))
sys.argv = [program, *arguments]
sys.addaudithook(watch)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
TRAIN = ["train", "--device", "cpu", "--threads", "1", "--steps", "2", "--batch", "1", "--out"]


def interrupted(module: str, when: str, *arguments: str, handler: str = "default_int_handler") -> tuple[int, str]:
    """Exit status and what was said on stderr of a run that gets Ctrl-C when a module is imported or a file opened."""
    fresh = when in ("torch", "torch.cuda")
    return said_by("-c", SELF, module, when, handler, *arguments, to=os.devnull, fresh=fresh, COLUMNS="80")


@pytest.mark.parametrize("when", ["torch", "torch.cuda", "pagedopt.planning.estimate", "rates.json"])
def test_plan_can_be_interrupted_anywhere(when: str, tmp_path: Path) -> None:
    code, said = interrupted("pagedopt", when, "plan", "--params", "1B", "--rates", str(tmp_path / "rates.json"))
    assert code == 130, said
    assert said in ("pagedopt: interrupted\n", "pagedopt plan: interrupted\n")


@pytest.mark.parametrize("when", long_but(["pagedopt.commands.contest", "argparse.py"], "argparse.py".__eq__))
def test_train_can_be_interrupted_before_its_first_step(when: str, tmp_path: Path) -> None:
    assert interrupted("pagedopt", when, *TRAIN, str(tmp_path)) == (130, "pagedopt train: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("when", ["torch", "experiments.works"])
def test_experiments_can_be_interrupted_anywhere(when: str) -> None:
    assert interrupted("experiments", when) == (130, "experiments: interrupted\n")


@pytest.mark.parametrize("line", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_an_interrupt_from_within_exec_ends_with_a_status_too(line: str, tmp_path: Path) -> None:
    """As one in the middle of making a dataclass: CPython takes note of it there, and at its end goes by the signal."""
    (tmp_path / "torn.py").write_text(
        "import atexit\nfrom pagedopt.commands.process import end, process\n"
        "atexit.register(print, 'put away')\n"
        f"def run(_):\n    {line}\n"
        "end(process('torn', lambda: None, run))\n"
    )
    path, out = os.pathsep.join([str(tmp_path), str(ROOT)]), tmp_path / "out"
    assert said_by("-m", "torn", to=str(out), PYTHONPATH=path) == (130, "torn: interrupted\n")
    assert out.read_text() == "put away\n"


def test_who_ignores_it_is_not_interrupted() -> None:
    assert interrupted("pagedopt", "torch.cuda", "plan", "--params", "1B", handler="SIG_IGN") == (0, "")


def test_in_this_process_the_handler_stays(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pagedopt.commands.plan_rows.plan", stop)
    before = signal.getsignal(signal.SIGINT)
    assert program.run("plan", "--params", "1B") == (130, "", "pagedopt plan: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


def said_by(*command: str, to: str = "", fresh: bool = True, **environment: str) -> tuple[int, str]:
    """Exit status and stderr of a program whose stdout goes to a file, or else to a reader who has gone."""
    if not fresh:
        begun = run(*command, cwd=ROOT, out=to, **environment)
        return begun.returncode, begun.stderr
    with contextlib.ExitStack() as stack:
        if to:
            out: Any = stack.enter_context(open(to, "w"))
        else:
            read, out = os.pipe()
            os.close(read)
            stack.callback(os.close, out)
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, stdout=out,
            stderr=subprocess.PIPE, text=True, timeout=100, check=False,
        )  # fmt: skip
    return done.returncode, done.stderr


PLAN = ("-m", "pagedopt", "plan", "--params", "1B")
OUTPUTS = [
    ("pagedopt", PLAN),
    pytest.param("pagedopt", (*PLAN, "--json"), marks=pytest.mark.long),
    pytest.param("experiments", ("-m", "experiments"), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "command"), OUTPUTS)
def test_a_reader_who_has_gone_is_no_traceback(name: str, command: tuple[str, ...]) -> None:
    assert said_by(*command) == (1, "")


@pytest.mark.parametrize(("name", "command"), OUTPUTS)
def test_an_output_that_is_full_is_one_line(name: str, command: tuple[str, ...]) -> None:
    full = "the output cannot be written (No space left on device); make room, or send it elsewhere"
    assert said_by(*command, to="/dev/full", fresh=False) == (2, f"{name}: {full}\n")


@pytest.mark.parametrize(
    "command", [PLAN, ("-m", "pagedopt", "doctor"), ("-m", "pagedopt", "train"), ("-m", "experiments")]
)
def test_a_package_that_is_missing_is_one_line(command: tuple[str, ...]) -> None:
    code, said = said_by("-S", *command, to=os.devnull, PYTHONPATH="")  # -S: without what is installed
    assert (code, said.count("\n")) == (1, 1), said
    assert re.fullmatch(r"\w+: (torch|rich|numpy) cannot be imported \(.*\); `make setup` installs it, .*\n", said)


def test_a_program_is_shown_the_line_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "import torch\nfrom pagedopt import PagedSGD\np = torch.nn.Parameter(torch.ones(3))\np.grad = torch.ones(3)\n"
        "PagedSGD([p], lr=0.1).step()  # mine\n"
    )
    nowhere = {"PAGEDOPT_CACHE_DIR": "/dev/null/cache", "PYTHONPATH": str(ROOT)}
    code, said = said_by(str(program), to=os.devnull, fresh=False, **nowhere)
    assert code == 0
    assert said.startswith(f"{program}:5: RuntimeWarning: compiled kernels cannot be kept")
    assert said.endswith("PagedSGD([p], lr=0.1).step()  # mine\n")


BUDGETS = (("8", "GiB"), ("20", "ms"), ("20", "%"), ("8", "G"))
PARTED: list[tuple[str, ...]] = [("plan", "--params", "7B", "--budget", *budget) for budget in BUDGETS]
PARTED += [("train", "--device-budget", "500", "mb", "--steps", "3"), ("plan", "--params", "7", "B")]


@pytest.mark.parametrize("arguments", PARTED, ids=" ".join)
def test_a_unit_that_the_shell_parted_hints_at_quotes(arguments: tuple[str, ...], program: Program) -> None:
    unit = next(a for a in arguments if a in ("GiB", "mb", "ms", "%", "G", "B"))
    assert f"needs quotes, as '8 {unit}'" in program.exits(*arguments)[1]


SLIPS = {
    ("train", "--device-budgt", "1GB"): "--device-budget",
    ("train", "--state-fromat=int8"): "--state-format",
    ("plan", "--parms", "7B"): "--params",
    ("plan", "--params", "7B", "--rate", "x", "--state-fromat", "bf16"): "--state-format",
}


@pytest.mark.parametrize(("arguments", "meant"), SLIPS.items())
def test_a_slip_is_told_by_its_command_and_with_the_near_name(
    arguments: tuple[str, ...], meant: str, program: Program
) -> None:
    _, said = program.exits(*arguments)
    assert said.startswith(f"usage: pagedopt {arguments[0]} ")
    assert said.endswith(f"; did you mean {meant}?\n")
    assert said.count("did you mean") == 1


def test_a_budget_has_both_spellings_everywhere() -> None:
    for option in ("--budget", "--device-budget"):
        assert build_parser().parse_args(["plan", "--params", "1B", option, "2GiB"]).budget == "2GiB"
        assert build_parser().parse_args(["train", option, "2GiB"]).device_budget == "2GiB"


def test_it_knows_its_name_and_version(program: Program) -> None:
    import pagedopt

    assert program.exits("--version", status=0)[0] == f"pagedopt {pagedopt.__version__}\n"
    assert program.exits("--help", status=0)[0].startswith("usage: pagedopt ")


def test_no_command_at_all_gets_the_help(program: Program) -> None:
    status, said, complaint = program.run()
    assert (status, said) == (2, "")
    assert complaint.startswith("usage: pagedopt")
    assert "say what this machine can do" in complaint
    program.exits("trian")
