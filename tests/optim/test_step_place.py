"""Step counts lie where torch has them, in its dtype, and those on a device cost no waiting."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_support import DEVICES, NEEDED
from optim_support import model, same, step_on_ones, train
from support import default_dtype

from pagedopt import PagedAdamW

FLAGS = [{}, {"fused": True}, {"capturable": True}, {"fused": True, "capturable": True}]
ON_DEVICE = [pytest.param(flags, marks=NEEDED, id=str(flags)) for flags in FLAGS[1:3]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_counts_lie_where_torch_has_them(flags: dict[str, bool], wide: bool, device: str) -> None:
    seen = []
    with default_dtype(torch.float64 if wide else torch.float32):
        for kind in (torch.optim.AdamW, PagedAdamW):
            net = model(device)
            opt: Any = kind(net.parameters(), **flags)
            try:
                train(net, opt, 2)
            except AssertionError:
                seen.append(["refused"])
                continue
            fresh = kind(net.parameters())
            fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
            steps = [each.state[p]["step"] for each in (opt, fresh) for p in net.parameters()]
            seen.append([(t.device.type, t.dtype, tuple(t.shape), float(t)) for t in steps])
    assert seen[0] == seen[1]
    assert (seen[0] == ["refused"]) == (flags == {"capturable": True} and device == "cpu")


def test_a_refusal_of_capturable_waits_for_a_gradient_as_torch_does() -> None:
    for kind in (torch.optim.AdamW, PagedAdamW):
        p = torch.nn.Parameter(torch.ones(3))
        opt = kind([p], capturable=True)  # type: ignore[arg-type]
        opt.step()
        p.grad = torch.ones(3)
        with pytest.raises(AssertionError):
            opt.step()
        assert torch.equal(p, torch.ones(3))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """``torch.distributed`` with a process that is a group of its own."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


@pytest.mark.parametrize("by", ["a collective", ".data"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_counts_that_others_have_written_are_followed(flags: dict[str, bool], device: str, by: str, alone: Any) -> None:
    """No version counter tells of these writes.  With one process, gloo's scatter writes what a broadcast would."""
    if flags == {"capturable": True} and device == "cpu":
        pytest.skip("refused, as in torch")
    ends = []
    for kind in (torch.optim.AdamW, PagedAdamW):
        net = model(device)
        opt: Any = kind(net.parameters(), **flags)
        train(net, opt, 2)
        for p in net.parameters():
            count = opt.state[p]["step"]
            before = count._version
            if by == ".data" or count.is_cuda:
                count.data.fill_(100)
            else:
                alone.scatter(count, [torch.tensor(100.0)])
            assert (count.item(), count._version) == (100, before)
        train(net, opt, 2, first=2)
        ends.append([*net.parameters(), *(opt.state[p]["step"] for p in net.parameters())])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"placement": "mapped", "device_budget": "50%"}], ids=["resident", "staged"])
@pytest.mark.parametrize("flags", ON_DEVICE)
def test_a_count_on_a_device_is_followed_when_it_is_edited_and_not_waited_for(
    flags: dict[str, bool], options: dict[str, Any]
) -> None:
    nets, opts = [], []
    for kind, how in ((torch.optim.AdamW, flags), (PagedAdamW, {**flags, **options})):
        net = model("cuda")
        nets.append(net)
        opts.append(kind(net.parameters(), **how))  # type: ignore[arg-type]
        train(net, opts[-1], 2)
    ours = list(nets[1].parameters())
    for p in ours:
        p.grad = torch.ones_like(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opts[1].step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step_on_ones(opts[0])
    for opt, net in zip(opts, nets, strict=True):
        for p, number in zip(net.parameters(), itertools.cycle((7, 100, 2**24)), strict=False):
            opt.state[p]["step"].fill_(number)
        train(net, opt, 2, first=2, without=lambda step: step % 3)
    for p, q in zip(ours, nets[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert opts[1].state[p]["step"] == opts[0].state[q]["step"]
        assert opts[1].state[p]["step"].is_cuda


@pytest.mark.parametrize("flags", ON_DEVICE)
@pytest.mark.parametrize("options", [{}, {"device_budget": 0}], ids=str)
def test_a_count_that_was_put_on_the_cpu_comes_back_where_flags_ask_for_the_device(
    flags: dict[str, bool], options: dict[str, Any]
) -> None:
    """As ``ZeroRedundancyOptimizer.load_state_dict`` puts it there."""
    nets = [model("cuda") for _ in range(2)]
    opts = [PagedAdamW(net.parameters(), **flags, **options) for net in nets]  # type: ignore[arg-type]
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 2)
    for p in nets[1].parameters():
        opts[1].state[p] = {key: value.cpu() if key == "step" else value for key, value in opts[1].state[p].items()}
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 2, first=2)
    assert same(*(net.parameters() for net in nets))
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert opts[1].state[q]["step"].is_cuda
        assert float(opts[1].state[q]["step"]) == float(opts[0].state[p]["step"]) == 4
