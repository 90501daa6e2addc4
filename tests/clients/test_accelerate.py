"""accelerate."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import clients
import pytest
import torch
from clients import PLACES, Watched, digest, everywhere, on_devices, values
from optim_support import model

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.clients, clients.NOT_QUEUED]

STEPS = 6


def accelerator(device: str, **options: Any) -> Any:
    clients.forget_accelerate()
    return accelerate.Accelerator(cpu=device == "cpu", **options)


def loader() -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(torch.randn(8 * STEPS, 13, generator=generator), batch_size=8)


def train(by: Any, net: Any, opt: Any, batches: Any, schedule: Any = None) -> list[float]:
    """One epoch; the loss of each batch."""
    losses = []
    for x in batches:
        with by.accumulate(net), by.autocast():
            loss = net(x).square().mean()
            by.backward(loss)
            if by.sync_gradients:
                by.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            if schedule is not None:
                schedule.step()
            opt.zero_grad()
        losses.append(loss.item())
    return losses


def beside_torch(device: str, place: str, near: float, ours: Any = (), **options: Any) -> None:
    """Ours and torch's, prepared with model, data and schedule; ``ours`` are options of the optimizer more."""
    ends = []
    mine, theirs = clients.both(place)
    for make, more in ((mine, dict(ours)), (theirs, {})):
        by, net = accelerator(device, **options), model()
        inner = make(net.parameters(), **more)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.8)
        net, opt, batches, schedule = by.prepare(net, inner, loader(), schedule)
        ends.append((train(by, net, opt, batches, schedule), values(net), inner))
    steps = STEPS // options.get("gradient_accumulation_steps", 1)
    clients.agree(ends, steps, near, values(model()), skips=options.get("mixed_precision") == "fp16")


@everywhere
def test_prepare(device: str, place: str) -> None:
    """`prepare` of model, optimizer, data and schedule; clipping."""
    beside_torch(device, place, 1e-5)


@everywhere
def test_bf16_and_accumulation(device: str, place: str) -> None:
    """`mixed_precision="bf16"`, `accumulate` over two batches."""
    beside_torch(device, place, 2e-2, mixed_precision="bf16", gradient_accumulation_steps=2)


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_attached(more: dict[str, Any]) -> None:
    """`attach(model)`, with a schedule, clipping, accumulation and `bf16`."""

    def run(make: Any) -> Any:
        by, inner = accelerator("cpu", **more), model()
        opt = make(inner)
        net, opt, batches, schedule = by.prepare(inner, opt, loader(), torch.optim.lr_scheduler.ExponentialLR(opt, 0.8))
        return [loss for _ in range(2) for loss in train(by, net, opt, batches, schedule)], inner

    clients.alike_when_attached(run)


@clients.on_cuda
def test_fp16(device: str, place: str) -> None:
    """`mixed_precision="fp16"`, with its scaler."""
    beside_torch(device, place, 2e-2, mixed_precision="fp16")


@clients.on_cuda
def test_fp16_fused(device: str, place: str) -> None:
    """`mixed_precision="fp16"` with `fused=True`; `clip_grad_norm_` unscales before it clips."""
    beside_torch(device, place, 2e-2, ours={"fused": True}, mixed_precision="fp16")


@clients.on_cuda
def test_a_step_that_fused_skips_is_not_known_to_accelerate(device: str, place: str) -> None:
    """`step_was_skipped` stays False with `fused=True`, as with torch's (accelerate#4242): the step is called."""
    mine, theirs = clients.both(place)
    for make in (lambda params: mine(params, fused=True), theirs):
        by, net = accelerator(device, mixed_precision="fp16"), model()
        net, opt = by.prepare(net, make(net.parameters()))
        with by.autocast():
            loss = net(torch.randn(8, 13, device=device)).square().mean()
        by.backward(loss)
        before = values(net)
        next(net.parameters()).grad.fill_(float("inf"))
        opt.step()
        assert not opt.step_was_skipped
        assert all(torch.equal(a, b) for a, b in zip(before, values(net), strict=True)), "it was skipped"


@everywhere
def test_prepared_after_steps(device: str, place: str) -> None:
    """An optimizer that has stepped before `prepare` continues."""
    ends = []
    for make in clients.both(place):
        by, net = accelerator(device), model()
        inner = make(net.parameters())
        train(accelerator("cpu"), net, inner, list(loader())[:2])
        by = accelerator(device)
        net, opt, batches = by.prepare(net, inner, loader())
        ends.append((train(by, net, opt, batches), values(net), inner))
    clients.agree(ends, STEPS + 2, 1e-5, values(model()))


def prepared(device: str, place: str) -> Any:
    by, net = accelerator(device), model()
    inner = clients.PagedAdamW(net.parameters(), **clients.ADAMW, **PLACES[place])
    return by, *by.prepare(net, inner, loader()), inner


@on_devices
def test_save_state_and_load_state(tmp_path: Path, device: str) -> None:
    """`save_state`, and `load_state`: resumed, also in another place."""

    def run(place: str) -> str:
        by, net, opt, batches, inner = prepared(device, place)
        train(by, net, opt, list(batches)[:3])
        by.save_state(str(tmp_path / place))
        train(by, net, opt, list(batches)[3:])
        return digest(net, inner)

    clients.goes_on(__file__, tmp_path, device, run)


def go_on(folder: Path, device: str, before: str, after: str) -> str:
    by, net, opt, batches, inner = prepared(device, after)
    by.load_state(str(folder / before))
    train(by, net, opt, list(batches)[3:])
    return digest(net, inner)


@everywhere
def test_find_executable_batch_size(device: str, place: str) -> None:
    """`find_executable_batch_size`: all memory of a failed try is given back before the next one."""
    tries: list[tuple[int, list[weakref.ref[Any]]]] = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 8 >> len(tries))
    def attempt(batch_size: int) -> None:
        for _, refs in tries:
            assert not [ref for ref in refs if ref() is not None], "the failed try is still there"
        net = model(device)
        opt = Watched(net.parameters(), **PLACES[place])
        for _ in range(2):
            net(torch.ones(batch_size, 13, device=device)).square().mean().backward()
            opt.step()
        tensors = [t for entry in opt.state.values() for t in entry.values()] + [p.grad for p in net.parameters()]
        tries.append((batch_size, [weakref.ref(each) for each in (opt, opt.store, *opt.store.arenas, *tensors)]))
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")

    gc.disable()  # what goes, goes by itself: the exception is alive while accelerate collects garbage
    try:
        attempt()
    finally:
        gc.enable()
    assert [size for size, _ in tries] == [8, 4, 2]


def test_a_full_card_is_a_batch_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """State for which the card has no room: a smaller batch is tried, as where torch's allocator fails."""
    assert accelerate.utils.memory.should_reduce_batch_size(clients.full_card(monkeypatch))


if __name__ == "__main__":
    clients.child(go_on)
