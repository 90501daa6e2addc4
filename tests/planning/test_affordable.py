"""A budget that is a time: what is away takes no longer, by the rates it was reckoned with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Program
from optim_support import step_on_ones

from pagedopt import PagedAdamW, PagedSGD, Rates, estimate
from pagedopt.commands.main import main
from pagedopt.paging.budget import Budget
from pagedopt.planning import rates as measuring
from pagedopt.planning.affordable import affordable

HAND = Rates(
    device=4e12, up=40e9, down=50e9, both=80e9, in_place=60e9, ram=1e11, file_read=2e9, file_write=1e9,
    machine="a machine of mine",
)  # fmt: skip
MIB = 1 << 20


@pytest.mark.parametrize("seconds", [1e-6, 0.0005, 0.005, 0.05, 0.2, 10.0])
@pytest.mark.parametrize(
    "options",
    [{"device": "cuda"}, {"device": "cuda", "host_access": "in_place"}, {"device": "cpu"},
     {"device": "cuda", "rule": "sgd_momentum"}, {"device": "cuda", "placement": "managed"}],
    ids=str,
)  # fmt: skip
def test_a_step_takes_no_longer_and_hardly_less(seconds: float, options: dict[str, Any]) -> None:
    model = [(1000, 1000)] * 500
    said = estimate(model, device_budget=f"{seconds * 1e6:f} us", rates=HAND, **options)
    near = estimate(model, rates=HAND, **{**options, "placement": "device", "host_access": None})
    assert said.seconds is not None
    assert near.seconds is not None
    assert said.seconds - near.seconds <= seconds
    if seconds >= 0.005 and said.away_bytes + 99 * MIB < said.state_bytes:
        away = said.away_bytes + 99 * MIB  # a few pages more, and it would have been too long
        more = estimate(model, device_budget=max(0, said.state_bytes - away), rates=HAND, **options)
        assert more.seconds is not None
        assert more.seconds - near.seconds > 0.9 * seconds


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(700, 1000) for _ in range(6)))


def stepped(kind: Any, model: torch.nn.Module, **options: Any) -> Any:
    """An optimizer after a step."""
    optimizer = kind(model.parameters(), **options)
    step_on_ones(optimizer)
    return optimizer


@pytest.mark.parametrize("seconds", [0.004, 0.01, 0.03, 1])
def test_an_optimizer_keeps_what_was_said(seconds: float, tmp_path: Path) -> None:
    """In a file: 1.5 ns a byte."""
    HAND.save(tmp_path / "my rates.json")
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"device_budget": f"{seconds} s by {tmp_path}/my rates.json"}
    report = stepped(PagedAdamW, model, **options).memory_report()
    for said in (estimate(model, **options), estimate(model, rates=HAND, device_budget=f"{seconds} s")):
        assert (said.by_place, said.rates) == (report.by_place, HAND)
    assert report.budget == said.budget
    most = seconds / 1.5e-9
    assert min(most - 9 * MIB, 30e6) < report.by_place.get("file", 0) <= most
    stepped(PagedAdamW, twin)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_it_is_kept_by_copies_and_changed_between_steps(tmp_path: Path) -> None:
    HAND.save(file := tmp_path / "rates.json")
    optimizer = stepped(PagedAdamW, net(), device_budget=f"10 ms by {file}")
    before = optimizer.memory_report().by_place
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (twin.store.budget.said, twin.affordable.known) == (f"10 ms by {file}", HAND)
        assert twin.memory_report().by_place == before
    optimizer.set_device_budget(f"20 ms by {file}")
    assert 1.5 * before["file"] < optimizer.memory_report().by_place["file"] < 3 * before["file"]
    optimizer.set_device_budget("all")
    assert not optimizer.memory_report().by_place.get("file")
    optimizer.set_device_budget(f"10 ms by {file}")
    assert optimizer.memory_report().by_place == before


def test_where_no_rates_are_given_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(device: Any) -> Rates:
        asked.append(device)
        return HAND

    monkeypatch.setattr(measuring, "measure", measure)
    optimizer = PagedAdamW(net().parameters(), device_budget="10 ms")
    assert not asked
    step_on_ones(optimizer)
    optimizer.set_device_budget("8 ms")
    assert asked == [torch.device("cpu")]
    assert 0 < optimizer.memory_report().by_place["file"] <= 0.008 / 1.5e-9


def test_where_there_are_no_rates_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    replace(HAND, file_write=None).save(file := tmp_path / "blind.json")
    said = f"10 ms by {file}"
    unknown = "those of a machine of mine have no file_write. Give bytes or a share"
    text = f"device_budget is '{said}', and no rates tell how long bytes take: {unknown}"
    for refuse in (partial(PagedAdamW, net().parameters()), partial(estimate, net())):
        with pytest.raises(ValueError, match=text):
            refuse(device_budget=said)
    with pytest.raises(ValueError, match=r"have no up, down, both"):
        estimate("1B", device_budget="10 ms", rates=replace(HAND, up=None, down=None, both=None))
    optimizer = stepped(PagedSGD, net(), momentum=0.9, device_budget="50%")
    before = optimizer.memory_report().by_place
    with pytest.raises(ValueError, match=text):
        optimizer.set_device_budget(said)
    assert (optimizer.memory_report().by_place, optimizer.store.budget.said) == (before, "50%")
    step_on_ones(optimizer)


@pytest.mark.parametrize(("name", "reason"), [("missing", "No such file"), ("empty", "there are no rates in it")])
def test_where_no_rates_come_from_it_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    wrong = f"10 ms by {tmp_path}/{name}.json"
    optimizer = stepped(PagedSGD, net(), momentum=0.9, device_budget="50%")
    fresh = PagedAdamW(net().parameters(), device_budget="auto")
    making: list[Callable[..., Any]] = [partial(PagedAdamW, net().parameters()), partial(estimate, "1B")]
    for refuse in (*making, optimizer.set_device_budget, fresh.set_device_budget):
        with pytest.raises(ValueError, match=rf"device_budget is '{wrong}', and no rates come from there .*{reason}"):
            refuse(device_budget=wrong)
    assert main(["train", "--device", "cpu", "--out", str(tmp_path), "--device-budget", wrong]) == 2
    assert optimizer.store.budget.said == "50%"


def test_what_a_page_alone_takes_is_reckoned_with() -> None:
    """Through the ring: the first page comes and the last one goes with nothing in the other direction."""
    page = 24 * MIB
    alone = page / HAND.up + page / HAND.down  # type: ignore[operator]
    for seconds, away in (
        (alone / 2, page / 2),
        (alone, page),
        (alone + 0.01, page + 0.01 * HAND.both / 2),  # type: ignore[operator]
    ):
        found = affordable(Budget(f"{seconds:.12f} s"), HAND, "cuda", "staged", page)
        assert found == pytest.approx(away, rel=1e-6)


def test_a_plan_takes_a_time(program: Program, tmp_path: Path) -> None:
    HAND.save(tmp_path / "r.json")
    asked = ("plan", "--params", "1B", "--budget", "50 ms", "--rates", tmp_path / "r.json")
    rows = program.reports(*asked)["rows"]
    assert len(rows) == 6
    mine = next(row for row in rows if row["budget"] == estimate("1B", device_budget="50 ms", rates=HAND).budget)
    assert 0.04 < mine["seconds"] - rows[-1]["seconds"] <= 0.05
    replace(HAND, up=None).save(tmp_path / "r.json")
    said = program.refuses_in_a_line(*asked)
    assert said.startswith("pagedopt plan: --budget '50 ms', and no rates tell how long bytes take")
