"""`python -m pagedopt train`, on a model that takes a second."""

from __future__ import annotations

import math
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import python
from command_line import Program, assert_has
from experiment_runs import needs_matplotlib
from rich.console import Console
from stand_ins import raising

from pagedopt.commands import contest
from pagedopt.commands.contest import Contender, bits_equal, curves_agree, tolerance
from pagedopt.commands.gpt import build_model, learning_rate, load_corpus, sample_batch, to_device
from pagedopt.commands.parser import UsageError
from pagedopt.commands.train import GONE, NAMES
from pagedopt.optim.registry import OPTIMIZERS, Entry
from pagedopt.planning.sizes import SIZES, Size, shapes


def parameter_count(size: Size) -> int:
    """Of a GPT of this size."""
    return sum(map(math.prod, shapes(size)))


STATE = 8 * parameter_count(SIZES["tiny"])  # bytes of two float32 moments
NO_BIT = "The budget has changed no bit of"


@pytest.fixture
def lined_up(monkeypatch: pytest.MonkeyPatch) -> list[Contender]:
    """The contenders of the last run."""
    found: list[Contender] = []
    line_up = contest.line_up

    def noted(*given: Any) -> list[Contender]:
        found[:] = line_up(*given)
        return found

    monkeypatch.setattr(contest, "line_up", noted)
    return found


@pytest.mark.parametrize("entry", OPTIMIZERS, ids=NAMES)
def test_three_contenders_take_the_same_steps(
    entry: Entry, tmp_path: Path, train_tiny: Program, lined_up: list[Contender]
) -> None:
    said = train_tiny.says("--optimizer", entry.module, "--steps", 30, "--out", tmp_path)
    *theirs, ours, spilled = lined_up
    classes = [*filter(None, [entry.torch]), entry.optimizer, entry.optimizer]
    assert [type(c.optimizer) for c in lined_up] == classes
    assert ours.losses == spilled.losses
    assert ours.losses[0] == pytest.approx(math.log(256), abs=0.3)  # knows nothing
    assert ours.losses[-1] < ours.losses[0] - 1
    for each in theirs:
        assert each.losses == pytest.approx(ours.losses, abs=5e-4)
        assert_has(said, "The curves agree: the losses of Paged", "the tolerance is 0.0005.")
    assert ("torch has no such optimizer; the loss went from 5." in said) == (not theirs)
    assert f"{NO_BIT} 30 losses and of the weights" in said
    assert all(c.name in said for c in lined_up)


def test_the_table_says_where_bytes_are(tmp_path: Path, train_tiny: Program, lined_up: list[Contender]) -> None:
    said = train_tiny.says("--steps", 3, "--out", tmp_path)
    head, *rows = [line for line in said.splitlines() if line.startswith(("┃", "│"))]
    names = ["optimizer", "loss", "tokens/s", "optimizer ms (median)", "state on host", "state on file"]
    assert [cell.strip() for cell in head.strip("┃").split("┃")] == names
    assert [row.split("│")[1].strip() for row in rows] == ["torch AdamW", "PagedAdamW", "PagedAdamW, 25%"]
    theirs, ours, spilled = (c.state_bytes() for c in lined_up)
    assert set(theirs) == set(ours) == {"host"}
    assert min(theirs["host"], ours["host"]) >= STATE
    assert spilled["host"] <= spilled.total() / 4
    assert STATE <= spilled.total() == spilled["host"] + spilled["file"]
    for each in lined_up:
        assert all(0 < part <= whole for part, whole in zip(each.optimizer_ms, each.step_ms, strict=True))


@pytest.mark.parametrize(("more", "share"), [((), 0.27), (("--param-format", "bfloat16+8"), 0.39)])
def test_the_budget_and_the_formats_are_the_optimizers(
    more: tuple[str, ...], share: float, tmp_path: Path, train_tiny: Program, lined_up: list[Contender]
) -> None:
    options = ("--budget", 0, "--state-format", "int8", *more, "--batch", 2, "--steps", 2, "--out", tmp_path)
    said = train_tiny.says(*options)
    assert_has(said, "2 steps of 2 x 64 bytes", "PagedAdamW, 0 ", "the tolerance is 1.", NO_BIT)
    theirs, ours, spilled = (c.state_bytes() for c in lined_up)
    assert share - 0.02 < ours["host"] / theirs["host"] < share
    assert {p.dtype for p in lined_up[1].model.parameters()} == {torch.bfloat16 if more else torch.float32}
    assert set(spilled) == {"file"}


