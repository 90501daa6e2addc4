"""What an optimizer does for a format of blocks: its seed, whole blocks in pages, conversion a stretch at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from formats_under_test import WhereItStands
from optim_support import stepped

from pagedopt import PagedAdamW
from pagedopt.optim import columns as encoding
from tests.outside.format import Int8Blocks

FORM = Int8Blocks()
pytestmark = pytest.mark.usefixtures("folder")


def test_the_seed_is_each_parameter_s_step_and_goes_on_with_a_checkpoint() -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (70, 3, 130)]
    formats: dict[str, Any] = {"exp_avg": WhereItStands()}

    def step(opt: PagedAdamW, absent: int) -> None:
        for i, p in enumerate(params):
            p.grad = None if i == absent else torch.ones_like(p)
        opt.step()

    opt = PagedAdamW(params, state_format=formats)
    for absent in (1, 2, 1):
        step(opt, absent)
    other = PagedAdamW(params, state_format=formats)
    other.load_state_dict(opt.state_dict())
    for taken, each in ((opt, (3, 1, 2)), (other, (4, 2, 3))):
        if taken is other:
            step(other, -1)
        for i, (p, count) in enumerate(zip(params, each, strict=True)):
            assert float(taken.state[p]["step"]) == count
            assert taken.state[p]["exp_avg.drawn"].tolist() == [count] * p.numel()
            assert taken.state[p]["exp_avg.number"].tolist() == list(range(p.numel()))
            assert taken.state[p]["exp_avg.parameter"].unique().numel() == 1, i


def test_pages_are_cut_on_blocks() -> None:
    _, opt = stepped(1000, state_format=FORM, device_budget=0)
    assert [arena.layout.block for arena in opt.store.arenas] == [FORM.block]


@pytest.mark.parametrize("numel", [64, 1000, 64 * 9])
def test_what_is_converted_in_stretches_is_as_if_converted_at_once(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.randn(4, numel // 4).t()
    values = torch.randn(p.shape)
    store = PagedAdamW([torch.nn.Parameter(torch.ones(1))]).store

    def columns() -> list[torch.Tensor]:
        return [c.like(p) if c.per == 1 else torch.empty(c.shape(p)) for c in FORM.columns]

    results = []
    for stretch in (1 << 20, 128):
        monkeypatch.setattr(encoding, "STRETCH", stretch)
        made = [torch.zeros_like(t, dtype=c.dtype) for t, c in zip(columns(), FORM.columns, strict=True)]
        encoding.encode(FORM, made, values, p, store)
        results.append([*made, encoding.decode(FORM, made, p)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch.testing.assert_close(results[0][-1], values, rtol=0, atol=float(values.abs().max()) / 250)


def test_state_of_another_dtype_keeps_it_when_it_comes_home_and_in_copies() -> None:
    p = torch.nn.Parameter(torch.ones(1000))
    p.grad = torch.rand(1000)
    opt = PagedAdamW([p], device_budget=0)
    opt.step()
    opt.state[p]["exp_avg_sq"] = opt.state[p]["exp_avg_sq"].double()
    want = {name: value.clone() for name, value in opt.state[p].items()}
    opt.set_device_budget("1MiB")
    copied = copy.deepcopy(opt)
    (twin,) = copied.param_groups[0]["params"]
    for state, store in ((opt.state[p], opt.store), (copied.state[twin], copied.store)):
        assert not any(store.is_outside_arenas(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        assert all(state[name].dtype is value.dtype and torch.equal(state[name], value) for name, value in want.items())
