"""Placements from outside: all that a name does, a class of one's own does; what is none is refused at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from optim_support import bits, same

from pagedopt import PagedAdamW, estimate
from pagedopt.placements import Arena, DeviceArena, FileArena, HostArena, Layout
from tests.card.card import Pages, install_pages
from tests.world import parameters, steps

from .placement import Limited, Ordinary, SmallCard, SmallRam
from .rule import Tempered, tempered


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is on the card, and a test may change its size."""
    gc.collect()
    monkeypatch.setattr(Limited, "room", Limited.room)
    yield
    gc.collect()


def trained(count: int, **how: Any) -> tuple[Tempered, list[torch.nn.Parameter]]:
    """An optimizer after its first steps, and its parameters."""
    params = parameters()
    opt = Tempered(params, **how)
    steps(opt, params, count)
    return opt, params


def near(opt: Any) -> int:
    return opt.memory_report().by_place.get("host", 0)


def test_it_serves_in_the_place_of_a_name() -> None:
    opt, _ = trained(1, placement=SmallRam, device_budget=100_000)
    file, _ = trained(1, placement="file", device_budget=100_000)
    report = opt.memory_report()
    assert (report.placement, report.by_place) == ("small", file.memory_report().by_place)
    assert "optimizer state (small, budget 97.7 KiB)" in str(opt.memory_report())
    for budget in ("all", 0, "75%", 70_000):
        opt.set_device_budget(budget)
        file.set_device_budget(budget)
        assert opt.memory_report().by_place == file.memory_report().by_place
    given = opt.spill()
    assert given > 0
    assert near(opt) == 0
    opt.unspill()
    assert near(opt) == given


def test_what_has_no_room_is_refused_and_changes_nothing() -> None:
    Limited.room = 100_000
    params = parameters()
    opt = Tempered(params, placement=SmallRam)
    with pytest.raises(MemoryError, match=r"\d+ bytes of state, where 100,000 are left; give a smaller device_budget"):
        steps(opt, params, 1)
    assert same(params, parameters())
    assert not opt.state
    opt.set_device_budget("50%")
    steps(opt, params, 3)
    assert 0 < near(opt) <= 100_000
    before, place = bits(params, opt), opt.memory_report().by_place
    with pytest.raises(MemoryError, match="of state, where"):
        opt.set_device_budget("all")
    assert opt.memory_report().by_place == place
    assert same(bits(params, opt), before)
    with pytest.raises(MemoryError), opt.spilled():
        Limited.room = 0  # somebody else took the room meanwhile
    assert near(opt) == 0
    Limited.room = 1 << 20
    opt.unspill()
    assert near(opt) == sum(place.values())
    steps(opt, params, 3, first=3)
    assert same(bits(params, opt), bits(*reversed(trained(6))))


@pytest.mark.parametrize(
    "how",
    [{"placement": SmallRam, "device_budget": b} for b in (None, 0, "40%", 0.7, 100_000)] + [{"placement": Ordinary}],
    ids=str,
)
def test_an_estimate_says_what_it_takes(how: dict[str, Any]) -> None:
    opt, params = trained(1, **how)
    said, report = estimate(params, rule=tempered, **how), opt.memory_report()
    assert (said.placement, said.by_place, said.budget) == (report.placement, report.by_place, report.budget)


def test_an_estimate_needs_no_card() -> None:
    mine, mapped = (estimate("7B", placement=kind, device_budget="25%") for kind in (SmallCard, "mapped"))
    assert (mine.placement, mine.by_place) == ("SmallCard", mapped.by_place)
    assert mine.by_place["device"] <= mine.state_bytes / 4


@pytest.mark.parametrize("make", [PagedAdamW, estimate], ids=["optimizer", "estimate"])
def test_what_is_no_placement_is_refused_at_once(make: Any) -> None:
    class Plain(DeviceArena):
        pass

    class Stuck(Ordinary):
        paged, granule = True, 1 << 16

    class Whole(Ordinary):
        paged = True

        def move(self, resident: int) -> None:
            self.resident = resident

    _opt, params = trained(1, placement=SmallRam)
    arena = next(iter(Limited.made))
    cases: list[tuple[Any, type[Exception], str]] = [
        (arena, TypeError, "placement is an object of SmallRam; give the class"),
        (arena, TypeError, "give the class, placement=SmallRam: arenas are made when state is"),
        (Stuck, TypeError, r"placement Stuck is paged, and its pages cannot move; define move\(resident\)"),
        (Whole, TypeError, "placement Whole is paged, and its granule is 0; give the class the bytes of which"),
        (5, TypeError, "placement is 5; give a subclass of pagedopt.placements.Arena, or one of mapped, managed"),
        ([], TypeError, r"placement is \[\]; give a subclass"),
        (dict, TypeError, "placement is <class 'dict'>; give a subclass"),
        (Arena, TypeError, "placement is Arena, of which no arena can be made"),
        (Plain, TypeError, "placement is Plain, of which no arena can be made"),
        ("moon", ValueError, "placement is 'moon'; there are mapped, .*or a subclass of pagedopt.placements.Arena"),
        (SmallCard, ValueError, "placement=SmallCard is for parameters on cuda; these are on cpu"),
    ]  # fmt: skip
    for placement, error, text in cases:
        with pytest.raises(error, match=text):
            make(params, placement=placement)
    for options, text in (
        (
            {"placement": Ordinary, "device_budget": 5000},
            "device_budget is 5000 with placement=Ordinary, where all state",
        ),
        ({"placement": Ordinary, "device_budget": "10%"}, "device_budget is '10%' with placement=Ordinary"),
        ({"placement": SmallRam, "host_access": "in_place"}, "'in_place' with placement=SmallRam, which has staged"),
    ):
        with pytest.raises(ValueError, match=text):
            make(params, **options)


