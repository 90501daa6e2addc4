"""Checkpoints on a GPU: new processes go on to the same bits, and neither saving nor loading moves or takes pages."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resume
import torch
from gpu_support import NEEDED, settled
from resume import STEPS, Case

from pagedopt.optim.load import STAGING_BYTES
from pagedopt.paging.pages import GRANULE
from pagedopt.system import driver

pytestmark = NEEDED

MIB = 1 << 20
#: (placement, budget): a budget below 1 is a share of the state.
PLACES: dict[str, tuple[str | None, float | None]] = {
    "device": ("device", None),
    "mapped 0": ("mapped", 0),
    "mapped half": ("mapped", 0.5),
    "mapped all": ("mapped", 1 << 30),
    "managed 0": ("managed", 0),
    "managed half": ("managed", 0.5),
    "managed all": ("managed", 1 << 30),
    "managed-driver": ("managed-driver", None),
    "host": ("host", None),
    "host 0": ("host", 0),
}
#: What each wrote itself, wherever the file is loaded to; and, by way of two of them, what each other wrote.
CASES = [
    Case(name, *place, "float32", location)
    for (name, place), location in itertools.product(PLACES.items(), (None, "cpu", "cuda"))
]
CASES += [Case("mapped half", *place, "bfloat16") for place in PLACES.values()]
CASES += [Case(name, "device", None, "bfloat16", "cpu") for name in PLACES]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every case gives in one process of its own, and as ``"whole …"`` what 10 steps give here."""
    folder = tmp_path_factory.mktemp("resume")
    found = {}
    for (name, place), dtype in itertools.product(PLACES.items(), resume.DTYPES):
        params = resume.parameters("cuda", dtype)
        opt = resume.optimizer(params, *place)
        resume.train(params, opt, 0)
        resume.save(folder, name, dtype, params, opt)
        resume.train(params, opt, STEPS)
        found[f"whole {name} {dtype}"] = resume.digest(params, opt)
    return found | resume.in_new_process(folder, CASES, "cuda")


@pytest.mark.parametrize("dtype", resume.DTYPES)
def test_saving_changes_nothing(dtype: str, results: dict[str, str]) -> None:
    params = resume.parameters("cuda", dtype)
    opt = resume.optimizer(params, "device", None)
    resume.train(params, opt, 0, 2 * STEPS)
    whole = resume.digest(params, opt)
    assert {name: results[f"whole {name} {dtype}"] for name in PLACES} == dict.fromkeys(PLACES, whole)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_new_process_goes_on_to_the_same_bits(case: Case, results: dict[str, str]) -> None:
    assert results[case.name] == results[f"whole device {case.dtype}"], results[case.name]


