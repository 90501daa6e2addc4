"""State that nobody placed is in torch's own tensors, until it has to move: then it is in pages that do.

A GPU's memory is pages that behave as CUDA's do (``tests/card``), and the CPU is taken for a GPU that has them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_support import ADAMW, COPIES, bits, same

from pagedopt import PagedAdamW, run_with_room
from pagedopt.optim import load
from pagedopt.paging.budget import Budget
from pagedopt.placements import choose
from pagedopt.placements.plain import DeviceArena, HostArena
from pagedopt.system import driver, virtual, warn
from tests.card.card import Pages
from tests.card.driver import GRANULE, Driver, Result

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SIZES = (7_001, 300, 5_000)
STATE = 8 * sum(SIZES)


@pytest.mark.parametrize(("can_map", "managed"), [(True, True), (False, True), (False, False)])
def test_it_moves_on_a_gpu_that_has_pages_which_do(can_map: bool, managed: bool, monkeypatch: Any) -> None:
    can = driver.Capabilities(managed=managed, concurrent_managed=managed, mapped=True, host_pages=can_map)
    monkeypatch.setattr(driver, "capabilities", lambda index: can)
    monkeypatch.setattr(virtual, "granule", lambda where, index: 2 << 20)
    assert choose.moves_on_demand(CUDA) == (can_map or managed)
    assert choose.moves_on_demand(CPU)


ALL: dict[str, bool] = {"managed": True, "concurrent_managed": True, "mapped": True, "host_pages": True}


@pytest.mark.parametrize(
    ("asked", "cannot", "chosen"),
    [
        ("mapped", ("host_pages",), "managed"),
        ("mapped", ("host_pages", "concurrent_managed"), "host"),
        ("managed", ("concurrent_managed",), "mapped"),
        ("managed", ("concurrent_managed", "host_pages"), "host"),
        ("managed", ("managed", "concurrent_managed", "host_pages"), "host"),
    ],
)
def test_what_a_gpu_cannot_do_another_placement_does_with_one_warning(
    asked: Any, cannot: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    can = driver.Capabilities(**{**ALL, **dict.fromkeys(cannot, False)})
    monkeypatch.setattr(driver, "capabilities", lambda index: can)
    monkeypatch.setattr(virtual, "granule", lambda where, index: 2 << 20)
    monkeypatch.setattr(warn, "_said", set())
    monkeypatch.setattr(choose, "_make", lambda kind, *_: kind.name)
    with pytest.warns(RuntimeWarning, match=f"placement='{asked}' on cuda:0.*results are the same") as told:
        found = [choose.create([9], [4], CUDA, asked, Budget.parse(0)) for _ in range(2)]
    assert (found, len(told)) == ([chosen] * 2, 1)


# ---- a card ----


@pytest.fixture
def card(card: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The CPU is one of the devices that have such pages."""
    arenas: Any = {"mapped": Pages, "managed": HostArena, "host": HostArena, "device": DeviceArena}
    monkeypatch.setitem(choose.ARENAS, "cpu", arenas)
    monkeypatch.setattr(choose, "moves_on_demand", lambda device: True)
    monkeypatch.setattr(Pages, "name", "mapped")
    monkeypatch.setattr(Pages, "stretch", 2 * GRANULE)  # several pages
    return card


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def train(params: list[torch.nn.Parameter], opt: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


def trained(count: int, **options: Any) -> tuple[list[torch.nn.Parameter], PagedAdamW]:
    params = parameters()
    opt = PagedAdamW(params, **ADAMW, **options)
    train(params, opt, 0, count)
    return params, opt


def share_away(opt: PagedAdamW) -> float:
    return 1 - sum(arena.resident for arena in opt.store.arenas) / sum(arena.layout.pages for arena in opt.store.arenas)


def spilled(opt: PagedAdamW) -> None:
    assert opt.spill() == STATE


def budgeted(opt: PagedAdamW) -> None:
    opt.set_device_budget("50%")


def given_room(opt: PagedAdamW) -> None:
    tried = []

    def crowded() -> None:
        tried.append(1)
        if any(arena.resident for arena in opt.store.arenas) or not opt.store.arenas:
            raise torch.OutOfMemoryError("no room yet")

    run_with_room(opt, crowded)
    assert len(tried) == 2


@pytest.mark.parametrize(("act", "away"), [(spilled, 1.0), (budgeted, 0.5), (given_room, 0.0)])
def test_state_that_nobody_placed_moves(card: Driver, act: Callable[[PagedAdamW], None], away: float) -> None:
    params, opt = trained(2)
    assert (opt.memory_report().placement, card.handles) == ("device", {})
    before = bits(params, opt)
    act(opt)
    assert opt.memory_report().placement == "mapped"
    assert not any(opt.store.is_outside_arenas(t) for p in params for t in opt.state[p].values() if t.dim())
    assert same(bits(params, opt), before)
    assert share_away(opt) == pytest.approx(away, abs=0.15)
    train(params, opt, 2, 2)
    assert same(bits(params, opt), bits(*trained(4, placement="device")))


def test_once_in_pages_it_moves_at_its_addresses(card: Driver) -> None:
    params, opt = trained(2)
    with opt.spilled() as given:
        assert given == STATE
        addresses = [t.data_ptr() for p in params for t in opt.state[p].values() if t.dim()]
    assert share_away(opt) == 0
    opt.set_device_budget(0)
    opt.set_device_budget("all")
    assert share_away(opt) == 0
    assert [t.data_ptr() for p in params for t in opt.state[p].values() if t.dim()] == addresses
    train(params, opt, 2, 2)
    assert same(bits(params, opt), bits(*trained(4, placement="device")))


def test_what_comes_later_is_torchs_again_and_moves_with_the_rest(card: Driver) -> None:
    params, opt = trained(2)
    opt.spill()
    late = torch.nn.Parameter(torch.ones(4_000))
    opt.add_param_group({"params": [late]})
    train([*params, late], opt, 2, 1)
    assert opt.store.is_outside_arenas(opt.state[late]["exp_avg"])
    assert share_away(opt) == 1, "what has gone stays away"
    assert opt.spill(100) == 8 * 4_000
    assert share_away(opt) == 1
    assert opt.spill() == 0


def test_no_more_moves_than_is_asked_for(card: Driver) -> None:
    """In whole parameters, from the last one on; the host needs room for what moves alone."""
    params, opt = trained(2)
    first = opt.state[params[0]]["exp_avg"]
    asked = 8 * SIZES[2] + 1
    card.before = lambda name: (
        Result.CUDA_ERROR_OUT_OF_MEMORY if name == "cuMemCreate" and sum(card.handles.values()) > STATE // 2 else None
    )
    assert opt.spill(asked) == 8 * (SIZES[1] + SIZES[2])
    assert opt.state[params[0]]["exp_avg"] is first
    assert opt.memory_report().placement == "mapped+device"
    train(params, opt, 2, 1)
    card.before = lambda name: None
    assert opt.spill() == 8 * SIZES[0]
    train(params, opt, 3, 1)
    assert same(bits(params, opt), bits(*trained(4, placement="device")))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2, 4, 6])
