"""A format of another package, through all that an optimizer's state goes through."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from children import python

import pagedopt
from pagedopt import PagedAdamW, PagedLion, PagedOptimizer

from .format import Int8Blocks

#: The largest has several pages, whose scales share a granule.
LARGE = {"cpu": 1_000_003, "cuda": 9_000_003}
SHAPES = {d: ((300, 257), (64,), (65,), (), (0,), (3, 700), (n,), (63,)) for d, n in LARGE.items()}
INT8 = Int8Blocks()
Make = Callable[..., PagedOptimizer]
CLASSES: dict[str, Make] = {"AdamW": PagedAdamW, "Lion": PagedLion}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", str(tmp_path))


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES[device]]
    return [torch.nn.Parameter(p.t().contiguous().t() if p.dim() == 2 else p) for p in made]


def steps(params: list[torch.nn.Parameter], opt: torch.optim.Optimizer, first: int, count: int) -> None:
    """One parameter in turn has no gradient, and some gradients have blocks of zeros."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                grad[64:200] = 0
            p.grad = None if step and i == step % len(params) else grad.to(p)
        opt.step()


def contents(params: list[torch.nn.Parameter], opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.detach().cpu().clone() for p in params for t in (p, *opt.state[p].values())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def run(device: str, make: Make, count: int = 4, **options: Any) -> tuple[list[torch.nn.Parameter], PagedOptimizer]:
    params = parameters(device)
    opt = make(params, lr=1e-2, weight_decay=0.1, state_format=INT8, **options)
    steps(params, opt, 0, count)
    return params, opt


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_is_that_of_decoded_state(name: str, device: str) -> None:
    """Step by step against a float32 optimizer that begins each step with the decoded state."""
    params, opt = run(device, CLASSES[name], 2)
    for step in range(2, 8):
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        plain = CLASSES[name](twins, lr=1e-2, weight_decay=0.1)
        plain.load_state_dict(opt.decoded_state_dict())
        steps(params, opt, step, 1)
        steps(twins, plain, step, 1)
        decoded = opt.decoded_state_dict()["state"]
        for i, (p, twin) in enumerate(zip(params, twins, strict=True)):
            assert torch.equal(p, twin), f"parameter {i}: state is as exact as float32 until it is stored"
            for key, value in plain.state[twin].items():
                if key == "step":
                    assert torch.equal(value, opt.state[p]["step"])
                    continue
                stored = opt.state[p][f"{key}.scale"]
                flat = value.t().reshape(-1) if value.dim() == 2 else value.reshape(-1)  # in the order of memory
                got = decoded[i][key].t().reshape(-1) if value.dim() == 2 else decoded[i][key].reshape(-1)
                scale = stored.repeat_interleave(64)[: flat.numel()]
                assert ((got - flat).abs() <= 0.5001 * scale).all(), f"{key} of parameter {i}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CLASSES)
def test_no_budget_and_no_placement_changes_a_bit(name: str, device: str) -> None:
    want = contents(*run(device, CLASSES[name]))
    for place, options in PLACES[device].items():
        params, opt = run(device, CLASSES[name], **options)
        assert same(contents(params, opt), want), place
        if "device_budget" in options:
            before = opt.memory_report().by_place
            opt.set_device_budget(MOMENT[device] if place != "half" else "1GiB")
            assert opt.memory_report().by_place != before or place == "all"
            steps(params, opt, 4, 2)
            assert same(contents(params, opt), contents(*run(device, CLASSES[name], 6))), f"{place}, moved"


def resume(folder: str, device: str, name: str) -> None:
    """In a process of its own: go on from the checkpoint in ``folder``, all state away."""
    options = PLACES[device][name]
    params = parameters(device)
    opt = PagedAdamW(params, lr=1e-2, weight_decay=0.1, state_format=Int8Blocks(), **options)
    saved = torch.load(Path(folder) / "saved.pt", weights_only=True)
    for p, value in zip(params, saved["params"], strict=True):
        p.data.copy_(value)
    opt.load_state_dict(saved["state"])
    steps(params, opt, 4, 3)
    torch.save(contents(params, opt), Path(folder) / "resumed.pt")


@pytest.mark.parametrize(("device", "place"), [("cpu", "file"), pytest.param("cuda", "mapped", marks=DEVICES[1].marks)])  # type: ignore[union-attr]
def test_a_new_process_goes_on_to_the_same_bits(device: str, place: str, tmp_path: Path) -> None:
    params, opt = run(device, PagedAdamW)
    torch.save({"params": [p.detach() for p in params], "state": opt.state_dict()}, tmp_path / "saved.pt")
    code = f"from tests.outside.test_format import resume; resume({str(tmp_path)!r}, {device!r}, {place!r})"
    python("-c", code)
    steps(params, opt, 4, 3)
    assert same(torch.load(tmp_path / "resumed.pt", weights_only=True), contents(params, opt))


def test_copies_are_the_same_and_apart() -> None:
    for options in ({}, *PLACES["cpu"].values()):
        params, opt = run("cpu", PagedAdamW, **options)
        want = contents(params, opt)
        twins, twin = copy.deepcopy((params, opt))
        again, other = pickle.loads(pickle.dumps((params, opt)))
        for ps, o in ((twins, twin), (again, other)):
            assert same(contents(ps, o), want)
            assert o.memory_report().by_place == opt.memory_report().by_place
            steps(ps, o, 4, 2)
        assert same(contents(params, opt), want)
        assert same(contents(twins, twin), contents(again, other))


def test_what_an_estimate_says_is_what_a_report_says() -> None:
    for options in ({}, *PLACES["cpu"].values()):
        _, opt = run("cpu", PagedAdamW, 9, **options)
        plan = pagedopt.estimate(parameters("cpu"), state_format=INT8, **options)
        assert dict(plan.by_place) == dict(opt.memory_report().by_place), options
    assert pagedopt.estimate(parameters("cpu"), state_format=INT8).state_bytes == 2 * MOMENT["cpu"]
    assert pagedopt.estimate("7B", state_format=INT8).state_bytes == 2 * (7_000_000_000 + 4 * 109_375_000)


def test_state_of_torch_is_encoded_and_decoded_state_is_torch_s() -> None:
    params = parameters("cpu")
    theirs = torch.optim.AdamW(params, lr=1e-2)
    steps(params, theirs, 0, 3)
    for options in ({}, *PLACES["cpu"].values()):
        opt = PagedAdamW(params, lr=1e-2, state_format=INT8, **options)
        opt.load_state_dict(theirs.state_dict())
        decoded = opt.decoded_state_dict()
        for i, p in enumerate(params):
            for key in ("exp_avg", "exp_avg_sq"):
                value, scale = theirs.state[p][key], opt.state[p][f"{key}.scale"]
                assert decoded["state"][i][key].shape == p.shape
                assert decoded["state"][i][key].stride() == p.stride()
                limit = 0.5001 * scale.max() if scale.numel() else 0
                assert torch.allclose(decoded["state"][i][key], value, rtol=0, atol=float(limit))
        back = torch.optim.AdamW(params, lr=1e-2)
        back.load_state_dict(decoded)
        back.step()
        again = PagedAdamW(params, lr=1e-2, state_format=INT8)
        again.load_state_dict(opt.state_dict())
        assert same(contents(params, again), contents(params, opt))


def test_columns_say_of_which_format_they_are() -> None:
    params, opt = run("cpu", PagedAdamW)
    plain = PagedAdamW(params, lr=1e-2)
    with pytest.raises(ValueError, match=r"parameter 0 has no exp_avg, .*another state_format.*decoded_state_dict"):
        plain.load_state_dict(opt.state_dict())
    assert not plain.state
    saved = opt.state_dict()
    saved["state"][0] = {**saved["state"][0], "exp_avg.scale": torch.zeros(3)}
    want = contents(params, opt)
    with pytest.raises(ValueError, match=r"loaded exp_avg.scale of parameter 0 is torch.float32 \(3,\)"):
        opt.load_state_dict(saved)
    assert same(contents(params, opt), want)


@pytest.mark.parametrize("options", [{}, PLACES["cpu"]["file"]], ids=["resident", "file"])
def test_what_users_put_into_state_is_used_or_refused(options: dict[str, Any]) -> None:
    params, opt = run("cpu", PagedAdamW, **options)
    twins, twin = run("cpu", PagedAdamW)
    for ps, o in ((params, opt), (twins, twin)):
        o.state[ps[6]]["exp_avg.codes"] = o.state[ps[6]]["exp_avg.codes"].clone().fill_(3)
        o.state[ps[0]]["exp_avg_sq.scale"].mul_(2)
        steps(ps, o, 4, 2)
    assert same(contents(params, opt), contents(twins, twin))
    want = contents(params, opt)
    good = opt.state[params[6]]["exp_avg.codes"]
    for bad, text in ((good.float(), "torch.float32"), (good[:-1], "the parameter has shape")):
        opt.state[params[6]]["exp_avg.codes"] = bad
        for p in params:
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match=text):
            opt.step()
        opt.state[params[6]]["exp_avg.codes"] = good
    del opt.state[params[6]]["exp_avg.scale"]
    with pytest.raises(KeyError, match=r"exp_avg\.scale"):
        opt.step()
    assert len(want) == len(contents(params, opt)) + 1


