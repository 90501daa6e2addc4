"""Loaded values arrive whatever their layout and dtype, where the state is and as it is stored, block by block."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from file_support import mapping_rss
from optim_support import ADAMW, step_on_ones, train, trained

from pagedopt import PagedAdamW
from pagedopt.optim import load
from pagedopt.placements.store import find
from tests.world import parameters, steps

SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as the parameter": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "columns first": lambda t: t.permute(list(range(t.dim()))[::-1]).contiguous().permute(list(range(t.dim()))[::-1]),
    "with gaps": lambda t: torch.stack([t, t], -1)[..., 1],
    "narrower": lambda t: t.bfloat16(),
    "expanded": lambda t: torch.ones(()).expand(t.shape),
    "a leaf of a graph": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("chunk", [64, 16 << 20])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_arrive_whatever_the_layout_in_blocks_of_a_chunk(
    layout: torch.memory_format, source: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "STAGING_BYTES", chunk)
    shapes = [(4, 3, 2, 5), (3, 1, 40, 1), (0, 2, 2, 2)]
    params = [torch.nn.Parameter(torch.randn(s).to(memory_format=layout)) for s in shapes]
    params += [torch.nn.Parameter(torch.randn(s)) for s in ((), (1,), (200,), (2, 100))]
    state = {
        i: {"step": 4, **{name: SOURCES[source](torch.randn_like(p).detach()) for name in ("exp_avg", "exp_avg_sq")}}
        for i, p in enumerate(params)
    }
    opt = PagedAdamW(params)
    blocks: list[torch.Tensor] = []
    copy_block = load._copy
    monkeypatch.setattr(load, "_copy", lambda block, *rest: blocks.append(block) or copy_block(block, *rest))
    opt.load_state_dict({**opt.state_dict(), "state": state})
    for i, p in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][name], state[i][name].float())
            assert opt.state[p][name].stride() == p.stride() or not p.numel()
    assert all(b.is_contiguous() and b.nbytes <= chunk for b in blocks)
    assert sum(b.numel() for b in blocks) == 2 * sum(p.numel() for p in params)


def test_state_is_rounded_to_a_parameter_s_16_bits_as_torch_has_it_unless_a_format_keeps_it() -> None:
    net, saved = trained(2, dtype=torch.bfloat16, state_format="float32")
    state_dict = copy.deepcopy(saved.state_dict())
    theirs = torch.optim.AdamW(net.parameters())
    theirs.load_state_dict(copy.deepcopy(state_dict))
    names, first = ("exp_avg", "exp_avg_sq"), {"exp_avg": "float32"}
    for state_format, keeps in (("float32", names), (first, ("exp_avg",)), (None, ())):
        opt = PagedAdamW(net.parameters(), state_format=state_format, **ADAMW)  # type: ignore[arg-type]
        opt.load_state_dict(state_dict)
        for p, name in itertools.product(net.parameters(), names):
            value, exact = opt.state[p][name], saved.state[p][name]
            assert value.dtype == (torch.float32 if name in keeps else torch.bfloat16)
            assert torch.equal(value, exact if name in keeps else theirs.state[p][name])
            assert name in keeps or not torch.equal(value.float(), exact)


def test_loading_keeps_memory_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 256 << 10
    monkeypatch.setattr(load, "STAGING_BYTES", chunk)
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (300_000, 7, 200_000)]
    values = {name: [torch.randn_like(p).detach() for p in params] for name in ("exp_avg", "exp_avg_sq")}
    state = {i: {"step": 1, **{name: v[i] for name, v in values.items()}} for i in range(3)}
    opt = PagedAdamW(params, placement="file", device_budget=0)
    in_memory: list[int] = []
    copy_block = load._copy

    def watched(*given: Any) -> None:
        copy_block(*given)
        in_memory.extend(mapping_rss(a.tensor.data_ptr(), a.tensor.nbytes) for a in opt.store.arenas)

    monkeypatch.setattr(load, "_copy", watched)
    opt.load_state_dict({**opt.state_dict(), "state": state})
    assert chunk // 2 < max(in_memory) <= 3 * chunk
    assert opt.memory_report().measured.get("host", 0) == 0
    assert all(torch.equal(opt.state[p][name], values[name][i]) for i, p in enumerate(params) for name in values)


def test_state_that_no_longer_fits_its_parameter_is_made_anew() -> None:
    image = torch.ones(4, 3, 2, 2)
    for before, data in ((torch.ones(12), torch.ones(9)), (image, image.to(memory_format=torch.channels_last))):
        p = torch.nn.Parameter(before)
        opt = PagedAdamW([p])
        step_on_ones(opt)
        p.data = data
        state = {0: {"step": 1, "exp_avg": torch.rand_like(data), "exp_avg_sq": torch.rand_like(data)}}
        opt.load_state_dict({**opt.state_dict(), "state": state})
        assert opt.state[p]["exp_avg"].stride() == data.stride()
        assert torch.equal(opt.state[p]["exp_avg"], state[0]["exp_avg"])
        step_on_ones(opt)


@pytest.mark.parametrize("options", [{}, {"placement": "file", "device_budget": "50%"}], ids=["resident", "file"])
@pytest.mark.parametrize("state_format", [None, "float32"])
def test_what_is_loaded_after_its_parameter_was_cast_is_stored_as_that_is_now_and_goes_on(
    state_format: str | None, options: dict[str, Any]
) -> None:
    net, opt = trained(2, state_format=state_format, **options)
    saved = copy.deepcopy(opt.state_dict())
    net.bfloat16()
    p = next(net.parameters())
    address = opt.state[p]["exp_avg"].data_ptr()
    opt.load_state_dict(saved)
    kept = torch.bfloat16 if state_format is None else torch.float32
    assert opt.state[p]["exp_avg"].dtype == kept
    assert torch.equal(opt.state[p]["exp_avg"], saved["state"][0]["exp_avg"].to(kept))
    assert (opt.state[p]["exp_avg"].data_ptr() == address) == (kept is torch.float32)
    before = [q.detach().clone() for q in net.parameters()]
    train(net, opt, 1)
    assert not any(torch.equal(q, b) for q, b in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("how", ["load", "budget"])
@pytest.mark.parametrize("names", [("exp_avg_sq",), ("exp_avg", "exp_avg_sq")], ids=str)
def test_state_that_was_put_apart_comes_together_and_what_it_left_is_gone(names: tuple[str, ...], how: str) -> None:
    params = [torch.nn.Parameter(torch.rand(50_000)) for _ in range(2)]
    opt = PagedAdamW(params, placement="file", device_budget="50%", **ADAMW)
    for p in params:
        p.grad = torch.rand_like(p)
    opt.step()
    for entry in opt.state.values():
        entry.update({name: entry[name].clone() for name in names})
    saved = copy.deepcopy(opt.state_dict())
    if how == "load":
        opt.load_state_dict(saved)
    else:
        opt.set_device_budget("50%")
    assert len(opt.store.arenas) == 1
    for i, p in enumerate(params):
        state = [opt.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
        assert find(opt.store.arenas, state) == (0, i), "its pages are whole"
        assert all(torch.equal(opt.state[p][name], saved["state"][i][name]) for name in ("exp_avg", "exp_avg_sq"))


def test_a_parameter_with_gaps_takes_what_is_loaded() -> None:
    p = torch.nn.Parameter(torch.ones(4, 6)[:, ::2])
    opt = PagedAdamW([p])
    state = {0: {"step": 1, "exp_avg": torch.arange(12.0).view(4, 3), "exp_avg_sq": torch.ones(4, 3)}}
    opt.load_state_dict({**opt.state_dict(), "state": state})
    assert torch.equal(opt.state[p]["exp_avg"], state[0]["exp_avg"])


def test_a_file_holds_little_more_than_the_state() -> None:
    params = parameters()
    opt = PagedAdamW(params, placement="file", device_budget=0)
    steps(opt, params, 1)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    assert file.tell() <= 2 * sum(p.nbytes for p in params) + 2 * (64 << 10) + 8192  # a granule for each moment