@pytest.mark.parametrize("act", [lambda o: o.spill(), lambda o: o.set_device_budget("50%")], ids=["spill", "budget"])
def test_what_is_interrupted_has_changed_nothing(
    card: Driver, act: Callable[[PagedAdamW], None], at: int, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, opt = trained(2)
    before = [opt.state[p]["exp_avg"] for p in params]
    calls, copy_values = [], load.copy_values

    def failing(*given: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise error("a copy has failed")
        copy_values(*given)

    with monkeypatch.context() as patch:
        patch.setattr(load, "copy_values", failing)
        for _ in range(3):
            calls.clear()
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                act(opt)
            gc.collect()
            assert not card.handles, "pages that hold nothing"
            assert (opt.memory_report().placement, opt.store.is_spilled()) == ("device", False)
    assert all(a is opt.state[p]["exp_avg"] for a, p in zip(before, params, strict=True))
    train(params, opt, 2, 2)
    assert same(bits(params, opt), bits(*trained(4, placement="device")))


def test_gpus_are_waited_for_before_state_is_copied_and_before_its_old_memory_goes(
    card: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append(str(device)))
    with load._idle([CPU, CUDA, CUDA, torch.device("cuda", 1)]):
        assert sorted(said) == ["cuda:0", "cuda:1"]
    assert sorted(said) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    seen: list[list[torch.device]] = []
    idle = load._idle
    monkeypatch.setattr(load, "_idle", lambda devices: idle(seen.append(found := list(devices)) or found))
    params, opt = trained(2)
    opt.spill()
    for p in params:
        opt.state[p]["exp_avg"] = opt.state[p]["exp_avg"].clone()
    opt.set_device_budget("50%")
    assert [len(devices) for devices in seen] == [6, 6], "into pages, and home"


@pytest.mark.parametrize("placed", [{"placement": "device"}, {"placement": "host"}], ids=str)
def test_what_somebody_placed_stays_there(card: Driver, placed: dict[str, Any]) -> None:
    params, opt = trained(2, **placed)
    before = [opt.state[p]["exp_avg"] for p in params]
    assert opt.spill() == 0
    assert all(a is opt.state[p]["exp_avg"] for a, p in zip(before, params, strict=True))


def test_before_there_is_state_there_is_nothing_to_move(card: Driver) -> None:
    opt = PagedAdamW(parameters())
    assert opt.spill() == 0
    assert not opt.store.arenas


def test_where_the_host_has_no_room_all_stays(card: Driver) -> None:
    params, opt = trained(2)
    before = [opt.state[p]["exp_avg"] for p in params]
    card.before = lambda name: Result.CUDA_ERROR_OUT_OF_MEMORY if name == "cuMemCreate" else None
    for act in (opt.spill, lambda: opt.set_device_budget("50%")):
        with pytest.raises(MemoryError):
            act()
        assert all(a is opt.state[p]["exp_avg"] for a, p in zip(before, params, strict=True))
    tried: list[int] = []

    def crowded() -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("of the user's own batch")

    with pytest.raises(torch.OutOfMemoryError, match="of the user's own batch") as caught:
        run_with_room(opt, crowded)
    assert len(tried) == 1
    assert "the host has no room" in caught.value.__notes__[0]
    card.before = lambda name: None
    assert opt.memory_report().placement == "device"
    train(params, opt, 2, 2)
    assert same(bits(params, opt), bits(*trained(4, placement="device")))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_what_has_moved_is_as_a_new_one_is(card: Driver, copied: Callable[[Any], Any]) -> None:
    params, opt = trained(2)
    opt.spill()
    twins, twin = copied((params, opt))
    assert twin.memory_report().placement == "device"
    train(params, opt, 2, 2)
    train(twins, twin, 2, 2)
    assert same(bits(twins, twin), bits(params, opt))


def test_the_note_beside_an_error_names_the_call_that_helps(card: Driver) -> None:
    big = [torch.nn.Parameter(torch.ones(1 << 19))]
    opt = PagedAdamW(big)
    train(big, opt, 0, 1)
    with pytest.raises(torch.OutOfMemoryError) as caught, opt.guard():
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "set_device_budget('2MiB')" in caught.value.__notes__[0]
