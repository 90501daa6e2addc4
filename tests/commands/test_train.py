"""`python -m pagedopt train`, on a model that takes a second."""

from __future__ import annotations

import gc
import math
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_training
import torch
from children import python
from command_line import Program, assert_has
from pictures import needs_matplotlib
from rich.console import Console
from tiny_training import TINY, behind_each_step, interrupted_behind, result

from pagedopt.commands.main import main
from pagedopt.commands.process import this_python
from pagedopt.commands.train import checkpoint, contender
from pagedopt.commands.train.compare import FACTOR, TOLERANCE
from pagedopt.commands.train.contender import Curve
from pagedopt.commands.train.display import Display
from pagedopt.commands.train.gpt import GPT
from pagedopt.commands.train.run import Run, text_of_threads
from pagedopt.commands.train.train_options import TrainOptions

PNG = b"\x89PNG"


def train(out: Path, *options: object) -> int:
    """Run the command in this process, without its second act."""
    return tiny_training.train(out, "--no-spill", *options)


def losses(out: Path) -> dict[str, list[float]]:
    return {kind: measured["losses"] for kind, measured in result(out)["optimizers"].items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of 30 steps with both optimizers."""
    out = tmp_path_factory.mktemp("finished")
    assert train(out, "--steps", 30) == 0
    return out


def test_curves_coincide_and_fall(finished: Path) -> None:
    curves = losses(finished)
    assert len(curves["paged"]) == len(curves["torch"]) == 30
    assert max(abs(a - b) for a, b in zip(curves["paged"], curves["torch"], strict=True)) <= TOLERANCE["cpu"]
    assert curves["paged"][0] == pytest.approx(math.log(256), abs=0.3)  # knows nothing
    assert sum(curves["paged"][-5:]) / 5 < curves["paged"][0] - 1.5


@needs_matplotlib
def test_losses_are_drawn(finished: Path) -> None:
    assert (finished / "losses.png").read_bytes().startswith(PNG)


def test_everything_is_written(finished: Path) -> None:
    content = result(finished)
    assert (content["options"]["steps"], content["machine"]["torch"]) == (30, torch.__version__)
    assert content["comparison"]["agree"] is True
    count = content["parameters"]
    for measured in content["optimizers"].values():
        assert len(measured["optimizer_ms"]) == 30
        assert measured["tokens_per_second"] > 0
        assert 0 < measured["optimizer_step_ms"]["p10"] <= measured["optimizer_step_ms"]["median"]
        assert measured["validation_loss"] < 5
        assert sum(measured["state_bytes"].values()) >= 2 * 4 * count  # two float32 moments


def test_a_wrong_optimizer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program) -> None:
    """The slightest mistake that the tolerance is for: decay forgotten, over the first steps of `tiny`."""
    right = contender.build_optimizer

    def build(kind: str, model: torch.nn.Module, options: Any) -> torch.optim.Optimizer:
        optimizer = right("torch" if kind == "paged" else kind, model, options)
        for group in optimizer.param_groups:
            group["weight_decay"] *= kind != "paged"
        return optimizer

    monkeypatch.setattr(contender, "build_optimizer", build)
    monkeypatch.setattr(contender.Contender, "state_bytes", lambda self: {"host": 0})
    said = train_tiny.says("--no-spill", "--out", tmp_path, "--steps", 60, status=1)
    assert_has(said, "torch AdamW (foreach) takes the same 60 steps", "The curves DO NOT lie on each other")
    found = result(tmp_path)["comparison"]
    assert found["agree"] is False
    assert found["max_difference"] > 2 * found["tolerance"]
    assert 0 < found["torch_difference"] < found["tolerance"]


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps round as far as thousands do otherwise."""
    monkeypatch.setitem(TOLERANCE, "cpu", 1e-9)


@pytest.mark.usefixtures("strict")
def test_rounding_is_judged_by_how_far_torch_is_from_itself(tmp_path: Path, train_tiny: Program) -> None:
    alive: list[int] = []

    def count(run: Run) -> None:
        if run.contenders[-1].name == "foreach":
            gc.collect()
            alive.append(sum(type(thing) is GPT for thing in gc.get_objects()))

    with behind_each_step(count):
        said = train_tiny.says("--no-spill", "--out", tmp_path, "--steps", 30)
    found = result(tmp_path)["comparison"]
    assert 1e-9 < found["max_difference"] <= found["tolerance"] == FACTOR * found["torch_difference"]
    assert_has(
        said,
        "more than 1e-09. Is it rounding? torch AdamW (foreach) takes the same 30 steps",
        "The curves lie on each other: the losses of PagedAdamW and torch AdamW (fused) differ by at most",
        "torch's foreach and fused AdamW by",
        f"({FACTOR} times the latter)",
    )
    assert alive == [1] * 30  # it has the memory of the run
    assert result(tmp_path)["optimizers"].keys() == {"paged", "torch"}


@pytest.mark.usefixtures("strict")
def test_an_interrupted_yardstick_is_measured_when_the_run_is_resumed(
    tmp_path: Path, train_tiny: Program, program: Program
) -> None:
    with interrupted_behind(3, "foreach"):
        said = train_tiny.says("--no-spill", "--out", tmp_path, "--steps", 30, status=130)
    assert "interrupted after step 30 of 30" in said
    assert not (tmp_path / "result.json").exists()
    program.says("train", "--resume", tmp_path / "checkpoint.pt")
    assert result(tmp_path)["comparison"]["torch_difference"] > 0


def test_interrupted_run_resumes_bit_for_bit(
    finished: Path, tmp_path: Path, train_tiny: Program, program: Program
) -> None:
    with interrupted_behind(13):
        said = train_tiny.says("--no-spill", "--out", tmp_path, "--steps", 30, status=130)
    saved = tmp_path / "checkpoint.pt"
    assert f"{this_python()} -m pagedopt train --resume {saved}" in said.replace("\n", " ")
    assert not (tmp_path / "result.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert "resumed after step 13" in program.says("train", "--resume", saved)
    assert losses(tmp_path) == losses(finished)
    again, whole = (result(out)["optimizers"] for out in (tmp_path, finished))
    assert all(again[kind]["validation_loss"] == whole[kind]["validation_loss"] for kind in whole)


@pytest.mark.long
def test_a_run_with_state_in_8_bits_is_interrupted_and_resumed(
    tmp_path: Path, train_tiny: Program, program: Program
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = ("--no-spill", "--steps", 30, "--state-format", "8bit")
    said = train_tiny.says(*asked, "--out", whole)
    assert_has(said, "PagedAdamW (int8)", "That is not judged: the state of PagedAdamW (int8) has fewer bits.")
    content = result(whole)
    assert content["options"]["state_format"] == "int8"
    found, paged = content["comparison"], content["optimizers"]["paged"]
    assert (found["agree"], found["tolerance"]) == (None, None)
    assert 0 < found["max_difference"] < 0.3  # it trains
    assert paged["state_bytes"] == {"host": TrainOptions(**content["options"]).state_bytes}
    assert paged["state_bytes"]["host"] < 0.27 * content["optimizers"]["torch"]["state_bytes"]["host"]
    with interrupted_behind(13):
        train_tiny.says(*asked, "--out", parts, status=130)
    saved = parts / "checkpoint.pt"
    for other in ("bfloat16", "float32"):
        complaint = program.refuses("train", "--resume", saved, "--state-format", other)
        assert f"--state-format {other}: the checkpoint {saved} was made with --state-format int8" in complaint
    assert "resumed after step 13" in program.says("train", "--resume", saved, "--state-format", "8bit")
    assert losses(parts) == losses(whole)


def test_another_format_of_state_is_no_way_to_go_on(tmp_path: Path, program: Program) -> None:
    assert train(tmp_path, "--steps", 1, "--optimizer", "paged") == 0
    complaint = program.refuses("train", "--resume", tmp_path / "checkpoint.pt", "--state-format", "int8")
    assert "was made without --state-format" in complaint


def test_formats_of_32_bits_and_more_are_judged(tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", 3, "--state-format", "fp64") == 0
    assert result(tmp_path)["comparison"]["agree"] is True


def test_every_run_ends_with_a_checkpoint(tmp_path: Path, program: Program, train_tiny: Program) -> None:
    train_tiny.says("--no-spill", "--out", tmp_path, "--steps", 3, "--checkpoint-every", 0)
    saved, first = tmp_path / "checkpoint.pt", losses(tmp_path)
    assert checkpoint.load_checkpoint(saved)["step"] == 3
    (tmp_path / "result.json").unlink()
    assert "resumed after step 3\n" in program.says("train", "--resume", saved)
    assert losses(tmp_path) == first


def test_a_loss_is_shown_once_where_all_have_the_same(tmp_path: Path, train_tiny: Program) -> None:
    said = train_tiny.says("--no-spill", "--out", tmp_path, "--steps", 4)
    once = "while paged and torch have the same loss, to 3 digits, it is shown once; speeds are in the same order\n"
    assert said.count(once) == 1
    for line in (lines := re.findall(r"^step .*", said, re.MULTILINE)):
        assert re.search(r"  loss \d\.\d{3}  paged \d+\.\dk torch \d+\.\dk tokens/s  ETA", line)
    assert len(lines) == 4
    alone = train_tiny.says("--optimizer", "paged", "--no-spill", "--out", tmp_path, "--steps", 1)
    assert re.search(r"  loss \d\.\d{3}  \d+\.\dk tokens/s  ETA", alone)
    assert "shown once" not in alone


def test_losses_that_differ_are_shown_with_names(capsys: pytest.CaptureFixture[str]) -> None:
    curves = {"paged": 2.0, "torch": 2.5}
    contenders: Any = [SimpleNamespace(name=name, curve=Curve([loss], [1.0])) for name, loss in curves.items()]
    Display(Console(width=200), 0, 1, 1000).update(1, contenders)
    assert "loss paged 2.000 torch 2.500  1000.0k 1000.0k tokens/s" in capsys.readouterr().out


def test_markup_in_a_path_is_printed_as_it_is(tmp_path: Path, train_tiny: Program) -> None:
    out = tmp_path / "[b]x :smile:"
    assert f"{out / 'result.json'}" in train_tiny.says("--out", out, "--steps", 1)
    with interrupted_behind(1):
        said = train_tiny.says("--out", out, "--steps", 3, status=130)
    assert shlex.quote(str(out / "checkpoint.pt")) in said


def test_killed_run_resumes_from_the_last_checkpoint(finished: Path, tmp_path: Path) -> None:
    def die(run: Run) -> None:
        if run.step == 11:
            raise SystemError("killed")

    with behind_each_step(die), pytest.raises(SystemError, match="killed"):
        train(tmp_path, "--steps", 30, "--checkpoint-every", 4)
    assert checkpoint.load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 8
    elsewhere = tmp_path / "elsewhere"
    assert main(["train", "--resume", str(tmp_path / "checkpoint.pt"), "--out", str(elsewhere)]) == 0
    assert losses(elsewhere) == losses(finished)


def test_a_failed_write_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    content = {"options": {}, "step": 1, "corpus": "", "contenders": {}}
    checkpoint.save_checkpoint(path, content)

    def half(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save_checkpoint(path, {**content, "step": 2})
    monkeypatch.undo()
    assert checkpoint.load_checkpoint(path)["step"] == 1


BAD_VALUES = {
    ("--batch", "0"): "--batch 0: must be a number of at least 1",
    ("--batch", "-3"): "--batch -3",
    ("--steps", "0"): "--steps 0",
    ("--lr", "nan"): "--lr nan",
    ("--lr", "-1"): "--lr -1",
    ("--seed", "-1"): "--seed -1",
    ("--seed", str(2**64)): "must be at most",
    ("--state-format", "int3"): "--state-format int3: state_format is 'int3'; there are float32, ",
    ("--state-format", "half"): "--state-format float16: state_format is 'float16' for 'exp_avg_sq' of a parameter of",
    ("--state-format", "int8", "--optimizer", "torch"): "--state-format int8: only PagedAdamW stores its state in it",
    ("--overlap", "forward", "--optimizer", "torch"): "--overlap forward: only PagedAdamW has it",
    ("--device", "toaster"): "must be cpu, cuda or cuda:N",
    ("--device", "cuda:99"): "--device cuda:99",
    ("--block", "100000000"): "--block 100000000 needs at least",
    ("--resume", "no/such/file.pt"): "there is no such file",
    ("--resume", "x" * 300): "it cannot be looked at (File name too long)",
}


@pytest.mark.parametrize(("options", "said"), BAD_VALUES.items())
def test_bad_values_are_refused(options: tuple[str, ...], said: str, tmp_path: Path, program: Program) -> None:
    assert said in program.refuses("train", "--out", tmp_path, *options)


@pytest.mark.parametrize("options", [("--size", "huge"), ("--optimizer", "adam"), ("--batch", "x"), ("--nonsense",)])
def test_unknown_options_are_refused(options: tuple[str, ...], program: Program) -> None:
    assert options[0] in program.exits("train", *options)[1]


def test_unusable_files_are_refused(tmp_path: Path, program: Program) -> None:
    plain, other, cut = tmp_path / "plain", tmp_path / "other.pt", tmp_path / "cut.pt"
    plain.write_text("not a checkpoint")
    torch.save({"model": torch.zeros(1)}, other)
    cut.write_bytes(other.read_bytes()[:-100])
    assert "not a readable checkpoint" in program.refuses("train", "--resume", plain)
    assert "not a checkpoint of this program" in program.refuses("train", "--resume", other)
    said = program.refuses("train", "--resume", cut)
    assert "(torch.save writes another kind of file, or it is cut off)" in said
    assert "cannot be made a folder" in program.refuses(*TINY, "--no-spill", "--out", plain)


def test_resume_of_a_folder_names_the_checkpoint_in_it(tmp_path: Path, program: Program) -> None:
    said = program.refuses("train", "--resume", tmp_path)
    assert f"--resume {tmp_path}: it is a folder; there is no checkpoint.pt in it" in said
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    said = program.refuses("train", "--resume", tmp_path)
    assert f"it is a folder; its checkpoint is --resume {tmp_path / 'checkpoint.pt'}\n" in said


def test_one_thread_is_no_threads() -> None:
    assert [text_of_threads(count) for count in (1, 2)] == ["CPU, 1 thread", "CPU, 2 threads"]


def test_a_build_of_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    for built, said in ((None, "is a CPU build"), ("13.0", "sees ")):
        monkeypatch.setattr(torch.version, "cuda", built)
        assert f"--device cuda:99: torch {torch.__version__} {said}" in program.refuses("train", "--device", "cuda:99")


def test_resume_refuses_what_would_change_the_run(tmp_path: Path, program: Program) -> None:
    assert train(tmp_path, "--steps", 2, "--optimizer", "torch", "--checkpoint-every", 1) == 0
    saved = tmp_path / "checkpoint.pt"
    for options in (("--batch", "4"), ("--optimizer", "both"), ("--size", "small")):
        assert f"was made with {options[0]}" in program.refuses("train", "--resume", saved, *options)
    said = program.refuses_in_a_line("train", "--resume", saved, "--steps", 9)
    assert "is of a run of 2 steps, and the learning rate of each of them depends on their number" in said
    content = checkpoint.load_checkpoint(saved)
    checkpoint.save_checkpoint(saved, {**content, "corpus": "of another Python"})
    assert "another version of Python" in program.refuses("train", "--resume", saved)


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from pagedopt.commands.main import build_parser; build_parser(); print('torch' in sys.modules)"
    assert python("-c", code, fresh=True) == "False\n"