def nudged(name: str, behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one weight of that contender a little, behind that step."""
    step = Contender.step

    def and_nudge(self: Contender, *given: Any) -> None:
        step(self, *given)
        if self.name == name and len(self.losses) == behind:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0].add_(2**-20)

    monkeypatch.setattr(Contender, "step", and_nudge)


@pytest.mark.parametrize("behind", [2, 5], ids=["losses differ", "weights alone differ"])
def test_one_bit_fails(behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program) -> None:
    nudged("PagedAdamW, 25%", behind, monkeypatch)
    said = train_tiny.says("--steps", 5, "--out", tmp_path, status=1)
    assert_has(said, "The curves agree", "The budget HAS CHANGED BITS of 5 losses")


def test_a_wrong_optimizer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program) -> None:
    """The slightest mistake that the tolerance is for: decay forgotten, over the first steps."""
    step = Contender.step

    def forgetful(self: Contender, *given: Any) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= self.name.startswith("torch")
        step(self, *given)

    monkeypatch.setattr(Contender, "step", forgetful)
    said = train_tiny.says("--steps", 60, "--out", tmp_path, status=1)
    assert_has(said, "The curves DO NOT AGREE: the losses of PagedAdamW and torch AdamW differ by at most 0.0", NO_BIT)


def test_norms_and_biases_do_not_decay(tmp_path: Path, train_tiny: Program, lined_up: list[Contender]) -> None:
    train_tiny.says("--steps", 1, "--out", tmp_path)
    for each in lined_up:
        decayed, plain = each.optimizer.param_groups
        assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
        assert all(p.dim() == 2 for p in decayed["params"])
        assert {id(p) for p in plain["params"]} == {id(p) for p in each.model.parameters() if p.dim() == 1}


# ---- the picture ----


@needs_matplotlib
def test_the_picture_is_drawn(tmp_path: Path, train_tiny: Program) -> None:
    out = tmp_path / "[b]x :smile:"
    assert f"picture: {out / 'train.png'}\n" in train_tiny.says("--steps", 1, "--out", out)
    assert (out / "train.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in out.iterdir()] == ["train.png"]


def test_without_matplotlib_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program) -> None:
    monkeypatch.setattr(contest, "new_figure", lambda *_: None)
    said = train_tiny.says("--steps", 1, "--out", tmp_path)
    assert said.splitlines()[-1] == "no picture: matplotlib is not installed (pip install matplotlib)"


@needs_matplotlib
def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, train_tiny: Program) -> None:
    (tmp_path / "train.png").mkdir()
    status, said, complaint = train_tiny.run("--steps", 1, "--out", tmp_path)
    why = "cannot be written to (Is a directory); name another folder"
    assert (status, complaint) == (2, f"pagedopt train: --out {tmp_path}: {why}\n")
    assert_has(said, "tokens/s", NO_BIT)


# ---- progress, and Ctrl-C ----


def test_progress_is_a_bar_with_an_eta_or_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    options = ("--steps", 20, "--batch", 1, "--out", tmp_path)
    lines = [line for line in train_tiny.says(*options).splitlines() if line.startswith("step ")]
    assert len(lines) == 10
    assert lines[-1].startswith("step 20 of 20, loss ")
    monkeypatch.setattr(contest, "console", lambda *_, **__: Console(width=80, force_terminal=True))
    said = train_tiny.says(*options)
    assert_has(said, "20/20", "ETA", "0:00:00")
    assert "step 20 of 20" not in said


@pytest.mark.parametrize("during", [1, 13])
def test_ctrl_c_shows_the_table_so_far(
    during: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    step = Contender.step

    def interrupted(self: Contender, *given: Any) -> None:
        if self.name == "PagedAdamW" and len(self.losses) == during - 1:
            signal.raise_signal(signal.SIGINT)
        step(self, *given)

    monkeypatch.setattr(Contender, "step", interrupted)
    said = train_tiny.says("--steps", 30, "--out", tmp_path, status=130)
    assert said.endswith(f"interrupted after step {during - 1} of 30\n")
    assert ("PagedAdamW, 25%" in said) == (during > 1)
    assert "The budget" not in said
    assert list(tmp_path.iterdir()) == []


# ---- what is refused ----


BAD_VALUES = {
    ("--batch", "0"): "--batch 0: must be from 1 to 4,096",
    ("--threads", "100000"): "--threads 100000: must be from 1 to",
    ("--device", "cuda:99"): "--device cuda:99: torch ",
    ("--state-format", "int3"): "state_format is 'int3'; there are float32, ",
    ("--state-format", "half"): "state_format is 'float16' for 'exp_avg_sq' of a parameter of",
    ("--device-budget", "2 apples"): "device_budget is '2 apples'; give bytes",
    ("--device-budget", "50"): "50 bytes hold no page; did you mean '50%' or '50GiB'?",
    ("--out", "/dev/null/x"): "--out /dev/null/x: cannot be written to (Not a directory); name another folder",
    ("--out", "/proc"): "--out /proc: cannot be written to (",
}


@pytest.mark.parametrize(("given", "said"), BAD_VALUES.items())
def test_bad_values_are_refused_before_anything_runs(
    given: tuple[str, ...], said: str, tmp_path: Path, train_tiny: Program
) -> None:
    assert said in train_tiny.refuses_in_a_line("--out", tmp_path, *given)


def test_a_build_of_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    for built, said in ((None, "is a CPU build"), ("13.0", "sees ")):
        monkeypatch.setattr(torch.version, "cuda", built)
        assert f"--device cuda:99: torch {torch.__version__} {said}" in program.refuses("train", "--device", "cuda:99")


def test_what_has_no_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program) -> None:
    monkeypatch.setattr(Contender, "step", raising(MemoryError("no room for 5 bytes in a file")))
    said = train_tiny.refuses("--steps", 1, "--out", tmp_path)
    assert said == "pagedopt train: no room for 5 bytes in a file; use a smaller --batch or another --device\n"
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", str(tmp_path / "missing"))
    assert "PAGEDOPT_STATE_DIR is" in train_tiny.refuses_in_a_line("--steps", 1, "--out", tmp_path)


@pytest.mark.parametrize("options", GONE)
def test_options_that_are_gone_say_what_to_write(options: str, program: Program) -> None:
    help_text = program.exits("train", "--help", status=0)[0].split()
    for option in options.split():
        assert option not in help_text
        for given in ((option,), (option, "5", "--steps", "3"), (f"{option}=5",)):
            assert program.exits("train", *given)[1].endswith(f"{option} is gone: {GONE[options]}\n")


def test_sizes_in_help_are_so(program: Program) -> None:
    text = " ".join(program.exits("train", "--help", status=0)[0].split())
    small, gpt2 = SIZES["small"], SIZES["gpt2"]
    assert f"default: {small.steps} on a CPU, {gpt2.steps} on a GPU" in text
    assert f"default: {small.batch} on a CPU, {gpt2.batch} on a GPU" in text
    assert round(parameter_count(small) / 1e6, 1) == 3.3


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from pagedopt.commands.main import build_parser; build_parser(); print('torch' in sys.modules)"
    assert python("-c", code, fresh=True) == "False\n"


# --- what it is made of: corpus, batches, model, learning rates, and the comparison of curves -------------------------


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_corpus_is_the_library_without_its_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "pkg/c.py", "pkg/tests/d.py", "test/e.py", "site-packages/f.py", "g.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    assert bytes(load_corpus(3, tmp_path)) == b"<a.py><b.py><pkg/c.py>"
    with pytest.raises(UsageError, match="holds 22 bytes of Python's sources; a sequence takes 23"):
        load_corpus(22, tmp_path)


def test_batches_depend_on_seed_and_step_alone() -> None:
    text = load_corpus(64)
    first = sample_batch(text, 4, 64, seed=1, step=2)
    assert first.shape == (4, 65)
    assert torch.equal(first, sample_batch(text, 4, 64, seed=1, step=2))
    assert not torch.equal(first, sample_batch(text, 4, 64, seed=1, step=3))
    assert not torch.equal(first, sample_batch(text, 4, 64, seed=2, step=2))
    inputs, targets = to_device(first, CPU)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_model_is_causal_and_counted() -> None:
    size = replace(SIZES["tiny"], block=16)
    model = build_model(size, seed=3, device=CPU)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(size)
    assert 124e6 < parameter_count(SIZES["gpt2"]) < 125e6
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    for text in (tokens, changed):
        model(text, tokens)
    assert torch.equal(seen[0][:, :9], seen[1][:, :9])
    assert not torch.isclose(seen[0][:, 9:], seen[1][:, 9:]).all(dim=-1).any()
    assert torch.equal(model.tokens.weight, build_model(size, 3, CPU).tokens.weight)


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert max(rates) == rates[9]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [rates[0], rates[9], rates[-1], learning_rate(0, 1, 2.0)] == pytest.approx([0.2, 2.0, 0.2, 2.0])


def contender(*losses: float, weight: float = 1.0) -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return SimpleNamespace(name="one", losses=list(losses), model=model)


@pytest.mark.parametrize(
    ("losses", "agree", "said"),
    [
        ((3.0, 2.25, 1.125), False, "The curves DO NOT AGREE: the losses of one and one differ by at most 0.25 (step"),
        ((3.0, 2.0, 1.125), True, "The curves agree: the losses of one and one differ by at most 0.12 (step 3 of 3)"),
        ((3.0, math.nan, math.inf), False, "differ by at most inf (step 2 of 3)"),
    ],
)  # fmt: skip
def test_curves_are_compared_at_every_step(losses: tuple[float, ...], agree: bool, said: str) -> None:
    found, sentence = curves_agree(contender(3.0, 2.0, 1.0), contender(*losses), 0.2)
    assert found is agree
    assert said in sentence
    assert sentence.endswith("the tolerance is 0.2.")


def test_without_torchs_curve_losses_have_to_be_finite() -> None:
    for last, agree in ((2.0, True), (math.nan, False)):
        found, sentence = curves_agree(None, contender(3.0, last), 0.2)
        assert (found, sentence) == (agree, f"torch has no such optimizer; the loss went from 3.000 to {last:.3f}.")


def test_bits_are_those_of_losses_and_weights() -> None:
    """Zeros of two signs differ, and a NaN has the bits of itself."""
    for one, other, equal in (
        (contender(3.0, math.nan), contender(3.0, math.nan), True),
        (contender(3.0), contender(3.0000005), False),
        (contender(3.0, weight=0.0), contender(3.0, weight=-0.0), False),
    ):
        assert bits_equal(one, other)[0] is equal


def test_the_tolerance_is_that_of_the_arithmetic() -> None:
    for how, wanted in {
        (CPU, None, 1): 5e-4, (CPU, "fp64", 60): 6e-4, (CPU, "float32", 10**6): 0.05, (CUDA, None, 60): 0.25,
        (CPU, "8bit", 60): 1.0, (CUDA, "bf16", 60): 1.0,
    }.items():  # fmt: skip
        assert tolerance(*how) == pytest.approx(wanted)


# --- its table --------------------------------------------------------------------------------------------------------


def shown(width: int, *contenders: Any) -> list[str]:
    """The lines of what `train` says of contenders, without the head."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(contest.table(contenders, tokens=500))
    return [line for line in captured.get().splitlines() if line.startswith("│")]


def racer(**places: int) -> Any:
    """One of twelve steps, of which the last ten have other losses than the first."""
    return SimpleNamespace(
        name="PagedAdamW, 25%", losses=[5.0, 4.0, *[2.0, 3.0] * 5], step_ms=[900.0, 20.0, 30.0],
        optimizer_ms=[70.0, 3.0, 4.0], state_bytes=lambda: Counter(places),
    )  # fmt: skip


def test_a_row_is_of_late_losses_and_of_medians() -> None:
    rows = shown(120, racer(host=12 << 20), racer(host=5 << 20, file=7 << 20))
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    measured = ["PagedAdamW, 25%", "2.5000", "16,667", "4.00"]
    assert cells == [[*measured, "12.0 MiB", "0 B"], [*measured, "5.00 MiB", "7.00 MiB"]]


def test_a_step_that_not_all_have_taken_does_not_count() -> None:
    ahead, last = racer(host=5), racer(host=5)
    ahead.losses.append(99.0)
    assert [row.split("│")[2].strip() for row in shown(120, ahead, last)] == ["2.5000"] * 2
