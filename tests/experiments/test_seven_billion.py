"""seven_billion: toys train in every way that a CPU has; what does not fit, is not here or is measured already."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch
from experiment_runs import asked

from experiments.lab import Row, Rows, Run
from experiments.overlap import seven_billion
from experiments.overlap.seven_billion import measure
from experiments.works import finetunes, llama
from experiments.works.finetunes import BACKWARD, RESIDENT, WAYS, Way

GIB = 1 << 30


def run(*arguments: str, quick: bool = True) -> Run:
    parser = argparse.ArgumentParser()
    seven_billion.options(parser)
    return Run(torch.device("cpu"), quick, parser.parse_args(arguments))


@pytest.fixture(scope="module")
def toys() -> dict[str, Row]:
    return {row["case"]: row for row in measure(run("--batches", "4"))}


def test_every_way_is_tried_and_ends_or_trains(toys: dict[str, Row]) -> None:
    assert toys.keys() == WAYS.keys()
    for name, row in toys.items():
        assert (row["ended"] is None) == ("losses" in row)
        if package := WAYS[name].needs:
            assert row["ended"] in (None, f"{package} is not installed") or package == "torchao"
    assert seven_billion.derive(Rows(toys.values()))[0]["case"] == RESIDENT


@pytest.mark.parametrize("name", ["forward", BACKWARD])
def test_an_overlap_changes_no_bit(name: str, toys: dict[str, Row]) -> None:
    assert toys[name]["losses"] == toys["host"]["losses"]


def test_all_learn_the_same(toys: dict[str, Row]) -> None:
    theirs = toys[RESIDENT]["losses"]
    assert theirs[-1] < theirs[0]
    assert toys["torch_hooks"]["losses"] == theirs
    for row in toys.values():
        if not row["ended"]:
            assert row["losses"] == pytest.approx(theirs, abs=0.02)


def test_the_model_has_the_parameters_of_llama() -> None:
    """7 B: 32 layers of 4 x 4096² + 3 x 4096 x 11008 + 2 x 4096, two tables of 32000 x 4096, a norm."""
    found = [p.numel() for p in llama.described(llama.SEVEN).parameters()]
    assert len(found) == 32 * 9 + 3
    assert sum(found) == 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    assert seven_billion.WITHIN["numel"] == sum(found)


# --- what does not fit


def ended(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any], card: int | None = None, others: int = 0) -> str:
    monkeypatch.setitem(WAYS, RESIDENT, Way("toy", start, ""))
    shape = vars(llama.TOY)
    (row,) = seven_billion.trained(RESIDENT, 1, "cpu", shape, card, others, seven_billion.QUICK)
    return str(row.get("ended"))


def test_a_card_is_held_to_the_drivers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetunes.Finetune, "memory", lambda self: {"taken": 26 * GIB, "allocated": GIB})
    said = "does not fit: takes 25.0 GiB by the driver's count"
    for card, words in ((24 * GIB, said), (25 * GIB, "None"), (None, "None")):
        assert ended(monkeypatch, lambda model: lambda: None, card, others=GIB) == words


@pytest.mark.parametrize(
    ("error", "words"),
    [(torch.OutOfMemoryError("CUDA"), "does not fit: CUDA"), (AssertionError("no"), "AssertionError: no")],
)
def test_what_ends_is_said(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: torch.nn.Module) -> Any:
        raise error

    assert ended(monkeypatch, fail) == words


def test_managed_memory_needs_room_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes a parameter: 12.6 GiB of seven billion."""
    start = finetunes.with_room(lambda model: len)
    small, large = (llama.described(shape) for shape in (llama.TOY, llama.SEVEN))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: pytest.fail("asked"))
    assert start(small) is len
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (73 * GIB, 139 * GIB))
    assert start(large) is len
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (72 * GIB, 80 * GIB))
    with pytest.raises(MemoryError, match=r"13,476,831,232 bytes of managed memory, with .* --layers"):
        start(large)


# --- which cases


def test_what_is_measured_is_not_measured_again_and_what_failed_is() -> None:
    first = list(measure(run("--cases", "resident,torchao,optimi", "--batches", "1")))
    assert [row["ended"] is None for row in first] == [True, False, "losses" in first[2]]
    again = run("--cases", "resident,torchao", "--batches", "1")
    again.known = Rows([{**first[0], "mark": 1}, {**first[1], "mark": 1}, {**first[2], "mark": 1}])
    found = {row["case"]: "mark" in row for row in measure(again)}
    assert found == {"resident": True, "torchao": False, "optimi": True}
    again.known = Rows([{**first[0], "card": "24.0 GiB"}])
    assert len(list(measure(again))) == 3, "another card is another case"


# --- what follows


def row(case: str, us: float, losses: list[float], taken: float = 16) -> Row:
    series = {"clock": "wall", "median": us}
    about = {"case": case, "batch": 4, "tokens": 2048, "numel": 7_000_000_000, "card": "", "ended": None}
    return {**about, "time": series, "hooks": series, "taken": taken * GIB, "allocated": 15 * GIB, "losses": losses}


def test_losses_are_compared_at_the_same_iteration() -> None:
    rows = [row("torchao", 4e6, [9, 8]), {**row(BACKWARD, 0, []), "ended": "no"}, row(RESIDENT, 1e6, [9, 7, 6])]
    resident, backward, rival = asked("seven_billion").derive(Rows(rows))
    assert [each["case"] for each in (resident, backward, rival)] == [RESIDENT, BACKWARD, "torchao"]
    assert (resident["loss"], rival["loss"]) == (7, 8)
    assert (rival["tokens_s"], rival["of_resident"], rival["seconds"], rival["hooks_ms"]) == (2048, 4, 4, 4000)
    assert (rival["taken"], rival["allocated"], rival["drawn"]) == (16, 15, True)
    (*_, eight) = asked("seven_billion").derive(Rows([row(BACKWARD, 1e6, [9]), row("plus_8", 1.1e6, [9])]))
    assert eight["of_backward"] == pytest.approx(1.1)
    assert "loss" not in backward
    assert not backward["drawn"]


def test_the_answer_is_a_line_of_each_batch() -> None:
    rows = [
        row(RESIDENT, 1e6, [9], 50), row(BACKWARD, 1.25e6, [9], 20), row("forward", 1e6, [9], 10),
        row("torchao", 4e6, [9], 18), row("torchtune", 2e6, [9], 24), row("optimi", 1e6, [9], 24.5),
    ]  # fmt: skip
    derived = seven_billion.derive(Rows([*rows, {**rows[0], "batch": 1}, {**rows[1], "card": "24.0 GiB"}]))
    assert seven_billion.answers(derived) == (
        "- 7.00 billion parameters, batch 4: 20.0 GiB and 6,554 tokens/s within the backward; 50.0 GiB and "
        "8,192 tokens/s with torch's fused AdamW, whose state is on the GPU. That is 80% of the speed in 40% of the "
        "memory. The fastest of the others in 24 GiB is torchtune's recipe: 24.0 GiB and 4,096 tokens/s."
    )
