"""Which rows go in one launch and which pages visit: on a CPU, with a file, where every move is real."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from calls import calls
from gpu_support import NEEDED
from optim_support import ADAMW
from support import threads

import pagedopt
from pagedopt import DeviceTable, PagedAdamW, Sweep
from pagedopt.optim.pages import Route, _shift
from pagedopt.paging.pages import lay_out
from pagedopt.paging.policy import Move
from pagedopt.paging.visits import Arrive, Evict, Fetch, Update
from pagedopt.placements import FileArena
from pagedopt.placements.movers import slot_bytes, slot_offset
from pagedopt.transports.choose import TRANSPORTS

SIZES = (40_000, 0, 3, 90_001, 1, 300_000)


class SmallPages(FileArena):
    stretch = 1 << 17


def stepped(steps: int = 1, **options: Any) -> tuple[list[torch.nn.Parameter], PagedAdamW]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in SIZES]
    place = {"placement": SmallPages, **options} if options else {}
    opt = PagedAdamW(params, **place, **ADAMW)
    for step in range(steps):
        step_with(params, opt, step)
    return params, opt


def step_with(params: list[torch.nn.Parameter], opt: PagedAdamW, step: int) -> None:
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
    opt.step()


def route_of(opt: PagedAdamW) -> Route | None:
    assert opt._plan is not None
    (launch,) = opt._plan.launches
    return launch.route


def test_nothing_away_is_one_launch() -> None:
    for options in ({}, {"device_budget": "1GiB"}, {"device_budget": None}):
        assert route_of(stepped(**options)[1]) is None


@pytest.mark.parametrize("budget", [0, 400_000, 1_500_000])
def test_every_element_is_in_one_row_and_every_page_that_is_away_visits_once(budget: int) -> None:
    _, opt = stepped(device_budget=budget)
    (arena,) = opt.store.arenas
    found = route_of(opt)
    assert found is not None
    rows = found.rows
    for i, size in enumerate(SIZES):
        mine = np.flatnonzero(rows.tensor == i)
        spans = sorted((int(rows.offset[r]), int(rows.numel[r])) for r in mine)
        assert sum(n for _, n in spans) == size
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))
    assert [move.page for move, _ in found.moves] == list(range(arena.resident, arena.layout.pages))
    begins = [found.at_hand, *(last for _, (_, last) in found.moves)]
    assert [rows_ for _, rows_ in found.moves] == list(itertools.pairwise(begins))
    assert begins[-1] == len(rows.tensor)
    for move, (first, last) in found.moves:
        start = arena.layout.starts[rows.tensor[first:last]] + rows.offset[first:last]
        assert (start // arena.layout.page_numel == move.page).all()


@threads(2)
def test_a_step_over_pages_is_few_calls() -> None:
    """What a step is, and how threads share its work, is worked out once: Python's part of a visit is eight calls."""
    params = [torch.nn.Parameter(torch.randn(16 * 4096 * 8 // 4)) for _ in range(4)]
    opt = PagedAdamW(params, device_budget=0, **ADAMW)
    step_with(params, opt, 0)
    opt.step()
    assert [a.layout.pages - a.resident for a in opt.store.arenas] == [16]
    found = calls(opt.step)
    assert len(found) <= 255, Counter(function.co_name for function in found).most_common(20)


def test_the_plan_of_a_step_leaves_pages_without_gradients_where_they_are() -> None:
    _, opt = stepped(device_budget=400_000)
    route = route_of(opt)
    assert route is not None
    (launch,) = opt._plan.launches  # type: ignore[union-attr]
    table = launch.sweep.table.host
    every, pages = route.plan(table), [move.page for move, _ in route.moves]
    assert route.plan(table) is every, "made once, as nothing has changed"
    assert [step.move.page for step in every if isinstance(step, Fetch)] == pages
    spans = [step.span for step in every if isinstance(step, Update)]
    assert [a for a, _ in spans] + [len(table.chunks)] == [0, *(b for _, b in spans)], "all chunks, each once"
    last = len(SIZES) - 1
    some = route.plan(table, [last])
    touched = {move.page for move, (first, end) in route.moves if (route.rows.tensor[first:end] != last).any()}
    assert 0 < len(touched) < len(pages)
    for kind in (Fetch, Arrive, Evict):
        assert {step.move.page for step in some if isinstance(step, kind)} == touched
    assert route.plan(table) == every


@pytest.mark.parametrize("ragged", [4800, 4097, 5000])
def test_sizes_that_end_within_an_entry_pass_through_slots(ragged: int) -> None:
    """256 elements share a scale: state of 4,800 has 19 of them, and not 18.75."""
    params = [torch.nn.Parameter(torch.randn(n)) for n in (300_000, ragged, 70_000)]
    optimizer = PagedAdamW(params, placement=SmallPages, device_budget=0, state_format="int8", **ADAMW)
    step_with(params, optimizer, 0)
    route = route_of(optimizer)
    assert route is not None
    assert set(route.rows.tensor.tolist()) == {0, 1, 2}
    assert route.at_hand == 0


def test_rows_of_a_page_point_into_its_slot_where_scales_share_a_granule() -> None:
    layout = lay_out([40 << 10], [1, Fraction(4, 64)], 4096, 4096)
    base, slot = 1 << 40, 1 << 33
    memory = SimpleNamespace(layout=layout, tensor=SimpleNamespace(data_ptr=lambda: base))
    ring = SimpleNamespace(address=lambda number: slot + number * slot_bytes(layout))
    assert layout.pages == 10
    assert layout.stretch(1, 3, 4)[1] == 0, "the scales of page 3 rest with page 0"
    for page in range(layout.pages):
        found = _shift(ring, memory, Move(0, page, page % 4))  # type: ignore[arg-type]
        for section, (width, shift) in enumerate(zip(layout.itemsizes, found, strict=True)):
            row = base + layout.sections[section] + int(page * layout.page_numel * width)
            assert (row + int(shift)) % 2**64 == ring.address(page % 4) + slot_offset(layout, section)


# --- A deep copy of a list of addresses names the tensors of the copy, with the numbers that it is given from ---------


@pagedopt.rule
def less(x: float, *, rate: float) -> float:
    return x - rate


HOW: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
}
DEVICES = [
    pytest.param("cpu", "managed", id="cpu"),
    *(pytest.param("cuda", name, id=f"cuda-{name}", marks=NEEDED) for name in TRANSPORTS),
]


def total(tensors: list[torch.Tensor]) -> float:
    return float(sum(t.sum() for t in tensors))


@pytest.mark.parametrize("has_run", [False, True], ids=["new", "has run"])
@pytest.mark.parametrize(("device", "transport"), DEVICES)
@pytest.mark.parametrize("how", HOW)
def test_a_copied_sweep_updates_the_copies(how: str, device: str, transport: str, has_run: bool) -> None:
    tensors = [torch.ones(3, device=device), torch.ones(5, device=device)]
    sweep = Sweep(less, [tensors], transport=transport)  # type: ignore[arg-type]
    if has_run:
        sweep.run({"rate": 0.0})
    other, others = HOW[how]((sweep, tensors))
    other.run({"rate": 1.0})
    assert (total(tensors), total(others)) == (8.0, 0.0)
    sweep.run({"rate": 2.0})
    del sweep
    other.run({"rate": 3.0})
    assert (total(tensors), total(others)) == (-8.0, -24.0)


@pytest.mark.parametrize("how", HOW)
def test_rows_of_a_copied_table_are_those_that_are_sent(how: str) -> None:
    tensors = [torch.ones(3), torch.ones(5)]
    table, others = HOW[how]((DeviceTable([tensors]), tensors))
    assert table.rows[:, 0].tolist() == [t.data_ptr() for t in others]
    words = table.host.words[table.host.rows_at :].view("int64").reshape(2, -1)
    assert (words == table.rows).all()
