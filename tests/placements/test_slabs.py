"""Parts of slabs, on files and on pages that behave as CUDA's do: who shares a page moves with it and loses nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from file_support import CPU, folder_for_state
from held import forked, held_by_another
from optim_support import same, step_on, stepped
from played_pages import Card, Driver, Result

from pagedopt import PagedAdamW
from pagedopt.paging.pages import lay_out
from pagedopt.placements import Arena, FileArena, StateLost, slabs

SIZE = 500
UNIT = slabs._MIN_BYTES  # bytes of the first slab of small granules
IS_CROWDED = slabs._Pool.is_crowded


@pytest.fixture(autouse=True)
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever may share does, in slabs that no other test has."""
    monkeypatch.setattr(slabs._Pool, "is_crowded", lambda *_: True)
    monkeypatch.setattr(slabs, "_pool", slabs._Pool())
    monkeypatch.setitem(slabs.PARTS, Card, slabs.part_of(Card))
    with folder_for_state():
        yield
        gc.collect()


def part(kind: type[Arena], near: bool, numel: int = SIZE) -> Arena:
    return slabs.PARTS[kind](lay_out([numel], [4, 4]), CPU, int(near))


def numbers(arena: Arena, seed: int) -> torch.Tensor:
    """Fill it, and return a copy."""
    arena.tensor.copy_((torch.arange(arena.tensor.numel()) * (seed + 3) % 251).to(torch.uint8))
    return arena.tensor.clone()


def test_each_has_bytes_of_its_own_and_no_rounding(card: Driver) -> None:
    arenas = [part(Card, near) for near in (True, False) for _ in range(5)]
    wants = [numbers(arena, i) for i, arena in enumerate(arenas)]
    assert sorted(card.handles.values()) == [UNIT, 2 * UNIT], "one slab for each side"
    assert all(torch.equal(arena.tensor, want) for arena, want in zip(arenas, wants, strict=True))
    for arena in arenas:
        assert sum(arena.planned().values()) == sum(arena.measured().values()) == 8 * SIZE
        assert arena.tensor.data_ptr() % 64 == 0
    assert [arena.resident for arena in arenas] == [1] * 5 + [0] * 5


def test_the_page_is_near_while_all_would_have_it_near(card: Driver) -> None:
    arenas = [part(Card, True) for _ in range(3)]
    wants = [numbers(arena, i) for i, arena in enumerate(arenas)]
    address = [arena.tensor.data_ptr() for arena in arenas]
    for moves in ([(0, 0, 0)], [(1, 0, 0), (0, 1, 0)], [(1, 1, 1), (2, 0, 0)], [(2, 1, 1)]):
        for which, to, found in moves:
            arenas[which].move(to)
            assert [arena.resident for arena in arenas] == [found] * 3
            assert all(torch.equal(arena.tensor, want) for arena, want in zip(arenas, wants, strict=True))
    assert address == [arena.tensor.data_ptr() for arena in arenas]


def test_who_comes_later_does_not_go_where_its_budget_forbids(card: Driver) -> None:
    first = part(Card, True)
    first.move(0)
    second, third = part(Card, True), part(Card, False)
    assert (second.resident, third.resident) == (1, 0)
    assert third._slab is first._slab is not second._slab  # type: ignore[attr-defined]


def test_a_page_whose_last_opponent_dies_may_come_back(card: Driver) -> None:
    one, other = part(Card, False), part(Card, False)
    one.move(1)
    assert (one.resident, one.wanted, other.wanted) == (0, 1, 0)
    del other
    gc.collect()
    one.move(1)
    assert one.resident == 1


@pytest.mark.parametrize("near", [True, False])
def test_a_move_that_fails_changes_nothing(card: Driver, near: bool) -> None:
    arenas = [part(Card, near) for _ in range(2)]
    wants = [numbers(arena, i) for i, arena in enumerate(arenas)]
    if not near:
        arenas[1].move(1)
    card.fail(0)
    with pytest.raises((MemoryError, torch.OutOfMemoryError)):
        arenas[0].move(int(not near))
    card.before = lambda name: None
    assert [(arena.resident, arena.wanted) for arena in arenas] == [(int(near), int(near)), (int(near), 1)]
    assert all(torch.equal(arena.tensor, want) for arena, want in zip(arenas, wants, strict=True))
    arenas[0].move(int(not near))
    assert [arena.resident for arena in arenas] == [int(not near)] * 2


def test_a_slab_that_cannot_be_had_leaves_nothing(card: Driver) -> None:
    for at in range(3):
        card.fail(at)
        with pytest.raises((MemoryError, torch.OutOfMemoryError, RuntimeError)):
            part(Card, True)
        gc.collect()
        assert not card.handles
    card.before = lambda name: None
    assert part(Card, True).resident == 1


@contextlib.contextmanager
def losing_a_page(card: Driver) -> Iterator[None]:
    """A block in which a page that has left the card finds no way back."""

    def refuse(name: str) -> Result | None:
        return Result.CUDA_ERROR_OUT_OF_MEMORY if name == "cuMemMap" and card.calls.count("cuMemUnmap") > 1 else None

    card.before = refuse
    with pytest.raises(StateLost):
        yield
    card.before = lambda name: None


