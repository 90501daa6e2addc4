"""Checkpoints of PagedAdamW: torch's state dict both ways, and a continuation to the same bits."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from optim_support import ADAMW, distance, model, train

from pagedopt import PagedAdamW


@pytest.mark.parametrize("save", ["torch", "pickle", "deepcopy"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_saved_optimizer_continues_to_the_same_bits(save: str, amsgrad: bool) -> None:
    nets = model(), model()
    whole = PagedAdamW(nets[0].parameters(), amsgrad=amsgrad, **ADAMW)
    train(nets[0], whole, 10)
    first = PagedAdamW(nets[1].parameters(), amsgrad=amsgrad, **ADAMW)
    train(nets[1], first, 5)
    state = first.state_dict()
    if save == "torch":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    elif save == "pickle":
        state = pickle.loads(pickle.dumps(state))
    else:
        state = copy.deepcopy(state)
    second = PagedAdamW(nets[1].parameters(), amsgrad=amsgrad, **ADAMW)
    second.load_state_dict(state)
    train(nets[1], second, 5, first=5)
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize("from_ours", [True, False])
def test_state_moves_between_torch_and_us_in_mid_training(from_ours: bool) -> None:
    classes = (PagedAdamW, torch.optim.AdamW) if from_ours else (torch.optim.AdamW, PagedAdamW)
    nets = model(), model()
    whole, half = classes[1](nets[0].parameters(), **ADAMW), classes[0](nets[1].parameters(), **ADAMW)
    train(nets[0], whole, 10)
    train(nets[1], half, 5)
    other = classes[1](nets[1].parameters(), **ADAMW)
    other.load_state_dict(copy.deepcopy(half.state_dict()))
    train(nets[1], other, 5, first=5)
    assert distance(list(nets[1].parameters()), list(nets[0].parameters())) < 2e-6


def test_loading_copies_into_existing_state_and_keeps_its_format() -> None:
    net = model(dtype=torch.bfloat16)
    opt = PagedAdamW(net.parameters(), state_format="float32")
    train(net, opt, 2)
    saved = copy.deepcopy(opt.state_dict())
    train(net, opt, 2, first=2)
    p = next(net.parameters())
    address = opt.state[p]["exp_avg"].data_ptr()
    opt.load_state_dict(saved)
    assert opt.state[p]["exp_avg"].data_ptr() == address
    assert opt.state[p]["exp_avg"].dtype is torch.float32
    assert torch.equal(opt.state[p]["exp_avg"], saved["state"][0]["exp_avg"])
    assert float(opt.state[p]["step"]) == 2


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    net = model()
    opt = PagedAdamW(net.parameters())
    train(net, opt, 2)
    before = copy.deepcopy(opt.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][2]["exp_avg"] = torch.zeros(7)
    wrong["param_groups"][0]["lr"] = 99.0
    with pytest.raises(ValueError, match=r"exp_avg of parameter 2 is \(7,\)"):
        opt.load_state_dict(wrong)
    after = opt.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in
               zip(after["state"].values(), before["state"].values(), strict=True))  # fmt: skip


def test_hooks_of_others_see_and_may_change_what_is_loaded() -> None:
    net = model()
    opt = PagedAdamW(net.parameters())
    train(net, opt, 1)
    seen = []

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        changed["state"][0]["exp_avg"] *= 2
        return changed

    opt.register_load_state_dict_pre_hook(double)
    opt.register_load_state_dict_post_hook(lambda o: seen.append(o.state[next(net.parameters())]["exp_avg"].clone()))
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(saved)
    assert torch.equal(seen[0], 2 * saved["state"][0]["exp_avg"])


def test_a_deep_copy_of_the_optimizer_keeps_its_options() -> None:
    net = model(dtype=torch.bfloat16)
    opt = PagedAdamW(net.parameters(), state_format={"exp_avg": "bfloat16", "exp_avg_sq": "float32"})
    train(net, opt, 1)
    net2, opt2 = copy.deepcopy((net, opt))
    train(net, opt, 3, first=1)
    train(net2, opt2, 3, first=1)
    state = opt2.state[next(net2.parameters())]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), net2.parameters(), strict=True))
