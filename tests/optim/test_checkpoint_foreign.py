"""State dicts of torch and bitsandbytes: files that they wrote, and dicts that go back and forth.

The files in ``tests/helpers/data`` hold the schemas.  This file as a program, with ``tests/helpers`` in PYTHONPATH and
perhaps the name of a library, writes them anew, that of bitsandbytes where it is installed; it was done with the
versions that stand in them, on a CPU.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_support import ADAMW, bits, distance, same, trained
from paths import DATA
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from pagedopt import PagedAdamW, PagedSGD

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}
FLAGS = {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def record(make: Make) -> dict[str, Any]:
    """Three steps, the state dict after them, and two steps more."""
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (4,))]
    grads = [[torch.randn_like(p).detach() for p in params] for _ in range(5)]
    opt = make(params)
    go_on(params, opt, grads[:3])
    kept = {"params": [p.detach().clone() for p in params], "state_dict": copy.deepcopy(opt.state_dict())}
    go_on(params, opt, grads[3:])
    return {**kept, "grads": grads[3:], "after": [p.detach() for p in params]}


def write_torch() -> None:
    makes: dict[str, Make] = {
        "adamw": lambda p: torch.optim.AdamW(p, **ADAMW),
        "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, **ADAMW),
        "fused": lambda p: torch.optim.AdamW(p, fused=True, **ADAMW),
        "sgd": lambda p: torch.optim.SGD(p, **SGD),
    }
    torch.save({"version": str(torch.__version__), **{k: record(m) for k, m in makes.items()}}, DATA / "torch.pt")


def write_bitsandbytes() -> None:
    import bitsandbytes as bnb

    makes: dict[str, Make] = {
        "paged": lambda p: bnb.optim.PagedAdamW32bit(p, **ADAMW),
        "8 bit": lambda p: bnb.optim.AdamW8bit(p, min_8bit_size=1, **ADAMW),
        "lion": lambda p: bnb.optim.Lion32bit(p, lr=0.01),
    }
    torch.save({"version": bnb.__version__, **{k: record(m) for k, m in makes.items()}}, DATA / "bitsandbytes.pt")


def read(library: str, case: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(DATA / f"{library}.pt", weights_only=True)[case]
    return found


def go_on(params: list[torch.nn.Parameter], opt: torch.optim.Optimizer, grads: list[list[torch.Tensor]]) -> None:
    for given in grads:
        for p, g in zip(params, given, strict=True):
            p.grad = g.clone()
        opt.step()


@pytest.mark.parametrize("case", ["adamw", "amsgrad", "fused", "sgd"])
@pytest.mark.parametrize("count", [None, int, lambda step: step.reshape(1)], ids=["new", "old", "one element"])
def test_a_file_of_torch_is_read_to_the_bit_and_continued(case: str, count: Any) -> None:
    found = read("torch", case)
    state_dict = copy.deepcopy(found["state_dict"])
    if count is not None:  # as of torch 1.11: the step is a number, and there are no flags
        for entry in state_dict["state"].values():
            entry.update({"step": count(entry["step"])} if "step" in entry else {})
        old = FLAGS - {"amsgrad"} | {"nesterov"} if case != "sgd" else FLAGS | {"nesterov"}
        state_dict["param_groups"] = [{k: v for k, v in g.items() if k not in old} for g in state_dict["param_groups"]]
    params = [torch.nn.Parameter(p) for p in found["params"]]
    opt: torch.optim.Optimizer = PagedSGD(params) if case == "sgd" else PagedAdamW(params)
    opt.load_state_dict(state_dict)
    for i, p in enumerate(params):
        assert list(opt.state[p]) == list(found["state_dict"]["state"][i])
        torch.testing.assert_close(opt.state[p], found["state_dict"]["state"][i], rtol=0, atol=0)
        assert all(t.device.type == "cpu" and t.dtype == torch.float32 for t in opt.state[p].values())
    go_on(params, opt, found["grads"])
    assert distance(params, found["after"]) < 1e-6


@pytest.mark.parametrize("age", ["new", "old"])
def test_a_file_of_bitsandbytes_is_read_to_the_bit_and_continued(age: str) -> None:
    found = read("bitsandbytes", "paged")
    state_dict = copy.deepcopy(found["state_dict"])
    inner = {key: entry["__bnb_optimizer_quant_state__"] for key, entry in state_dict["state"].items()}
    if age == "old":  # before the tensors were wrapped; with the workspaces of its clipping
        for key, entry in state_dict["state"].items():
            del entry["__bnb_optimizer_quant_state__"]
            entry.update(inner[key], unorm_vec=torch.ones(1), gnorm_vec=torch.ones(100))
    before = repr(state_dict)
    params = [torch.nn.Parameter(p) for p in found["params"]]
    opt = PagedAdamW(params, amsgrad=True)
    opt.load_state_dict(state_dict)
    assert repr(state_dict) == before, "the dict belongs to the caller"
    for i, p in enumerate(params):
        assert list(opt.state[p]) == ["step", "exp_avg", "exp_avg_sq"]
        assert same(opt.state[p].values(), [torch.tensor(3.0), inner[i]["state1"], inner[i]["state2"]])
    theirs = torch.optim.AdamW([torch.nn.Parameter(p) for p in found["params"]])
    assert opt.param_groups[0].keys() == theirs.param_groups[0].keys()
    assert opt.param_groups[0]["betas"] == ADAMW["betas"]
    go_on(params, opt, found["grads"])
    assert distance(params, found["after"]) < 1e-6
    theirs.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "8 bit",
            r"parameter 0 is that of an 8-bit optimizer of bitsandbytes.* qmap1\[state1.long\(\)\] times absmax1",
        ),
        ("lion", "parameter 0 is that of an optimizer of bitsandbytes with one moment"),
    ],
)
def test_other_state_of_bitsandbytes_is_refused(case: str, message: str) -> None:
    found = read("bitsandbytes", case)
    opt = PagedAdamW([torch.nn.Parameter(p) for p in found["params"]])
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(found["state_dict"])
    assert not opt.state
    assert opt.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("state_format", ["float32", "int8"])
def test_what_is_expanded_as_the_refusal_says_is_read_and_continued(state_format: Any) -> None:
    found = read("bitsandbytes", "8 bit")
    state_dict, state = copy.deepcopy(found["state_dict"]), {}
    for key, entry in state_dict["state"].items():
        codes, moments = entry["__bnb_optimizer_quant_state__"], {}
        for name, index in (("exp_avg", 1), ("exp_avg_sq", 2)):
            values = codes[f"qmap{index}"][codes[f"state{index}"].long()]
            moments[name] = values * codes[f"absmax{index}"].repeat_interleave(256)[: values.numel()].view_as(values)
        state[key] = {"step": entry["step"], **moments}
    params = [torch.nn.Parameter(p) for p in found["params"]]
    opt = PagedAdamW(params, state_format=state_format)
    opt.load_state_dict({**state_dict, "state": state})
    before = distance(params, found["after"])
    go_on(params, opt, found["grads"])
    assert distance(params, found["after"]) < before / 4  # they are rounded to 8 bits in these steps, too


def test_state_of_torchao_in_8_bits_is_refused_until_it_is_expanded() -> None:
    theirs = pytest.importorskip("torchao.optim")
    net = torch.nn.Linear(64, 64)
    rival = theirs.AdamW8bit(net.parameters())
    net(torch.ones(2, 64)).square().sum().backward()
    rival.step()
    saved = rival.state_dict()
    opt = PagedAdamW(net.parameters(), state_format="int8")
    with pytest.raises(
        ValueError, match=r"exp_avg of parameter 0 is torchao's OptimState8bit.*= exp_avg.dequantize\(\)$"
    ):
        opt.load_state_dict(saved)
    assert not opt.state
    expanded = {
        key: {n: v.dequantize() if hasattr(v, "block_size") else v for n, v in entry.items()}
        for key, entry in saved["state"].items()
    }
    opt.load_state_dict({**saved, "state": expanded})
    loaded, theirs_expanded = opt.decoded_state_dict()["state"][0]["exp_avg"], expanded[0]["exp_avg"]
    assert distance([loaded], [theirs_expanded]) < 0.01  # less than a step between codes
    opt.step()


def test_state_of_a_class_of_torchao_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, where torchao is not installed."""

    class OptimState4bit(torch.Tensor):
        pass

    monkeypatch.setattr(OptimState4bit, "__module__", "torchao.optim.subclass_4bit")
    net, ours = trained(3)
    saved = copy.deepcopy(ours.state_dict())
    saved["state"][1]["exp_avg_sq"] = saved["state"][1]["exp_avg_sq"].as_subclass(OptimState4bit)
    before = bits(net.parameters(), ours)
    with pytest.raises(ValueError, match=r"exp_avg_sq of parameter 1 is torchao's OptimState4bit, which is not read"):
        ours.load_state_dict(saved)
    assert same(bits(net.parameters(), ours), before)


def test_through_torch_s_distributed_checkpoints() -> None:
    net, opt = trained(3)
    saved = copy.deepcopy(get_optimizer_state_dict(net, opt))
    again = PagedAdamW(net.parameters(), lr=1.0)
    params = [p.detach().clone() for p in net.parameters()]
    set_optimizer_state_dict(net, again, saved)
    assert same(params, net.parameters())
    assert same(bits(params, again), bits(params, opt))
    assert again.param_groups[0]["lr"] == ADAMW["lr"]


if __name__ == "__main__":
    write_bitsandbytes() if "bitsandbytes" in sys.argv else write_torch()