def test_who_loses_a_page_tells_all_who_had_a_part(card: Driver) -> None:
    one, other = part(Card, True), part(Card, True)
    with losing_a_page(card):
        one.move(0)
    with pytest.raises(StateLost, match="with that of another optimizer"):
        other.check_owner()
    assert part(Card, True)._slab is not one._slab  # type: ignore[attr-defined]


def test_no_step_is_taken_with_state_that_another_has_lost(card: Driver) -> None:
    (_, one), (p, other) = (stepped(50, placement=Card, device_budget="all") for _ in range(2))
    before = p.detach().clone()
    with losing_a_page(card):
        one.spill()
    with pytest.raises(StateLost, match="with that of another optimizer"):
        other.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize(("granule", "own"), [(256 << 10, 4), (1 << 20, 2)])
def test_a_few_have_pages_of_their_own_before_others_share(
    card: Driver, monkeypatch: pytest.MonkeyPatch, granule: int, own: int
) -> None:
    class Large(Card):
        pass

    Large.granule = granule
    monkeypatch.setattr(slabs._Pool, "is_crowded", IS_CROWDED)
    monkeypatch.setitem(slabs.PARTS, Large, slabs.part_of(Large))
    layout, several = (lay_out([numel], [4, 4], granule, granule) for numel in (SIZE, granule))
    made: list[Arena] = []
    while not slabs.serves(Large, layout, CPU):
        made.append(Large(layout, CPU, 1))
        slabs.note(made[-1])
    assert len(made) == own
    assert not slabs.serves(Large, several, CPU), "more than a page is no part of one"
    del made[0]
    gc.collect()
    assert not slabs.serves(Large, layout, CPU)


@pytest.mark.parametrize("kind", [Card, FileArena])
def test_bytes_that_were_somebodys_are_zero_for_the_next(kind: type[Arena], card: Driver) -> None:
    arenas = [part(kind, False) for _ in range(20)]
    kept = arenas[7].view(0, 0, torch.empty(SIZE), torch.float32).fill_(3)
    for arena in arenas:
        numbers(arena, 1)
    values, at = kept.clone(), {arena.tensor.data_ptr() for arena in arenas}
    del arena, arenas
    gc.collect()
    again = [part(kind, False) for _ in range(19)]
    assert not any(arena.tensor.any() for arena in again)
    assert {arena.tensor.data_ptr() for arena in again} & at, "none has bytes that were somebody's"
    assert torch.equal(kept, values)


def test_slabs_are_as_large_as_what_they_hold(card: Driver) -> None:
    arenas = [part(Card, False, 10_000) for _ in range(60)]
    total = sum(arena.layout.nbytes for arena in arenas)
    assert total <= sum(card.handles.values()) <= 1.2 * total + UNIT
    whole = part(Card, False, 9 * UNIT // 8)
    assert sum(whole.planned().values()) == 9 * UNIT


@pytest.mark.parametrize("budget", [0, 100_000])
def test_optimizers_that_share_take_the_steps_of_those_that_do_not(card: Driver, budget: int) -> None:
    params, others = ([torch.nn.Parameter(torch.ones(33, 3)) for _ in range(20)] for _ in range(2))
    opts = [PagedAdamW([p], placement=Card, device_budget=budget) for p in params]
    plain = [PagedAdamW([p]) for p in others]
    for step in range(4):
        for some in (opts, plain):
            for i, opt in enumerate(some):
                step_on(opt, i + step)
        if step == 1:
            opts[3].spill()
    assert same(params, others)
    assert {len(opt.store.arenas) for opt in opts} == {1}


def test_a_move_waits_for_the_step_of_another_thread() -> None:
    one, other = part(FileArena, True), part(FileArena, True)
    lock: Any = other.lock
    with lock:
        mover = threading.Thread(target=one.move, args=(0,))
        mover.start()
        mover.join(0.1)
        assert mover.is_alive()
        assert other.resident == 1
    mover.join()
    assert other.resident == 0


@pytest.mark.parametrize("act", ["drop", "prepare"])
def test_what_was_touched_of_a_part_that_is_away_leaves_memory(act: str) -> None:
    arena = part(FileArena, False)
    want = numbers(arena, 2)
    assert arena.measured()["host"] > 0
    getattr(arena, act)()
    assert arena.measured().get("host", 0) == 0
    assert torch.equal(arena.tensor, want)


def test_folders_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    one = part(FileArena, False)
    with folder_for_state():
        other = part(FileArena, False)
        assert one._slab is not other._slab  # type: ignore[attr-defined]
        del other
        gc.collect()


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    one = part(FileArena, True)
    lock: Any = one.lock
    with held_by_another(lock):
        assert forked(lambda: one.lock.acquire(timeout=5))  # type: ignore[union-attr]


@pytest.mark.parametrize("near", [True, False])
def test_a_forked_child_has_slabs_of_its_own(near: bool) -> None:
    parent = part(FileArena, near)
    want = numbers(parent, 4)

    def child() -> bool:
        nonlocal parent
        own = part(FileArena, near)
        numbers(own, 9)
        own.prepare()
        assert own._slab is not parent._slab  # type: ignore[attr-defined]
        with contextlib.nullcontext() if near else pytest.raises(RuntimeError):
            parent.check_owner()
        del own, parent
        gc.collect()
        return True

    assert forked(child)
    assert torch.equal(parent.tensor, want)
    parent.prepare()
    assert torch.equal(parent.tensor, want)