def test_one_state_in_blocks_and_one_in_bfloat16() -> None:
    results = []
    for options in ({}, *PLACES["cpu"].values()):
        params = parameters("cpu", torch.bfloat16)
        formats = {"exp_avg": INT8, "exp_avg_sq": "bfloat16"}
        opt = PagedAdamW(params, lr=1e-2, state_format=formats, **options)
        steps(params, opt, 0, 4)
        assert list(opt.state[params[0]]) == ["step", "exp_avg.codes", "exp_avg.scale", "exp_avg_sq"]
        assert opt.state[params[0]]["exp_avg_sq"].dtype is torch.bfloat16
        results.append(contents(params, opt))
    assert all(same(one, results[0]) for one in results)


def test_parameters_that_join_late_find_room_between_blocks() -> None:
    results = []
    for options in ({}, PLACES["cpu"]["file"]):
        params = parameters("cpu")
        opt = PagedAdamW(params[:3], lr=1e-2, state_format=INT8, **options)
        steps(params[:3], opt, 0, 1)
        for i, p in enumerate(params[3:]):
            opt.add_param_group({"params": [p]})
            steps(params[: 4 + i], opt, 1 + i, 1)
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
        params = parameters("cpu")
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
    with pytest.raises(ValueError, match=r"zeros in all columns stand for 3\.0"):
        PagedAdamW(parameters("cpu"), state_format={"exp_avg": Offset()})
    with pytest.raises(TypeError, match=r"give a name .* a pagedopt.formats.Format"):
        PagedAdamW(parameters("cpu"), state_format=Int8Blocks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no complex numbers of that kind"):
        PagedAdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))], state_format=INT8)
    saved = io.BytesIO()
    torch.save(run("cpu", PagedAdamW)[1].state_dict(), saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True)["state"][0]["exp_avg.codes"].dtype is torch.int8
