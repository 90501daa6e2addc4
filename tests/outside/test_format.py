"""A format of another package, through all that an optimizer's state goes through."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from children import python
from optim_support import through_file

import pagedopt
from pagedopt import PagedAdamW, PagedLion, PagedOptimizer

from .format import Int8Blocks
from .training import Params, bits, gpu, same

#: The largest has several pages, whose scales share a granule.
LARGE = {"cpu": 1_000_003, "cuda": 9_000_003}
SHAPES = {d: ((300, 257), (64,), (65,), (), (0,), (3, 700), (n,), (63,)) for d, n in LARGE.items()}
INT8 = Int8Blocks()
Make = Callable[..., PagedOptimizer]
CLASSES: dict[str, Make] = {"AdamW": PagedAdamW, "Lion": PagedLion}
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
#: Bytes of one moment: a code each, and a scale for each block.
MOMENT = {d: sum(n + 4 * -(-n // 64) for n in (torch.Size(s).numel() for s in SHAPES[d])) for d in SHAPES}
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "file": {"placement": "file", "device_budget": 0},
        "half": {"placement": "file", "device_budget": MOMENT["cpu"]},
        "all": {"placement": "file", "device_budget": "1GiB"},
    },
    "cuda": {
        "mapped": {"device_budget": 0},
        "half": {"device_budget": MOMENT["cuda"]},
        "in place": {"device_budget": 0, "host_access": "in_place"},
        "managed": {"placement": "managed", "device_budget": 0},
        "driver": {"placement": "managed-driver"},
        "host": {"placement": "host"},
        "struct": {"transport": "struct"},
        "few blocks": {"blocks": 3},
    },
}
ON_THE_CPU: list[dict[str, Any]] = [{}, *PLACES["cpu"].values()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", str(tmp_path))


def parameters(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES[device]]
    return [torch.nn.Parameter(p.t().contiguous().t() if p.dim() == 2 else p) for p in made]


def steps(opt: torch.optim.Optimizer, params: Params, first: int, count: int) -> None:
    """One parameter in turn has no gradient, and some gradients have blocks of zeros."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                grad[64:200] = 0
            p.grad = None if step and i == step % len(params) else grad.to(p)
        opt.step()


def run(device: str, make: Make, count: int = 4, **options: Any) -> tuple[PagedOptimizer, Params]:
    params = parameters(device)
    opt = make(params, lr=1e-2, weight_decay=0.1, state_format=INT8, **options)
    steps(opt, params, 0, count)
    return opt, params


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_is_that_of_decoded_state(name: str, device: str) -> None:
    """Step by step against a float32 optimizer that begins each step with the decoded state."""
    opt, params = run(device, CLASSES[name], 2)
    for step in range(2, 8):
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        plain = CLASSES[name](twins, lr=1e-2, weight_decay=0.1)
        plain.load_state_dict(opt.decoded_state_dict())
        steps(opt, params, step, 1)
        steps(plain, twins, step, 1)
        decoded = opt.decoded_state_dict()["state"]
        for i, (p, twin) in enumerate(zip(params, twins, strict=True)):
            assert torch.equal(p, twin), f"parameter {i}: state is as exact as float32 until it is stored"
            for key, value in plain.state[twin].items():
                if key == "step":
                    assert torch.equal(value, opt.state[p]["step"])
                    continue
                off = (decoded[i][key].to(device) - value).abs()
                off = (off.t() if off.dim() == 2 else off).reshape(-1)  # in the order of memory
                scale = opt.state[p][f"{key}.scale"].repeat_interleave(64)[: off.numel()]
                assert (off <= 0.5001 * scale).all(), f"{key} of parameter {i}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CLASSES)
def test_no_budget_and_no_placement_changes_a_bit(name: str, device: str) -> None:
    want = bits(*run(device, CLASSES[name]))
    for place, options in PLACES[device].items():
        opt, params = run(device, CLASSES[name], **options)
        assert same(bits(opt, params), want), place
        if "device_budget" in options:
            before = opt.memory_report().by_place
            opt.set_device_budget(MOMENT[device] if place != "half" else "1GiB")
            assert opt.memory_report().by_place != before or place == "all"
            steps(opt, params, 4, 2)
            assert same(bits(opt, params), bits(*run(device, CLASSES[name], 6))), f"{place}, moved"


