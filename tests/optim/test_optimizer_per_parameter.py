"""An optimizer per parameter: each of a thousand holds no more than a page and a descriptor.

Their bits are in ``tests/contract``."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from file_support import MIB, open_files
from gpu_support import NEEDED, least

from pagedopt import PagedAdamW
from pagedopt.optim import class_checks
from pagedopt.optim.class_checks import MANY
from pagedopt.placements import FileArena, MappedArena
from pagedopt.system import warn
from tests.optim import optimizer_per_parameter as apart
from tests.optim.optimizer_per_parameter import ADAMW, hooked, parameters, train, unhook

COUNT = 1000
#: Bytes beside the state of a large one: it has several pages, and says of each when it is visited.
LARGE = 48 << 10
#: Bytes of the smallest arena, of two moments: on a CPU, and on a GPU.
LEAST, LEAST_ON_GPU = 2 * FileArena.granule, 2 * MappedArena.granule
#: Bytes that a thousand small ones may hold beyond their state: 11 to 17 MB (notes/raw/host-of-a-step-h200.txt), and
#: the 4 kB of each record of a quick step (notes/fused_step.md), with what the allocator rounds up.
RESIDENT = 28 * MIB
SPILLED: list[dict[str, Any]] = [{"placement": "file", "device_budget": budget} for budget in (0, "50%", None)]


@pytest.fixture(autouse=True)
def unhooked(folder: Path) -> Iterator[None]:
    yield
    unhook(list(apart.with_hooks))
    gc.collect()


def held(count: int, large: int, options: dict[str, Any]) -> dict[str, Any]:
    # Half of a page is none; and there is a better way than an optimizer per parameter.
    quiet = ("-W", "error", "-W", "ignore:device_budget:RuntimeWarning", "-W", f"ignore:{MANY} optimizers")
    said = python(*quiet, apart.__file__, *map(json.dumps, (count, large, options)), timeout=300, fresh=True)
    return dict(json.loads(said))


@pytest.mark.long
@pytest.mark.parametrize(
    ("large", "options"), [(0, SPILLED[0]), (0, {}), *((50, options) for options in SPILLED)], ids=str
)
def test_a_thousand_hold_little_beyond_their_state(large: int, options: dict[str, Any]) -> None:
    found = held(COUNT, large, options)
    assert found["descriptors"] < 40 + COUNT * ("placement" in options)
    assert found["threads"] <= 0
    assert found["planned"] - found["state"] <= COUNT * LEAST
    assert found["rss"] - found["near"] <= RESIDENT + large * LARGE
    if options.get("device_budget") == 0:
        assert found["near"] == 0
    assert found["disk"] <= found["state"] + COUNT * LEAST
    assert found["left"] == {"descriptors": 0, "disk": 0}


def test_the_disk_has_room_again_once_optimizers_end_and_later_ones_begin_with_zeros(folder: Path) -> None:
    params = parameters(90)
    optimizers = hooked(params, placement="file", device_budget=0)
    train(params, 0, 2)
    files, used = open_files(folder), apart.disk_bytes(folder)
    kept = optimizers[params[5]].state[params[5]]["exp_avg"]
    values = kept.clone()
    for _ in range(3):
        unhook(params[::2])
        for p in params[::2]:
            del optimizers[p]
        gc.collect()
        for p in params[::2]:
            optimizers[p] = PagedAdamW([p], **ADAMW, placement="file", device_budget=0)
            p.grad = torch.zeros_like(p)
            optimizers[p].step()
            assert not optimizers[p].state[p]["exp_avg"].any()
        assert (open_files(folder), apart.disk_bytes(folder)) == (files, used)
    assert torch.equal(kept, values)
    unhook(params)
    del optimizers, params, p
    gc.collect()
    assert open_files(folder) >= 1, "somebody has a tensor still"
    assert torch.equal(kept, values)
    del kept
    gc.collect()
    assert open_files(folder) == 0


# ---- a better way ----


@pytest.fixture
def none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No optimizer is alive, and none was warned of."""
    monkeypatch.setattr(class_checks, "_of_one_parameter", weakref.WeakSet())
    monkeypatch.setattr(warn, "_said", set())


def said_of(params: Iterable[Any], keep: bool = True) -> list[str]:
    """The warnings while optimizers over these are made, at most so many at a time as are kept."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kept = []
        for some in params:
            made = PagedAdamW(some)
            if keep:
                kept.append(made)
    return [str(each.message) for each in said]


@pytest.mark.usefixtures("none_before")
def test_the_hundredth_optimizer_of_one_parameter_names_the_better_way_once() -> None:
    (text,) = said_of([p] for p in parameters(2 * MANY + 1))
    assert "100 optimizers" in text
    assert "attach(model, overlap='backward')" in text


@pytest.mark.usefixtures("none_before")
def test_fewer_larger_and_short_lived_ones_are_as_many_as_anybody_likes() -> None:
    assert said_of([p] for p in parameters(MANY - 1)) == []
    assert said_of([{"params": [p]}, {"params": [p.detach().clone()]}] for p in parameters(2 * MANY)) == []
    assert said_of(([p] for p in parameters(2 * MANY)), keep=False) == []


# ---- a GPU ----

CUDA: list[dict[str, Any]] = [
    {},
    *({"placement": "mapped", "device_budget": 0, "host_access": way} for way in ("staged", "in_place", None)),
    *({"placement": placement, "device_budget": b} for placement in ("mapped", "managed") for b in (0, "50%", None)),
    {"placement": "host", "device_budget": 0},
]


@pytest.mark.exclusive
@pytest.mark.parametrize("options", [pytest.param(options, marks=NEEDED, id=str(options)) for options in CUDA])
def test_a_thousand_take_little_of_a_card(options: dict[str, Any]) -> None:
    warm = parameters(3, 0, "cuda")  # kernels, streams, what torch caches
    keep = hooked(warm, **options)
    train(warm, 0, 2)
    unhook(warm)
    del keep, warm
    kept = []  # what has been freed might be there for the next attempt

    def taken() -> int:
        params = parameters(COUNT, 0, "cuda")
        train(params, 0, 1)
        for p in params:
            p.grad = None
        gc.collect()
        torch.cuda.synchronize()
        free, reserved, files = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved(), apart.descriptors()
        optimizers = hooked(params, **options)
        kept.append(optimizers)
        train(params, 0, 3)
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
        reports = [opt.memory_report() for opt in optimizers.values()]
        everywhere = sum(sum(report.by_place.values()) for report in reports)
        state = sum(2 * p.nbytes for p in params)
        assert apart.descriptors() - files < 40
        assert everywhere <= state + (COUNT * LEAST_ON_GPU if options else 0)
        if options.get("device_budget") == 0:
            assert not any(report.by_place.get("device", 0) for report in reports)
        assert max(report.ring for report in reports) <= MIB
        return taken - state

    most = 16 * MIB + (COUNT * LEAST_ON_GPU if options else 0)
    assert least(taken, most) <= most