def test_a_group_that_it_does_not_serve_is_not_added() -> None:
    class Card(FileArena):
        devices = ("cuda",)

    opt = PagedAdamW([torch.nn.Parameter(torch.ones(3, device="meta"))], placement=Card)
    with pytest.raises(ValueError, match="placement=Card is for parameters on cuda; these are on cpu"):
        opt.add_param_group({"params": parameters()})
    assert len(opt.param_groups) == 1


def test_an_arena_without_its_memory_is_refused_before_anything_is_done() -> None:
    class Empty(Arena):
        pass

    class Short(Arena):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.tensor = torch.zeros(5, dtype=torch.uint8)

    class Forgetful(Arena):
        def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
            self.tensor = torch.zeros(layout.nbytes, dtype=torch.uint8)

    class Filled(Ordinary):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.tensor.fill_(7)

    class Last(Ordinary):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.tensor[-1] = 1

    no_tensor = r"made no tensor of [\d,]+ bytes \(uint8\)"
    cases: list[tuple[type[Arena], type[Exception], str]] = [
        (Empty, TypeError, f"Empty {no_tensor}"),
        (Short, TypeError, f"Short {no_tensor}"),
        (Forgetful, TypeError, r"Forgetful has no layout.*has to call super\(\).__init__\(layout, device, resident\)"),
        (Filled, ValueError, r"Filled made a tensor that is not zeroed: byte 0 of [\d,]+ is 7; .*torch\.zeros"),
        (Last, ValueError, r"Last made a tensor that is not zeroed: byte ([\d,]+) of [\d,]+ is 1"),
    ]
    for kind, error, text in cases:
        params = parameters()
        opt = PagedAdamW(params, placement=kind)
        with pytest.raises(error, match=text):
            steps(opt, params, 1)
        assert not opt.state
        assert same(params, parameters())


def test_a_class_that_refuses_is_asked_before_it_is_made() -> None:
    class Closed(FileArena):
        @classmethod
        def refusal(cls, device: torch.device) -> str:
            return "it is Sunday"

    params = parameters()
    with pytest.raises(ValueError, match="placement=Closed on cpu: it is Sunday"):
        steps(PagedAdamW(params, placement=Closed), params, 1)


def test_shipped_classes_are_their_names() -> None:
    for kind, name in ((FileArena, "file"), (HostArena, "host"), (DeviceArena, "device")):
        one, other = (trained(1, placement=placement)[0].memory_report() for placement in (kind, name))
        assert (one.placement, one.by_place) == (other.placement, other.by_place)
    assert (SmallRam.name, SmallCard.name, Limited.name) == ("small", "SmallCard", "Limited")


class FakeCard(Limited, Pages):
    """A small card made of memory of this system, whose pages are updated in place."""


@pytest.mark.parametrize(("budget", "device"), [(0, 0), ("40%", 8), ("all", 20)])
def test_a_small_card_of_played_pages(budget: Any, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_pages(monkeypatch)
    opt, params = trained(4, placement=FakeCard, device_budget=budget)
    whole, others = trained(4)
    assert same(bits(params, opt), bits(others, whole))
    said, report = estimate(params, rule=tempered, placement=FakeCard, device_budget=budget), opt.memory_report()
    assert (said.placement, said.by_place) == (report.placement, report.by_place)
    pages = list(fake.handles.values())
    assert report.by_place == {"host": sum(pages)}, "both sides are memory of the host"
    assert (report.measured.get("device", 0), len(pages)) == (device * pages[0], 20)
    opt.set_device_budget(0)
    Limited.room = 50_000
    with pytest.raises(MemoryError, match="of state, where 50,000 are left"):
        opt.set_device_budget("all")
    assert same(bits(params, opt), bits(others, whole))
    assert "device" not in opt.memory_report().measured
    del opt, params, said
    gc.collect()
    assert not fake.handles
    fake.close()