def resume(folder: str, device: str, name: str) -> None:
    """In a process of its own: go on from the checkpoint in ``folder``, all state away."""
    opt, params = run(device, PagedAdamW, 0, **PLACES[device][name])
    saved = torch.load(Path(folder) / "saved.pt", weights_only=True)
    for p, value in zip(params, saved["params"], strict=True):
        p.data.copy_(value)
    opt.load_state_dict(saved["state"])
    steps(opt, params, 4, 3)
    torch.save(bits(opt, params), Path(folder) / "resumed.pt")


@pytest.mark.parametrize(("device", "place"), [("cpu", "file"), pytest.param("cuda", "mapped", marks=gpu)])
def test_a_new_process_goes_on_to_the_same_bits(device: str, place: str, tmp_path: Path) -> None:
    opt, params = run(device, PagedAdamW)
    torch.save({"params": [p.detach() for p in params], "state": opt.state_dict()}, tmp_path / "saved.pt")
    code = f"from tests.outside.test_format import resume; resume({str(tmp_path)!r}, {device!r}, {place!r})"
    python("-c", code)
    steps(opt, params, 4, 3)
    assert same(torch.load(tmp_path / "resumed.pt", weights_only=True), bits(opt, params))


def test_copies_are_the_same_and_apart() -> None:
    for options in ON_THE_CPU:
        opt, params = run("cpu", PagedAdamW, **options)
        want = bits(opt, params)
        copies = copy.deepcopy((opt, params)), pickle.loads(pickle.dumps((opt, params)))
        for twin, twins in copies:
            assert same(bits(twin, twins), want)
            assert twin.memory_report().by_place == opt.memory_report().by_place
            steps(twin, twins, 4, 2)
        assert same(bits(opt, params), want)
        assert same(bits(*copies[0]), bits(*copies[1]))


def test_what_an_estimate_says_is_what_a_report_says() -> None:
    for options in ON_THE_CPU:
        opt, _ = run("cpu", PagedAdamW, 9, **options)
        plan = pagedopt.estimate(parameters(), state_format=INT8, **options)
        assert dict(plan.by_place) == dict(opt.memory_report().by_place), options
    assert pagedopt.estimate(parameters(), state_format=INT8).state_bytes == 2 * MOMENT["cpu"]
    assert pagedopt.estimate("7B", state_format=INT8).state_bytes == 2 * (7_000_000_000 + 4 * 109_375_000)


def test_state_of_torch_is_encoded_and_decoded_state_is_torch_s() -> None:
    params = parameters()
    theirs = torch.optim.AdamW(params, lr=1e-2)
    steps(theirs, params, 0, 3)
    for options in ON_THE_CPU:
        opt = PagedAdamW(params, lr=1e-2, state_format=INT8, **options)
        opt.load_state_dict(theirs.state_dict())
        decoded = opt.decoded_state_dict()
        for i, p in enumerate(params):
            for key in ("exp_avg", "exp_avg_sq"):
                got, scale = decoded["state"][i][key], opt.state[p][f"{key}.scale"]
                assert (got.shape, got.stride()) == (p.shape, p.stride())
                limit = 0.5001 * scale.max() if scale.numel() else 0
                assert torch.allclose(got, theirs.state[p][key], rtol=0, atol=float(limit))
        back = torch.optim.AdamW(params, lr=1e-2)
        back.load_state_dict(decoded)
        back.step()
        again = PagedAdamW(params, lr=1e-2, state_format=INT8)
        again.load_state_dict(opt.state_dict())
        assert same(bits(again, params), bits(opt, params))


def test_columns_say_of_which_format_they_are() -> None:
    opt, params = run("cpu", PagedAdamW)
    plain = PagedAdamW(params, lr=1e-2)
    with pytest.raises(ValueError, match=r"parameter 0 has no exp_avg, .*another state_format.*decoded_state_dict"):
        plain.load_state_dict(opt.state_dict())
    assert not plain.state
    saved = opt.state_dict()
    saved["state"][0] = {**saved["state"][0], "exp_avg.scale": torch.zeros(3)}
    want = bits(opt, params)
    with pytest.raises(ValueError, match=r"loaded exp_avg.scale of parameter 0 has shape \(3,\)"):
        opt.load_state_dict(saved)
    assert same(bits(opt, params), want)


