"""A share of the state: kept by every arena of an optimizer, said again by its copies, changed while it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from children import run
from optim_support import COPIES, step_on_ones
from paths import ROOT

from pagedopt import PagedAdamW
from pagedopt.optim.registry import OPTIMIZERS, Entry
from pagedopt.paging.budget import Budget
from pagedopt.placements.choose import PLACEMENTS
from pagedopt.placements.store import Store

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (300_000, 70_001, 5, 150_000)


def stepped(budget: Any, dtypes: Any = DTYPES) -> tuple[list[torch.nn.Parameter], PagedAdamW]:
    """One arena for each dtype."""
    params = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for dtype in dtypes for n in SIZES]
    opt = PagedAdamW(params, device_budget=budget)
    step_on_ones(opt)
    return params, opt


def kept(opt: PagedAdamW) -> list[tuple[int, int, int]]:
    """(resident pages, resident bytes, bytes) of each arena."""
    return [(a.resident, a.layout.divided(a.resident)[0], a.layout.nbytes) for a in opt.store.arenas]


@pytest.mark.parametrize("budget", ["0%", "10%", 0.5, "77.7%", 1.0])
@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1]], ids=["wide first", "narrow first"])
def test_each_arena_keeps_its_share_and_later_ones_take_nothing(budget: Any, dtypes: Any) -> None:
    params, opt = stepped(budget, dtypes)
    share, before = Budget(budget).share, kept(opt)
    for number, numel in enumerate((500_000, 90_000, 7)):
        late = torch.nn.Parameter(torch.ones(numel, dtype=DTYPES[number % 2]))
        opt.add_param_group({"params": [late]})
        params.append(late)
        step_on_ones(opt)
        now = kept(opt)
        assert now[: len(before)] == before
        before = now
    assert len(before) > len(DTYPES)
    assert all(near <= share * nbytes for _, near, nbytes in before)
    total = sum(nbytes for _, _, nbytes in before)
    report = opt.memory_report()
    assert report.by_place.get("host", 0) == sum(near for _, near, _ in before)
    assert sum(report.by_place.values()) == total
    assert report.budget == int(share * total)
    opt.set_device_budget("all")
    opt.set_device_budget(budget)
    assert kept(opt) == before, "moving divides otherwise than making"


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("said", [None, "all", "auto", 0, "300 kB", "40%", 0.4])
def test_a_copy_says_what_the_user_said(said: Any, copied: Any) -> None:
    params, opt = stepped("10%")
    opt.set_device_budget(said)
    twin, _ = copied((opt, params))
    assert (twin.store.budget, repr(twin.store.budget)) == (Budget(said), f"Budget(said={said!r})")
    assert opt.__getstate__()["_options"]["device_budget"] == said
    if said not in (None, "all", "auto"):  # a copy that has no budget needs no pages
        assert kept(twin) == kept(opt)


@pytest.mark.parametrize(("said", "error"), [("150%", ValueError), (1.5, ValueError), (True, TypeError)])
def test_what_is_no_budget_is_refused_and_changes_nothing(said: Any, error: type[Exception]) -> None:
    params, opt = stepped("40%")
    before = kept(opt)
    for use in (lambda: PagedAdamW(params, device_budget=said), lambda: opt.set_device_budget(said)):
        with pytest.raises(error, match="device_budget is "):
            use()
    assert kept(opt) == before
    assert opt.store.budget == Budget("40%")


def test_what_is_not_divided_refuses_a_share_in_the_users_words() -> None:
    params = [torch.nn.Parameter(torch.ones(5))]
    for placement in ("device", "host"):
        with pytest.raises(ValueError, match=f"device_budget is '30%' with placement='{placement}', where"):
            PagedAdamW(params, placement=placement, device_budget="30%")
    with pytest.raises(ValueError, match=r"device_budget is 0.3 with placement='managed-driver', where the driver"):
        PagedAdamW(params, placement="managed-driver", device_budget=0.3)
    PagedAdamW(params, placement="host", device_budget="0%")


def test_without_state_a_share_is_no_number_yet() -> None:
    opt = PagedAdamW([torch.nn.Parameter(torch.ones(5))], device_budget="30%")
    assert opt.memory_report().budget is None
    assert "(budget 30% of the state)" in str(opt.memory_report())


# --- devices that are not meant are refused before anything is made ---------------------------------------------------


@pytest.mark.parametrize("placement", [None, *PLACEMENTS])
@pytest.mark.parametrize("name", ["mps", "xpu:1", "meta", "hpu", "privateuseone"])
def test_devices_that_are_not_meant_are_refused_in_plain_words(name: str, placement: str | None) -> None:
    store = Store(placement, Budget.parse(None), None)
    with pytest.raises(ValueError, match=f"parameters are on {name}; supported are cpu and cuda .*torch.optim"):
        store.check_device(torch.device(name))


def test_gpus_of_others_are_refused_whatever_torch_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(None, Budget.parse(None), None)
    store.check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    store.check_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="parameters are on cuda of ROCm; supported are"):
        store.check_device(torch.device("cuda"))


SYSTEM = """
import sys, torch, rich.console
sys.platform = sys.argv[1]
import pagedopt
from pagedopt.commands.main import main
try:
    pagedopt.PagedAdamW
except ImportError as error:
    print(error)
sys.exit(main(["plan", "--params", "1B"]))
"""


@pytest.mark.parametrize("name", ["win32", "darwin"])
def test_systems_that_are_not_meant_are_refused_in_plain_words(name: str) -> None:
    done = run("-c", SYSTEM, name, cwd=ROOT)
    text = f"pagedopt needs Linux, and this is {name}"
    assert done.stdout.startswith(text), done.stderr
    assert done.stderr.startswith(f"pagedopt plan: {text}"), done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "WSL 2" in done.stderr


@pytest.mark.parametrize("entry", OPTIMIZERS, ids=lambda entry: entry.name)
def test_at_construction_and_when_a_group_is_added(entry: Entry) -> None:
    here, away = (torch.nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "meta"))
    make = entry.optimizer
    for params in ([away], [here, away], [{"params": here}, {"params": away}]):
        with pytest.raises(ValueError, match="parameters are on meta"):
            make(params)  # type: ignore[call-arg]
    optimizer = make([here])  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="parameters are on meta"):
        optimizer.add_param_group({"params": [away]})
    assert [group["params"] for group in optimizer.param_groups] == [[here]]
