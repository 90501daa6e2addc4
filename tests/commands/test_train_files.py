"""What a training run writes: whole or not at all, through no planted link, and from one run at a time."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tiny_training
import torch
from children import run, start
from command_line import Program
from paths import ROOT
from pictures import needs_matplotlib
from tiny_training import TINY

from pagedopt.commands.train.checkpoint import load_checkpoint, save_checkpoint

PAGED = ("--no-spill", "--optimizer", "paged")


def train(out: Path, *options: object) -> int:
    """Run the command in this process."""
    return tiny_training.train(out, *PAGED, *options)


def content(step: int, more: Any = None) -> dict[str, Any]:
    return {"options": {}, "step": step, "corpus": "", "contenders": more or {}}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- one run at a time ----


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ForkServerProcess]:
    """A run in another process, which has written its first checkpoint into ``tmp_path``."""
    command = [*TINY, *PAGED, "--steps", "100000", "--checkpoint-every", "5", "--out", str(tmp_path)]
    other = start("-m", "pagedopt", *command, cwd=ROOT)
    try:
        until(other, (tmp_path / "checkpoint.pt").exists)
        yield other
    finally:
        other.kill()
        other.join()


def until(other: ForkServerProcess, seen: Any) -> None:
    deadline = time.monotonic() + 100
    while not seen():
        assert other.exitcode is None, f"the run has ended with {other.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_run_is_refused_until_the_first_is_gone(
    running: ForkServerProcess, tmp_path: Path, program: Program
) -> None:
    saved = tmp_path / "checkpoint.pt"
    for second in ((*TINY, *PAGED, "--steps", 1, "--out", tmp_path), ("train", "--resume", saved)):
        error = program.refuses(*second)
        assert f"--out {tmp_path}: another run is writing there" in error
        assert error.count("\n") == 1
    before = load_checkpoint(saved)["step"]
    until(running, lambda: load_checkpoint(saved)["step"] > before)  # the first one has not noticed
    assert train(tmp_path / "elsewhere", "--steps", 1) == 0
    running.kill()
    running.join()
    assert train(tmp_path, "--steps", 1) == 0


def test_a_run_lets_go_however_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pagedopt.commands.train.run.report", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, "--steps", 1)
    for _ in range(2):
        assert train(tmp_path, "--steps", 1) == 0


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_planted_lock_is_refused(what: str, tmp_path: Path, program: Program) -> None:
    target, lock = tmp_path / "victim", tmp_path / "out" / ".lock"
    lock.parent.mkdir()
    {"link": lambda: lock.symlink_to(target), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[what]()
    assert str(lock) in program.refuses(*TINY, *PAGED, "--out", lock.parent, "--steps", 1)
    assert not target.exists()
    assert names(lock.parent) == {".lock"}


# ---- whole or not at all ----


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    out.mkdir()
    for name in ("checkpoint.pt.tmp", "checkpoint.pt", "result.json", "losses.png"):
        (out / name).symlink_to(victim)
    assert train(out, "--steps", 2, "--checkpoint-every", 1) == 0
    assert victim.read_text() == "precious"
    assert load_checkpoint(out / "checkpoint.pt")["step"] == 2
    assert not any((out / name).is_symlink() for name in ("checkpoint.pt", "result.json"))


def test_a_checkpoint_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    before = os.umask(0)
    try:
        save_checkpoint(path, content(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == {"checkpoint.pt"}


FULL = """
import resource, sys
from pagedopt.commands.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_without_room_keeps_the_old_checkpoint_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, content(1))
    done = run("-c", FULL, *TINY, *PAGED, "--steps", 2, "--checkpoint-every", 1, "--out", tmp_path)
    assert done.returncode == 2, done.stderr
    assert f"--out {tmp_path}: the checkpoint of step 1 cannot be written (File too large). The one" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == {"checkpoint.pt", ".lock"}
    assert load_checkpoint(path)["step"] == 1


@pytest.mark.long
def test_a_disk_without_room_at_the_end_keeps_the_table(tmp_path: Path) -> None:
    done = run("-c", FULL, *TINY, *PAGED, "--steps", 1, "--checkpoint-every", 0, "--out", tmp_path)
    said = [line for line in done.stderr.splitlines() if "compiled kernels cannot be kept" not in line]  # nor can they
    no_checkpoint = f"pagedopt train: --out {tmp_path}: the checkpoint of step 1 cannot be written (File too large). "
    assert said == [no_checkpoint + "Make room there, or name another folder with --out."]
    assert done.returncode == 2
    assert "tokens/s" in done.stdout
    assert names(tmp_path) == {".lock"}


@needs_matplotlib
def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, program: Program) -> None:
    (tmp_path / "losses.png").mkdir()
    status, said, complaint = program.run(*TINY, *PAGED, "--steps", 1, "--out", tmp_path)
    no_picture = f"pagedopt train: --out {tmp_path}: losses.png cannot be written (Is a directory). "
    assert complaint == no_picture + "Make room there, or name another folder with --out.\n"
    assert status == 2
    assert "tokens/s" in said
    assert names(tmp_path) == {"checkpoint.pt", "result.json", "losses.png", ".lock"}


class Late:
    """Sends a signal when it is pickled, in the middle of a file."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> NoReturn:
        signal.raise_signal(self.number)
        raise AssertionError("the signal was not heeded")


def test_an_interrupt_while_writing_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, content(1))
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, content(2, {"a": torch.ones(1000), "b": Late(signal.SIGINT)}))
    assert names(tmp_path) == {"checkpoint.pt"}
    assert load_checkpoint(path)["step"] == 1


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = "tests/commands", "tests/helpers"
from test_train_files import Late, content, save_checkpoint
save_checkpoint(Path(sys.argv[1]) / "checkpoint.pt", content(2, {"b": Late(9)}))
"""


def test_what_a_killed_run_left_goes_with_the_next_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "checkpoint.pt", content(1))
    assert run("-c", KILLED, tmp_path).returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    assert load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 1
    mine = tmp_path / ".notes.unfinished"
    mine.write_text("of somebody else")
    assert train(tmp_path, "--steps", 1) == 0
    assert names(tmp_path) - {"checkpoint.pt", "result.json", "losses.png", ".lock"} == {mine.name}