@pytest.mark.parametrize("options", [{}, PLACES["cpu"]["file"]], ids=["resident", "file"])
def test_what_users_put_into_state_is_used_or_refused(options: dict[str, Any]) -> None:
    opt, params = run("cpu", PagedAdamW, **options)
    twin, twins = run("cpu", PagedAdamW)
    for one, of in ((opt, params), (twin, twins)):
        one.state[of[6]]["exp_avg.codes"] = one.state[of[6]]["exp_avg.codes"].clone().fill_(3)
        one.state[of[0]]["exp_avg_sq.scale"].mul_(2)
        steps(one, of, 4, 2)
    assert same(bits(opt, params), bits(twin, twins))
    want = bits(opt, params)
    good = opt.state[params[6]]["exp_avg.codes"]
    for bad, text in ((good.float(), "torch.float32"), (good[:-1], "the parameter has")):
        opt.state[params[6]]["exp_avg.codes"] = bad
        for p in params:
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match=text):
            opt.step()
        opt.state[params[6]]["exp_avg.codes"] = good
    del opt.state[params[6]]["exp_avg.scale"]
    with pytest.raises(KeyError, match=r"exp_avg\.scale"):
        opt.step()
    assert len(want) == len(bits(opt, params)) + 1


def test_one_state_in_blocks_and_one_in_bfloat16() -> None:
    results = []
    for options in ON_THE_CPU:
        params = parameters("cpu", torch.bfloat16)
        opt = PagedAdamW(params, lr=1e-2, state_format={"exp_avg": INT8, "exp_avg_sq": "bfloat16"}, **options)
        steps(opt, params, 0, 4)
        assert list(opt.state[params[0]]) == ["step", "exp_avg.codes", "exp_avg.scale", "exp_avg_sq"]
        assert opt.state[params[0]]["exp_avg_sq"].dtype is torch.bfloat16
        results.append(bits(opt, params))
    assert all(same(one, results[0]) for one in results)


def test_parameters_that_join_late_find_room_between_blocks() -> None:
    results = []
    for options in ({}, PLACES["cpu"]["file"]):
        params = parameters()
        opt = PagedAdamW(params[:3], lr=1e-2, state_format=INT8, **options)
        steps(opt, params[:3], 0, 1)
        for i, p in enumerate(params[3:]):
            opt.add_param_group({"params": [p]})
            steps(opt, params[: 4 + i], 1 + i, 1)
        results.append([t.detach().clone() for p in params for t in (p, *opt.state.get(p, {}).values())])
    assert same(*results)


@pagedopt.rule
def drift(param: float, grad: float, average: float, *, lr: float) -> tuple[float, float]:
    """State that begins at one."""
    average = 0.5 * average + 0.5 * grad
    param = param - lr * average
    return param, average


class Drift(PagedOptimizer):
    """Descent along an average that begins at one."""

    rule = drift
    initial: ClassVar = {"average": 1.0}

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)


def test_state_that_begins_at_one_begins_there_in_blocks_too() -> None:
    for options in ({}, PLACES["cpu"]["file"]):
        params = parameters()
        opt = Drift(params, state_format=INT8, **options)
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.step()
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close(p.detach(), old - 1e-2 * 0.5)
            assert (opt.state[p]["average.codes"] == 127).all()


class Offset(Int8Blocks):
    """Its codes begin at 3."""

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """The codes alone."""
        return columns[0].float() + 3


def test_what_cannot_be_is_refused_when_an_optimizer_is_made() -> None:
    with pytest.raises(ValueError, match=r"zeros in all columns are decoded as 3\.0"):
        PagedAdamW(parameters(), state_format={"exp_avg": Offset()})
    with pytest.raises(TypeError, match=r"give a name .* a pagedopt.formats.Format"):
        PagedAdamW(parameters(), state_format=Int8Blocks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no complex numbers of that kind"):
        PagedAdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))], state_format=INT8)
    saved = through_file(run("cpu", PagedAdamW)[0].state_dict())
    assert saved["state"][0]["exp_avg.codes"].dtype is torch.int8
