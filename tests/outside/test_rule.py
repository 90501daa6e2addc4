"""A rule from outside: the numbers of a reference in float64, in every place, saved, resumed and copied."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from optim_support import through_file

from .rule import Tempered
from .training import EVERYWHERE, OPTIONS, PLACES, bits, gpu, gradient, optimizer, parameters, same, train, trained


def reference(device: str, steps: int) -> list[tuple[torch.Tensor, torch.Tensor, float, int]]:
    """(parameter, scale, start, step) of each parameter, in float64."""
    found = []
    for number, p in enumerate(parameters(device)):
        value, scale = p.detach().double(), torch.ones_like(p, dtype=torch.float64)
        start, count = 1.0, 0
        for step in range(steps):
            if (grad := gradient(p, step, number)) is None:
                continue
            count += 1
            grad, rate = grad.double(), OPTIONS["decay"] * (1 - 0.5**count)
            start *= rate
            scale = rate * scale + (1 - rate) * grad.square()
            lr = 0.01 if number == 0 else OPTIONS["lr"]
            value = value - lr * (1 - start) * grad / (scale.sqrt() + OPTIONS["eps"])
        found.append((value, scale, start, count))
    return found


@pytest.mark.parametrize(("device", "how"), EVERYWHERE)
def test_the_numbers_are_those_of_the_reference(device: str, how: dict[str, Any]) -> None:
    opt, params = trained(10, device, **how)
    expected = reference(device, 10)
    for p, began, (value, scale, start, count) in zip(params, parameters(device), expected, strict=True):
        torch.testing.assert_close(p.detach().double(), value, rtol=2e-6, atol=2e-6)
        assert (value - began.double()).abs().mean() > 0.01, "hardly anything was updated"
        entry = opt.state[p]
        assert list(entry) == ["step", "start", "scale"]
        torch.testing.assert_close(entry["scale"].double(), scale, rtol=2e-6, atol=0)
        assert (float(entry["step"]), entry["start"].shape) == (count, ())
        assert float(entry["start"]) == pytest.approx(start, rel=1e-6)
    assert len({start for *_, start, _ in expected}) > 1, "all parameters have one number"


@pytest.mark.parametrize(("device", "how"), EVERYWHERE)
def test_no_place_changes_a_bit(device: str, how: dict[str, Any]) -> None:
    opt, params = trained(6, device, **how)
    whole, others = trained(6, device)
    assert same(bits(opt, params), bits(whole, others))
    if "device_budget" in how:
        report = opt.memory_report()
        assert report.by_place["file" if device == "cpu" else "host"] > 0
        near = report.by_place.get("host" if device == "cpu" else "device", 0)
        assert (near > 0) == (how["device_budget"] != 0)


def test_what_was_saved_goes_on_in_a_new_process(tmp_path: Path) -> None:
    """A checkpoint, in every place; and whole optimizers, whose classes are found by name."""
    pickled = [trained(6, **how) for how in PLACES]
    opt, params = pickled[-1]
    torch.save(pickled, tmp_path / "pickled.pt")
    torch.save({"params": [p.detach() for p in params], "optimizer": opt.state_dict()}, tmp_path / "checkpoint.pt")
    python("-m", f"{__package__}.training", tmp_path)
    whole, others = trained(10)
    found = torch.load(tmp_path / "found.pt")
    assert [name for name, _ in found] == ["device", "file", "file", "small", "ordinary"] * 2
    assert all(same(each, bits(whole, others)) for _, each in found)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": functools.partial(through_file, weights_only=False),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(("device", "how"), EVERYWHERE)
def test_a_copy_goes_on_by_itself_and_where_it_was(device: str, how: dict[str, Any], copied: Any) -> None:
    opt, params = trained(4, device, **how)
    twin, others = copied((opt, params))
    assert type(twin) is Tempered
    there, here = twin.memory_report(), opt.memory_report()
    assert (there.by_place, there.placement, there.budget) == (here.by_place, here.placement, here.budget)
    train(opt, params, 4, 7)
    train(twin, others, 4, 7)
    assert same(bits(opt, params), bits(twin, others))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_begin_at_one_too(dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    opt = optimizer(params, device_budget="40%")
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert all(torch.equal(opt.state[p]["scale"], torch.full_like(p, 0.4)) for p in params)
    assert all(float(opt.state[p]["start"]) == pytest.approx(0.4) for p in params)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=gpu)])
def test_the_cpu_and_the_card_agree(mark: None) -> None:
    params = parameters("cuda")
    others = [torch.nn.Parameter(p.detach().cpu()) for p in params]
    opt, other = optimizer(params, device_budget="50%"), optimizer(others)
    train(opt, params, 0, 6)
    train(other, others, 0, 6)
    for a, b in zip(bits(opt, params), bits(other, others), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
