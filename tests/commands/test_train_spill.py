"""`python -m pagedopt train` with its state elsewhere: the options, and the second act that shows spilling."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Program, assert_has
from rich.console import Console
from stand_ins import raising
from tiny_training import behind_each_step, interrupted_behind, losses, result, train

from pagedopt import MemoryReport
from pagedopt.commands.main import UsageError, build_parser, main
from pagedopt.commands.train import checkpoint, contender, spill
from pagedopt.commands.train.gpt import GPT
from pagedopt.commands.train.run import Run
from pagedopt.commands.train.train_options import TrainOptions, resolve
from pagedopt.paging.budget import ALL, Budget
from pagedopt.placements.file import FileArena
from pagedopt.planning.sizes import SIZES, parameter_count

STATE = 8 * parameter_count(SIZES["tiny"], SIZES["tiny"].block)  # bytes of two float32 moments


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps with all state in RAM and no second act."""
    out = tmp_path_factory.mktemp("plain")
    assert train(out, "--steps", 20, "--optimizer", "paged", "--no-spill") == 0
    return out


# ---- the second act ----


def test_a_run_on_a_cpu_ends_with_a_second_act(tmp_path: Path, train_tiny: Program) -> None:
    said = train_tiny.says("--out", tmp_path, "--steps", 8)
    assert_has(said, "Second act, spilling: 5 steps from the same start", "equal bit for bit")
    assert re.search(r"loss \d\.\d+  resident \d+\.\dk spilled \d+\.\dk", said)
    act = result(tmp_path)["spill"]
    near, away = act["resident"], act["spilled"]
    assert (act["agree"], near["losses"], len(near["losses"])) == (True, away["losses"], 5)
    assert set(near["state_bytes"]) == {"host"}
    assert near["state_bytes"]["host"] >= STATE
    assert (away["placement"], away["device_budget"]) == ("file", STATE // 4)
    # Three quarters and more are in the file, and the operating system agrees.
    assert away["state_bytes"].get("host", 0) <= STATE // 4
    assert away["state_bytes"]["file"] >= STATE - STATE // 4
    assert sum(away["state_bytes"].values()) <= near["state_bytes"]["host"] + 2 * FileArena.granule
    assert away["measured_bytes"].get("host", 0) <= STATE // 4 + (1 << 20)
    for twin in (near, away):
        assert 0 < twin["optimizer_step_ms"]["median"] <= twin["whole_step_ms"]["median"]


def test_the_act_repeats_the_run_and_both_results_are_kept(plain: Path, tmp_path: Path) -> None:
    """The act's first loss is the run's: same weights, same batch.  Later ones follow a shorter schedule."""
    assert train(tmp_path, "--steps", 20, "--optimizer", "paged") == 0
    content = result(tmp_path)
    assert losses(tmp_path) == losses(plain)
    assert content["spill"]["spilled"]["losses"][0] == losses(plain)[0]
    assert "spill" not in result(plain)


def test_the_act_spills_state_in_8_bits(tmp_path: Path, train_tiny: Program) -> None:
    said = train_tiny.says("--out", tmp_path, "--steps", 8, "--optimizer", "paged", "--state-format", "int8", "--spill")
    assert "equal bit for bit" in said
    act, run = result(tmp_path)["spill"], result(tmp_path)["optimizers"]["paged"]
    assert sum(run["state_bytes"].values()) == options(state_format="int8").state_bytes < 0.27 * STATE
    assert act["resident"]["state_bytes"] == run["state_bytes"]
    assert "file" in act["spilled"]["state_bytes"]
    assert act["spilled"]["device_budget"] == options(state_format="int8").state_bytes // 4


def test_no_spill_and_other_placements_leave_the_act_out(tmp_path: Path, train_tiny: Program) -> None:
    for options in (("--no-spill",), ("--placement", "file"), ("--device-budget", "1MiB"), ("--optimizer", "torch")):
        assert "Second act" not in train_tiny.says("--out", tmp_path, "--steps", 1, *options)
        assert "spill" not in result(tmp_path)


def test_the_act_takes_the_budget_that_was_given(tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", 1, "--spill", "--device-budget", 0, "--optimizer", "paged") == 0
    act = result(tmp_path)["spill"]
    assert act["spilled"]["device_budget"] == 0
    runs = (act["spilled"], act["resident"], result(tmp_path)["optimizers"]["paged"])
    assert [set(run["state_bytes"]) for run in runs] == [{"file"}, {"host"}, {"file"}]


@pytest.mark.parametrize("broken", ["losses", "weights"])
def test_an_act_whose_twins_part_fails(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    step = contender.Contender.step

    def nudged(self: contender.Contender, *batch: Any) -> None:
        step(self, *batch)
        weight = next(self.model.parameters())
        last = int(self.optimizer.state[weight]["step"]) == 5
        if self.name == "spilled" and (broken == "losses" or last):
            with torch.no_grad():
                weight.mul_(1 + 2**-20)

    monkeypatch.setattr(contender.Contender, "step", nudged)
    assert "NOT EQUAL" in train_tiny.says("--out", tmp_path, "--steps", 3, status=1)
    assert result(tmp_path)["spill"]["agree"] is False


def test_a_run_that_failed_has_no_second_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    """Its own verdict is the last word."""
    monkeypatch.setattr("pagedopt.commands.train.run.report", lambda *_: 1)
    assert "Second act" not in train_tiny.says("--out", tmp_path, "--steps", 1, status=1)


ANNOUNCED = {
    "3MiB": "once with all but 3.00 MiB in a file",
    "25%": "once with all but 25% of the state in a file",
    "0": "once with all of it in a file",
    "auto": "once with what has no room there in a file",
}


@pytest.mark.parametrize(("budget", "said"), ANNOUNCED.items())
def test_the_act_is_announced(budget: str, said: str) -> None:
    text = spill.announcement(*spill.twins(options(device_budget=budget, steps=9)))
    assert text.endswith(f"5 steps from the same start, once with PagedAdamW's state in RAM, {said}")


def test_the_act_is_announced_on_a_gpu() -> None:
    text = spill.announcement(*spill.twins(options(device="cuda", placement="host")))
    assert text.endswith("once with PagedAdamW's state on the device, once with all of it on the host")


def test_an_interrupted_act_keeps_the_results_of_the_run(plain: Path, tmp_path: Path, train_tiny: Program) -> None:
    run = ("--out", tmp_path, "--steps", 20, "--optimizer", "paged", "--checkpoint-every", 0)
    with interrupted_behind(2, "spilled"):
        said = train_tiny.says(*run, status=130)
    assert "second act interrupted; the results above are complete" in said
    assert losses(tmp_path) == losses(plain)
    saved = checkpoint.load_checkpoint(tmp_path / "checkpoint.pt")
    assert saved["step"] == 20  # of the act, it would be taken for the run's


def test_the_act_has_the_memory_of_the_run(tmp_path: Path) -> None:
    """The run's models and state are gone before it begins."""
    alive: list[int] = []

    def count(run: Run) -> None:
        if run.contenders[-1].name == "spilled":
            gc.collect()
            alive.append(sum(type(thing) is GPT for thing in gc.get_objects()))

    with behind_each_step(count):
        assert train(tmp_path, "--steps", 1) == 0
    assert alive == [2] * 5


def test_the_act_reports_what_should_be_and_what_is() -> None:
    report = MemoryReport({"host": 5 << 20, "file": 7 << 20}, {"host": 6 << 20, "file": 8 << 20}, "file", 5 << 20, 3)
    twin: Any = SimpleNamespace(
        name="spilled",
        queued=False,
        optimizer=SimpleNamespace(memory_report=lambda: report),
        curve=contender.Curve([2.5, 1.25], [70.0, 30.0], [7.0, 3.0]),
    )
    found = spill.summarize(twin)
    told = {"state_bytes": report.by_place, "measured_bytes": report.measured, "placement": "file"}
    assert found.items() >= {**told, "device_budget": 5 << 20, "ring_bytes": 3}.items()
    console = Console(width=120)
    with console.capture() as shown:
        console.print(spill.table([{**found, "state_bytes": {"host": 12 << 20}}, found]))
    row = [cell.strip() for cell in shown.get().splitlines()[4].strip("│").split("│")]
    assert row == ["spilled", "5.00 MiB host, 7.00 MiB file", "6.00 MiB", "3.00", "30.0", "1.2500"]


def test_the_act_is_a_tenth_of_a_short_run_and_a_few_dozen_steps_of_a_long_one() -> None:
    for steps, expected in ((1, 5), (60, 6), (200, 20), (400, 30), (10**6, 30)):
        resident, spilled = spill.twins(options(steps=steps))
        assert resident.steps == spilled.steps == expected


def test_the_twins_differ_in_the_place_of_their_state_alone() -> None:
    resident, spilled = spill.twins(options(spill=True, checkpoint_every=7))
    assert (resident.placement, resident.budget, resident.checkpoint_every) == ("device", ALL, 0)
    assert (spilled.placement, spilled.budget) == ("file", Budget(STATE // 4))
    changed = {name for name, value in vars(resident).items() if value != getattr(spilled, name)}
    assert changed == {"placement", "device_budget"}


TWINS_ON_A_GPU = [
    ({}, "mapped", STATE // 2),
    ({"device_budget": "3MB"}, "mapped", 3_000_000),
    ({"device_budget": "auto"}, "mapped", "auto"),
    ({"device_budget": "20%"}, "mapped", 0.2),
    ({"placement": "managed"}, "managed", STATE // 2),
    ({"placement": "host"}, "host", None),  # it has no budget: all of it is away
]


@pytest.mark.parametrize(("given", "placement", "budget"), TWINS_ON_A_GPU)
def test_the_twins_on_a_gpu(given: dict[str, Any], placement: str, budget: Any) -> None:
    resident, spilled = spill.twins(options(device="cuda", **given))
    assert (resident.placement, resident.budget) == ("device", ALL)
    assert (spilled.placement, spilled.budget) == (placement, Budget(budget))


def options(**changes: Any) -> TrainOptions:
    """TrainOptions of a run of `tiny`."""
    values: dict[str, Any] = {
        "size": "tiny", "batch": 8, "block": 64, "steps": 60, "seed": 0, "optimizer": "both", "lr": 1e-3,
        "weight_decay": 0.1, "device": "cpu", "threads": 1, "checkpoint_every": 100, "out": "runs",
    }  # fmt: skip
    return TrainOptions(**{**values, **changes})


def test_the_bytes_of_state_follow_its_format() -> None:
    assert options().state_bytes == options(state_format="float32").state_bytes == STATE
    assert options(state_format="bfloat16").state_bytes == STATE // 2
    assert options(block=128).state_bytes == STATE + 64 * 8 * SIZES["tiny"].width


def resolved_on_a_gpu(monkeypatch: pytest.MonkeyPatch, *given: str) -> TrainOptions:
    """What these options mean where there is a GPU."""
    monkeypatch.setattr("pagedopt.commands.train.train_options.pick_device", lambda _: torch.device("cuda"))
    return resolve(build_parser().parse_args(["train", *given]))


def test_a_gpu_shows_spilling_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not resolved_on_a_gpu(monkeypatch).spill
    assert resolved_on_a_gpu(monkeypatch, "--spill").spill
    chosen = resolved_on_a_gpu(monkeypatch, "--placement", "mapped", "--device-budget", "2GiB")
    assert (chosen.placement, chosen.budget, chosen.spill) == ("mapped", Budget(2 << 30), False)


NOT_ON_A_GPU = {
    ("--placement", "file"): "for parameters on cuda there are device, host, managed, managed-driver, mapped",
    ("--placement", "managed-driver", "--spill"): "no budget sends state of placement managed-driver away",
    ("--placement", "device", "--spill"): "no budget sends state of placement device away",
    ("--spill", "--device-budget", "1GiB"): "all state stays, it is 950 MiB",
}


@pytest.mark.parametrize(("given", "said"), NOT_ON_A_GPU.items())
def test_what_a_gpu_cannot_do_is_refused(given: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=said):
        resolved_on_a_gpu(monkeypatch, *given)


# ---- the options of the run itself ----


def test_a_budget_changes_no_loss_and_shows_in_the_table(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # of pytest's terminal
    shown = train_tiny.says("--out", tmp_path, "--steps", 20, "--optimizer", "paged", "--device-budget", "300 KiB")
    places = result(tmp_path)["optimizers"]["paged"]["state_bytes"]
    assert 0 < places["host"] <= 300 << 10
    assert sum(places.values()) >= STATE
    assert losses(tmp_path) == losses(plain)
    assert all(re.search(pattern, shown) for pattern in (r"KiB host,? ", r"KiB file "))


def test_the_optimizer_gets_placement_and_budget() -> None:
    for given, budget in (({"placement": "file", "device_budget": "5KiB"}, 5 << 10), ({"placement": "host"}, None)):
        made = contender.Contender("paged", options(**given)).optimizer.memory_report()
        assert (made.placement, made.budget) == (given["placement"], budget)


BAD_VALUES = {
    ("--device-budget", "2 apples"): "--device-budget 2 apples: device_budget is '2 apples'; give bytes",
    ("--device-budget", "-1"): "--device-budget -1: ",
    ("--device-budget", "50"): "50 bytes hold no page; did you mean '50%' or '50GiB'?",
    ("--device-budget", "0.5"): "device_budget is '0.5'; bytes are whole: give a unit as in '0.5GiB', or a share",
    ("--spill", "--device-budget", "100%"): "all state stays, it is ",
    ("--device-budget", ""): "--device-budget : device_budget is ''",
    ("--device-budget", "every"): "a share as '50%', 'all' and 'auto' are budgets too",
    ("--placement", "attic"): "--placement attic: for parameters on cpu there are device, file, host",
    ("--placement", "mapped"): "--placement mapped: for parameters on cpu there are device, file, host",
    ("--placement", "device", "--device-budget", "1MB"): "--placement device --device-budget 1MB: ",
    ("--placement", "host", "--device-budget", "1MB"): "--placement host --device-budget 1MB: ",
    ("--spill", "--placement", "host"): "no budget sends state of placement host away",
    ("--spill", "--optimizer", "torch"): "--spill: only PagedAdamW keeps its state elsewhere",
    ("--spill", "--device-budget", "1GB"): "all state stays, it is 942 KiB; use a smaller --device-budget",
    ("--placement", "file", "--optimizer", "torch"): "--placement file: only PagedAdamW",
    ("--device-budget", "1MB", "--optimizer", "torch"): "--device-budget 1MB: only PagedAdamW",
}


@pytest.mark.parametrize(("given", "said"), BAD_VALUES.items())
def test_bad_values_are_refused_before_anything_is_made(
    given: tuple[str, ...], said: str, tmp_path: Path, train_tiny: Program
) -> None:
    assert said in train_tiny.refuses("--out", tmp_path / "out", *given)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_hold_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", str(tmp_path / "missing"))
    for given, said in {
        ("--placement", "file"): "--placement file: PAGEDOPT_STATE_DIR is",
        ("--device-budget", "1MB"): "--device-budget 1MB: PAGEDOPT_STATE_DIR is",
        (): "--spill: PAGEDOPT_STATE_DIR is",
    }.items():
        error = train_tiny.refuses("--out", tmp_path / "out", "--steps", 1, *given)
        assert said in error
        assert ("--no-spill needs none" in error) == (given == ())
    assert not (tmp_path / "out").exists()
    assert train(tmp_path / "out", "--steps", 1, "--no-spill") == 0


def test_memory_that_is_not_there_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Program
) -> None:
    full = raising(MemoryError("no room for 5 bytes in a file"))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "take_step", full)
        said = train_tiny.refuses("--out", tmp_path, "--placement", "file", "--device-budget", 0)
    assert "no room for 5 bytes in a file (--device-budget and --placement" in said
    # In the second act nothing is lost by it, and there is a way around.
    steps = contender.Contender.step
    monkeypatch.setattr(
        contender.Contender, "step", lambda self, *batch: full(self) if self.name == "spilled" else steps(self, *batch)
    )
    said = train_tiny.refuses("--out", tmp_path, "--steps", 2, "--optimizer", "paged")
    assert "second act: no room for 5 bytes in a file. The results above are complete; --no-spill leaves it" in said
    assert len(losses(tmp_path)) == 2


def test_a_resumed_run_keeps_its_placement_and_may_change_it(plain: Path, tmp_path: Path) -> None:
    """Halfway, spilled to a file; on from there as it was, with another budget, and with all in RAM: the same bits."""
    saved = tmp_path / "checkpoint.pt"
    with interrupted_behind(12):
        assert train(tmp_path, "--steps", 20, "--optimizer", "paged", "--device-budget", "300KiB") == 130
    assert checkpoint.load_checkpoint(saved)["step"] == 12
    assert checkpoint.load_checkpoint(saved)["options"]["device_budget"] == "300KiB"
    places = {}
    for name, changed in {
        "kept": (),
        "more": ("--device-budget", "500KiB"),
        "none": ("--device-budget", "0"),
        "all": ("--device-budget", "all", "--placement", "host"),
    }.items():
        out = tmp_path / name
        assert main(["train", "--resume", str(saved), "--out", str(out), *changed]) == 0
        assert losses(out) == losses(plain), name
        places[name] = result(out)["optimizers"]["paged"]["state_bytes"]
    assert 0 < places["kept"]["host"] <= 300 << 10 < places["more"]["host"] <= 500 << 10
    assert "host" not in places["none"]
    assert places["all"].keys() == {"host"}


def test_a_checkpoint_from_before_these_options_resumes(plain: Path, tmp_path: Path) -> None:
    with interrupted_behind(14):
        assert train(tmp_path, "--steps", 20, "--optimizer", "paged", "--no-spill") == 130
    saved = tmp_path / "checkpoint.pt"
    content = checkpoint.load_checkpoint(saved)
    for name in ("placement", "device_budget", "spill", "state_format"):
        del content["options"][name]
    checkpoint.save_checkpoint(saved, content)
    out = tmp_path / "on"
    assert main(["train", "--resume", str(saved), "--out", str(out)]) == 0
    assert losses(out) == losses(plain)
    assert "spill" not in result(out)


def test_resume_checks_the_options_together(tmp_path: Path, program: Program) -> None:
    assert train(tmp_path, "--steps", 1, "--device-budget", "300KiB", "--checkpoint-every", 1) == 0
    saved = tmp_path / "checkpoint.pt"
    assert "--placement device --device-budget 300KiB: " in program.refuses(
        "train", "--resume", saved, "--placement", "device"
    )


def test_a_resumed_run_is_told_of_the_options_that_were_typed(tmp_path: Path, program: Program) -> None:
    assert train(tmp_path, "--steps", 1, "--optimizer", "paged", "--checkpoint-every", 1, "--spill") == 0
    said = program.refuses("train", "--resume", tmp_path / "checkpoint.pt", "--device-budget", "150%")
    assert said.startswith("pagedopt train: --device-budget 150%: device_budget is '150%'")


def test_an_update_under_the_forward(tmp_path: Path, train_tiny: Program) -> None:
    """``--overlap forward`` changes no loss, hides pages, and the table says what its time is."""
    for name, more in (("plain", ()), ("hidden", ("--overlap", "forward"))):
        given = ("--steps", 6, "--optimizer", "paged", "--device-budget", 0, "--checkpoint-every", 3, *more)
        said = train_tiny.says(*given, "--out", tmp_path / name)
        table, explained, _ = said.partition("queued: these ms")
        assert ("queued" in table, bool(explained)) == (name == "hidden", name == "hidden")
        assert ("queued: these ms are the time to queue the update" in said) == (name == "hidden")
        assert result(tmp_path / name)["optimizers"]["paged"]["queued"] == (name == "hidden")
    assert losses(tmp_path / "plain") == losses(tmp_path / "hidden")
    assert result(tmp_path / "hidden")["options"]["overlap"] == "forward"
