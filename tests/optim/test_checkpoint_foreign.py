"""State dicts of torch and bitsandbytes: files that they wrote, and dicts that go back and forth.

The files in ``tests/helpers/data`` hold the schemas of the versions that stand in them, and are not written anew: three
steps, the state dict behind them, and two steps more.  The history has what wrote them (``git log -S write_torch``,
``git log -- tests/optim/write_golden.py``).
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
from typing import Any

import pytest
import torch
from gpu_support import NEEDED
from optim_support import ADAMW, bits, distance, same, step_on_ones, trained
from paths import DATA
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import pagedopt
from pagedopt import PagedAdamW, PagedSGD


def read(library: str, case: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(DATA / f"{library}.pt", weights_only=True)[case]
    return found


def go_on(params: list[torch.nn.Parameter], opt: torch.optim.Optimizer, grads: list[list[torch.Tensor]]) -> None:
    for given in grads:
        for p, g in zip(params, given, strict=True):
            p.grad = g.clone()
        opt.step()


@pytest.mark.parametrize("case", ["adamw", "amsgrad", "fused", "sgd"])
def test_a_file_of_torch_is_read_to_the_bit_and_continued(case: str) -> None:
    found = read("torch", case)
    params = [torch.nn.Parameter(p) for p in found["params"]]
    opt: torch.optim.Optimizer = PagedSGD(params) if case == "sgd" else PagedAdamW(params)
    opt.load_state_dict(copy.deepcopy(found["state_dict"]))
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


# --- checkpoints that must load for ever: written by pagedopt at 5d310f2 on a CPU and on a GPU ------------------------


FILES = {device: DATA / f"pagedopt-5d310f2-{device}.pt" for device in ("cpu", "cuda")}
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "resident": {},
        "host": {"placement": "host"},
        "file": {"placement": "file", "device_budget": 0},
        "half in a file": {"placement": "file", "device_budget": "50%"},
    },
    "cuda": {
        "resident": {},
        "host": {"placement": "host"},
        "staged": {"placement": "mapped", "device_budget": 0, "host_access": "staged"},
        "half staged": {"placement": "mapped", "device_budget": "50%", "host_access": "staged"},
        "half in place": {"placement": "mapped", "device_budget": "50%", "host_access": "in_place"},
        "half managed": {"placement": "managed", "device_budget": "50%"},
        "managed by the driver": {"placement": "managed-driver"},
    },
}
#: Of the largest magnitude: what another order of operations may change in a few steps.  The files were written with
#: others than today's, in which these steps end at most 1.1 * 2**-23 away.
TOLERANCE = {torch.float32: 4 * 2**-23, torch.bfloat16: 2**-7}

CASES = [
    pytest.param(written, device, place, marks=NEEDED if device == "cuda" else [], id=f"{written}-{device}-{place}")
    for written in FILES
    for device in PLACES
    for place in PLACES[device]
]


@functools.cache
def read_file(written: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(FILES[written], weights_only=True, map_location="cpu")
    return found["cases"]


def opened(case: dict[str, Any], device: str, options: dict[str, Any]) -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters and an optimizer of today, of other hyperparameters, before loading."""
    params = [torch.nn.Parameter(p.to(device, copy=True)) for p in case["params"]]
    groups = [{"params": params[:2], "lr": 1.0}, {"params": params[2:]}]
    optimizer = getattr(pagedopt, case["class"])(groups, state_format=case["state_format"], **options)
    return params, optimizer


@pytest.mark.parametrize(("written", "device", "place"), CASES)
def test_a_checkpoint_of_old_loads_to_the_bit_and_goes_on(written: str, device: str, place: str) -> None:
    for name, case in read_file(written).items():
        params, optimizer = opened(case, device, PLACES[device][place])
        optimizer.load_state_dict(copy.deepcopy(case["state_dict"]))
        assert_holds(name, params, optimizer, case["state_dict"])
        for _ in range(case["steps"]):
            for p, grad in zip(params, case["grads"], strict=True):
                p.grad = grad.to(device, copy=True)
            optimizer.step()
        for p, want in zip(params, case["after"], strict=True):
            far = (p.detach().cpu().double() - want.double()).abs().max()
            bound = TOLERANCE[want.dtype]
            if case["state_format"] == "bfloat16":  # a rounding of it is 2^-8, and a step takes lr of that
                bound += 2**-8 * case["state_dict"]["param_groups"][0]["lr"]
            assert far <= bound * float(want.double().abs().max()), (name, float(far))


def assert_holds(name: str, params: list[torch.nn.Parameter], optimizer: Any, saved: dict[str, Any]) -> None:
    for i, p in enumerate(params):
        entry, want = optimizer.state.get(p, {}), saved["state"].get(i, {})
        assert list(entry) == list(want), name
        torch.testing.assert_close(entry, want, rtol=0, atol=0, check_device=False, msg=lambda text: f"{name}: {text}")
    for group, want in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        assert all(group[key] == value for key, value in want.items() if key != "params"), name


# --- optimizers that were pickled before their modules were moved (commit ba8c2db), and what pickles of today name ----


#: By class: the pickle of an optimizer after three steps, and its parameter after one more with gradients of one.
PICKLES = DATA / "optimizers-ba8c2db.pickle"


@pytest.mark.parametrize("name", ["PagedAdamW", "PagedSGD", "PagedLion"])
def test_an_optimizer_that_was_pickled_then_goes_on(name: str) -> None:
    pickled, after = pickle.loads(PICKLES.read_bytes())[name]
    optimizer = pickle.loads(pickled)
    assert type(optimizer) is getattr(pagedopt, name)
    (p,) = optimizer.param_groups[0]["params"]
    step_on_ones(optimizer)
    torch.testing.assert_close(p, torch.tensor(after), rtol=2**-22, atol=0)  # rounded once today, twice then


#: What pickles of optimizers and of attached models name, which has to stay where it is.
NAMED = {
    "pagedopt.optim.adamw PagedAdamW",
    "pagedopt.optim.sgd PagedSGD",
    "pagedopt.optim.lion PagedLion",
    *(
        f"pagedopt.optim.overlap.hooks {name}"
        for name in ("Begin", "Enter", "Leave", "Raised", "Fence", "Load", "Compiled")
    ),
}


class Noting(pickle.Unpickler):
    """Notes what of the package a pickle names."""

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        self.named: set[str] = set()

    def find_class(self, module: str, name: str) -> object:
        if module.partition(".")[0] == "pagedopt":
            self.named.add(f"{module} {name}")
        return super().find_class(module, name)


@pytest.mark.parametrize("overlap", [None, "forward", "backward"])
@pytest.mark.parametrize("name", ["PagedAdamW", "PagedSGD", "PagedLion"])
def test_pickles_name_only_what_stays_where_it_is(name: str, overlap: str | None) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = getattr(pagedopt, name)(model.parameters(), device_budget=0)
    if overlap is not None:
        optimizer.attach(model, overlap=overlap)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for one in (optimizer, model):
        noting = Noting(pickle.dumps(one))
        noting.load()
        assert noting.named <= NAMED
        assert noting.named or one is model
    for module, what in map(str.split, NAMED):
        assert hasattr(importlib.import_module(module), what)