def used() -> int:
    """Bytes of the device that are taken, torch's cache emptied."""
    settled()
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that torch has of the first device during ``work``, beyond those before."""
    torch.cuda.reset_peak_memory_stats(0)
    allocated = torch.cuda.memory_allocated(0)
    work()
    return torch.cuda.max_memory_allocated(0) - allocated


def trained(name: str) -> tuple[list[torch.nn.Parameter], Any]:
    params = resume.parameters("cuda", "float32")
    opt = resume.optimizer(params, *PLACES[name])
    resume.train(params, opt, 0, 2)
    return params, opt


def on_host(opt: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return found


def saved_as(form: Callable[[torch.Tensor], torch.Tensor], name: str) -> tuple[list[torch.nn.Parameter], Any, Any]:
    """Parameters, their optimizer, and a checkpoint whose state has another form."""
    params, opt = trained(name)
    saved = on_host(opt)
    for entry in saved["state"].values():
        entry.update({k: form(v) for k, v in entry.items() if k != "step"})
    return params, opt, saved


@pytest.mark.exclusive
@pytest.mark.parametrize("name", PLACES)
def test_saving_moves_no_page_and_takes_no_device_memory(name: str, tmp_path: Path) -> None:
    _, opt = trained(name)
    before, taken = opt.memory_report(), used()
    assert peak_of(lambda: torch.save(opt.state_dict(), tmp_path / "state.pt")) == 0
    assert used() - taken <= 2 * MIB  # other processes have the device too
    after = opt.memory_report()
    assert (after.by_place, after.measured) == (before.by_place, before.measured)
    # Two arenas, because one parameter had its first gradient later, with two sections of granules each.
    assert (tmp_path / "state.pt").stat().st_size <= resume.state_bytes("cuda") + 4 * GRANULE + MIB


FORMS = {
    "as saved": lambda t: t,
    "in another layout": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "narrower": lambda t: t.bfloat16(),
    "on the device, narrower": lambda t: t.bfloat16().cuda(),
}


@pytest.mark.exclusive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLACES)
def test_loading_keeps_addresses_and_places_and_takes_at_most_a_chunk(name: str, form: str) -> None:
    params, opt, saved = saved_as(FORMS[form], name)
    resume.train(params, opt, 2, 1)
    before, taken = opt.memory_report(), used()
    addresses = [t.data_ptr() for p in params for k, t in opt.state[p].items() if k != "step"]
    assert peak_of(lambda: opt.load_state_dict(saved)) <= STAGING_BYTES
    assert used() - taken <= 2 * MIB
    assert [t.data_ptr() for p in params for k, t in opt.state[p].items() if k != "step"] == addresses
    after = opt.memory_report()
    assert after.by_place == before.by_place
    for place, nbytes in before.measured.items():
        assert abs(after.measured[place] - nbytes) <= 0.02 * resume.state_bytes("cuda"), after
    for i, p in enumerate((*params[1:], *params[:1])):
        for k in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][k].cpu(), saved["state"][i][k].float().cpu())


@pytest.mark.exclusive
@pytest.mark.parametrize("form", ["as saved", "narrower"])
@pytest.mark.parametrize("name", PLACES)
def test_a_resumed_run_needs_no_more_than_a_fresh_one(name: str, form: str) -> None:
    """Peak of torch's memory from the optimizer's start to its first step, and what is taken of the device then.

    All that is taken and not what was added, and the best of some runs in turn: the driver keeps room of freed managed
    memory for as long as it likes.
    """
    params, opt, saved = saved_as(FORMS[form], name)
    del opt
    peaks: dict[bool, list[int]] = {False: [], True: []}
    ends: dict[bool, list[int]] = {False: [], True: []}
    for load in (False, True) * 3:
        for p in params:
            p.grad = torch.ones_like(p)
        used()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        opt = resume.optimizer(params, *PLACES[name])
        if load:
            opt.load_state_dict(saved)
        opt.step()
        peaks[load].append(torch.cuda.max_memory_allocated() - allocated)
        ends[load].append(used())
        del opt
    assert max(peaks[True]) <= min(peaks[False]) + STAGING_BYTES, peaks
    if name != "device":  # tensors of torch's own may lie otherwise among gradients, in other segments of its allocator
        assert min(ends[True]) <= max(ends[False]) + 2 * MIB, ends


@pytest.mark.parametrize("steps", [0, 2])
def test_room_that_is_not_there_leaves_the_optimizer_as_it_was(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = on_host(trained("device")[1])
    params = resume.parameters("cuda", "float32")
    opt = resume.optimizer(params, "managed", 0)
    resume.train(params, opt, 0, steps)
    for p in params[:2]:
        opt.state.pop(p, None)
    before = [(p, dict(e)) for p, e in opt.state.items()]
    values, arenas = copy.deepcopy(opt.state_dict()), list(opt.store.arenas)
    monkeypatch.setattr(driver, "MANAGED_SHARE", 1e-12)
    with pytest.raises(MemoryError):
        opt.load_state_dict(saved)
    assert [(p, dict(e)) for p, e in opt.state.items()] == before
    assert set(opt.store.arenas) <= set(arenas)  # those without any state left may go
    for key, entry in opt.state_dict()["state"].items():
        assert all(torch.equal(v, values["state"][key][k]) for k, v in entry.items())
    monkeypatch.undo()
    opt.load_state_dict(saved)


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_step_counts_of_torch_come_from_the_device(how: dict[str, bool]) -> None:
    params = resume.parameters("cuda", "float32")
    for p in params:
        p.grad = torch.ones_like(p)
    theirs = torch.optim.AdamW(params, **how)
    for _ in range(3):
        theirs.step()
    opt = resume.optimizer(params, "mapped", 0.5)
    numbers = {id(p): i for i, p in enumerate(params)}
    saved = theirs.state_dict()
    saved["param_groups"] = [
        {**saved["param_groups"][0], "params": [numbers[id(p)] for p in group["params"]]} for group in opt.param_groups
    ]
    opt.load_state_dict(saved)
    for p in params:
        where = "cpu" if how == {"foreach": True} else "cuda"  # as torch loads them
        assert opt.state[p]["step"].device.type == where
        assert float(opt.state[p]["step"]) == 3
        assert all(torch.equal(opt.state[p][k], theirs.state[p][k]) for k in ("exp_avg", "exp_avg_sq"))
    opt.step()
    assert float(theirs.state[params[0]]["step"]) == 3, "the loaded tensors were counted on"


@pytest.mark.parametrize("name", ["mapped half", "managed half", "host"])
def test_a_copied_optimizer_has_its_state_where_its_options_say(name: str) -> None:
    params, opt = trained(name)
    params2, opt2 = copy.deepcopy((params, opt))
    here, there = opt.memory_report().by_place, opt2.memory_report().by_place
    assert here.keys() == there.keys()
    assert all(abs(here[place] - there[place]) <= 4 * GRANULE for place in here)  # one arena in place of two
    for some, one in ((params, opt), (params2, opt2)):
        resume.train(some, one, 2, 2)
    assert resume.digest(params, opt) == resume.digest(params2, opt2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["device", "mapped half", "host"])
def test_state_comes_from_another_device_without_room_on_this_one(name: str) -> None:
    params, opt, saved = saved_as(lambda t: t.bfloat16().to("cuda:1"), name)
    assert peak_of(lambda: opt.load_state_dict(saved)) == 0
    for i, p in enumerate((*params[1:], *params[:1])):
        assert torch.equal(opt.state[p]["exp_avg"].cpu(), saved["state"][i]["exp_avg"].float().cpu())
