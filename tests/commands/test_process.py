"""The program as a process: Ctrl-C anywhere is one line and 130; slips of the shell get a hint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from pagedopt.commands.main import main

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
TRAIN = ["train", "--device", "cpu", "--threads", "1", "--size", "tiny", "--steps", "2", "--no-spill", "--out"]


def interrupted(module: str, when: str, *arguments: str, handler: str = "default_int_handler") -> tuple[int, str]:
    """Exit status and what was said on stderr of a run that gets Ctrl-C when a module is imported or a file opened."""
    command = [sys.executable, "-c", SELF, module, when, handler, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("when", ["torch", "torch.cuda", "pagedopt.planning.estimate", "rates.json"])
def test_plan_can_be_interrupted_anywhere(when: str, tmp_path: Path) -> None:
    code, said = interrupted("pagedopt", when, "plan", "--params", "1B", "--rates", str(tmp_path / "rates.json"))
    assert code == 130, said
    assert said in ("pagedopt: interrupted\n", "pagedopt plan: interrupted\n")


@pytest.mark.parametrize("when", ["pagedopt.commands.train.run", ".lock", "argparse.py"])
def test_train_can_be_interrupted_before_its_first_step(when: str, tmp_path: Path) -> None:
    code, said = interrupted("pagedopt", when, *TRAIN, str(tmp_path))
    assert code == 130, said
    assert said == "pagedopt train: interrupted\n"
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


@pytest.mark.parametrize("when", ["torch", "README.md"])
def test_experiments_can_be_interrupted_anywhere(when: str) -> None:
    code, said = interrupted("experiments", when)
    assert (code, said) == (130, "experiments: interrupted\n")


def test_who_ignores_it_is_not_interrupted() -> None:
    code, said = interrupted("pagedopt", "torch.cuda", "plan", "--params", "1B", handler="SIG_IGN")
    assert (code, said) == (0, "")


def test_in_this_process_the_handler_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pagedopt.commands.plan.plan", stop)
    before = signal.getsignal(signal.SIGINT)
    assert main(["plan", "--params", "1B"]) == 130
    assert capsys.readouterr().err == "pagedopt plan: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--params", "7B", "--budget", "8", "GiB"),
        ("train", "--device-budget", "500", "mb", "--steps", "3"),
        ("plan", "--params", "7B", "--budget", "20", "ms"),
        ("plan", "--params", "7B", "--budget", "20", "%"),
    ],
)
def test_a_unit_that_the_shell_parted_hints_at_quotes(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    unit = next(a for a in arguments if a in ("GiB", "mb", "ms", "%"))
    assert f"needs quotes, as '8 {unit}'" in capsys.readouterr().err


def test_other_strays_get_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--params", "7B", "GiBson"])
    assert "quotes" not in capsys.readouterr().err


def test_it_knows_its_name_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    import pagedopt

    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pagedopt {pagedopt.__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: pagedopt ")


def test_no_command_at_all_gets_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("usage: pagedopt")
    assert "say what this machine can do" in err
    with pytest.raises(SystemExit) as stopped:
        main(["trian"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_help_is_as_wide_as_the_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    paragraphs = capsys.readouterr().out.split("\n\n")
    prose = [text for text in paragraphs if "\n " not in text]
    assert prose
    assert max(len(line) for text in prose for line in text.splitlines()) <= 60
