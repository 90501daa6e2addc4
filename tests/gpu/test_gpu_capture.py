"""Captured steps: a replay is a step, whatever has changed in memory."""

from __future__ import annotations

import functools
import gc
import itertools
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import count_held, launching, settled
from injector import interrupt_at
from optim_support import same
from stand_ins import raising

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.kernels import cuda
from pagedopt.system import driver
from tests.gpu.captured_toys import CAPTURABLE, HYPER, KINDS, PLACES, assert_same, begun, captured, give, parameters

pytestmark = launching()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_replays_are_a_hundred_steps(kind: str, place: str) -> None:
    eager, replayed = begun(KINDS[kind], **PLACES[place]), begun(KINDS[kind], **PLACES[place])
    before = [p.detach().clone() for p in replayed[0]]
    graph = captured(replayed[1])
    torch.cuda.synchronize()
    assert same(before, replayed[0]), "a capture has updated something"
    for step in range(2, 102):
        give(eager[0], step)
        eager[1].step()
        give(replayed[0], step)
        graph.replay()
    assert_same(eager, replayed)
    replayed[1].check_capture()
    eager[1].step()
    replayed[1].step()
    assert_same(eager, replayed)


def test_learning_rate_and_betas_that_are_tensors_change_between_replays() -> None:
    worlds = []
    for _ in range(2):
        lr, beta1, beta2 = (torch.tensor(number, device="cuda") for number in (0.03, 0.8, 0.95))
        numbers = {"lr": lr, "betas": (beta1, beta2)}
        worlds.append((numbers, *begun(functools.partial(PagedAdamW, **{**CAPTURABLE, **numbers}))))
    graph = captured(worlds[1][2])
    for step in range(2, 20):
        for numbers, params, _ in worlds:
            numbers["lr"].fill_(0.03 / step)
            numbers["betas"][0].fill_(0.5 + 0.02 * step)
            give(params, step)
        worlds[0][2].step()
        graph.replay()
    assert_same(worlds[0][1:], worlds[1][1:])


def test_gradients_move_come_and_go_with_a_refresh_in_stream_order() -> None:
    eager, replayed = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(replayed[1])
    for step in range(2, 12):
        for params, _ in (eager, replayed):
            give(params, step, in_place=False)
            if step % 3:
                params[step % 4].grad = None
        eager[1].step()
        torch.cuda._sleep(20_000_000)  # the last replay has not read its list when the next one is told
        replayed[1].refresh()
        graph.replay()
    assert_same(eager, replayed)


def test_a_replay_that_was_not_refreshed_reads_memory_of_its_own() -> None:
    eager, replayed = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(replayed[1])
    replayed[1].zero_grad()
    poison = [torch.full_like(p, float("nan")) for p in parameters() for _ in range(4)]
    eager[1].step()
    graph.replay()
    assert_same(eager, replayed)
    assert len(poison) == 16


def test_what_has_changed_is_named_and_followed() -> None:
    (params, optimizer), eager = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    graph = captured(optimizer)
    optimizer.check_capture()
    for mine, each in ((params, optimizer), eager):
        each.param_groups[0]["lr"] = 0.007
        give(mine, 5, in_place=False)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 1 has moved.*lr of group 0 has changed"):
        optimizer.check_capture()
    optimizer.refresh()
    optimizer.check_capture()
    graph.replay()
    eager[1].step()
    assert_same((params, optimizer), eager)
    params[1].grad = params[1].grad.clone()  # type: ignore[union-attr]
    with pytest.warns(RuntimeWarning, match="captured step was recorded, the gradient of parameter 1 has moved"):
        optimizer.step()


@pytest.mark.parametrize(("move", "to"), [("set_device_budget", ("10%",)), ("spill", ()), ("unspill", ())])
def test_state_does_not_move_while_a_graph_writes_to_it(move: str, to: tuple[str, ...]) -> None:
    _, optimizer = begun(KINDS["adamw"], **PLACES["in place"])
    graph = captured(optimizer)
    before = optimizer.memory_report().by_place
    with pytest.raises(RuntimeError, match=f"{move}.*delete the graph first"):
        getattr(optimizer, move)(*to)
    assert optimizer.memory_report().by_place == before
    del graph
    gc.collect()
    getattr(optimizer, move)(*to)


def test_a_whole_iteration_is_captured() -> None:
    def world() -> tuple[torch.nn.Module, Any, torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).cuda()
        return net, PagedAdamW(net.parameters(), **CAPTURABLE), torch.zeros(32, 64, device="cuda")

    def iteration(net: torch.nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        net(batch).square().mean().backward()
        optimizer.step()

    eager, replayed = world(), world()
    batches, side = torch.randn(20, 32, 64, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for each, batch in itertools.product((eager, replayed), batches[:3]):
            each[2].copy_(batch)
            iteration(*each)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    replayed[1].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        iteration(*replayed)
    for batch in batches[3:]:
        eager[2].copy_(batch)
        iteration(*eager)
        replayed[2].copy_(batch)
        graph.replay()
    assert same(list(eager[0].parameters()), list(replayed[0].parameters()))


# --- what cannot be captured, or not yet, and what is said then -------------------------------------------------------


def with_gradients(params: list[torch.nn.Parameter], kind: Any = PagedAdamW, **options: Any) -> Any:
    for p in params:
        p.grad = torch.ones_like(p)
    return kind(params, **options)


def with_gaps() -> Any:
    optimizer = with_gradients([torch.nn.Parameter(torch.randn(40, 30, device="cuda")[:, ::2])], **CAPTURABLE)
    optimizer.step()
    return optimizer


AUTO = {"placement": "mapped", "device_budget": "auto", "host_access": "in_place"}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not capturable": (
        lambda: begun(functools.partial(PagedAdamW, **HYPER))[1],
        "Attempting CUDA graph capture of step.. for an instance of PagedAdamW but .*capturable is False",
    ),
    "no state": (
        lambda: with_gradients(parameters(), **CAPTURABLE),
        "state 'step' of parameter 0 is not made yet: step once before the capture, or give preall",
    ),
    "no kernel": (lambda: with_gradients(parameters(), PagedSGD, lr=0.1), "its kernel is not made yet"),
    "pages that move": (lambda: begun(KINDS["adamw"], **AUTO)[1], "device_budget='auto', which moves pages"),
    "strides that need copies": (with_gaps, "complex, have gaps or differ in strides"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_steps_afterwards(name: str) -> None:
    make, words = REFUSED[name]
    optimizer = make()
    with pytest.raises(RuntimeError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.step()


def test_eager_steps_are_warned_of_once_where_torch_does() -> None:
    """torch's constructor marks the warning as given, so that only optimizers that come from a pickle give it."""
    said = []
    for kind in (torch.optim.AdamW, PagedAdamW):
        made = kind(parameters(), capturable=True)
        for copied in (False, True):
            optimizer = pickle.loads(pickle.dumps(made)) if copied else made
            give(optimizer.param_groups[0]["params"], 0)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for _ in range(2):
                    optimizer.step()
            said.append([str(w.message)[:50] for w in found])
    assert said[:2] == said[2:]
    assert len(said[1]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_step_is_captured_where_its_state_is_made(kind: str) -> None:
    eager, replayed = parameters(), parameters()
    mine = KINDS[kind](replayed, preallocate=True)
    theirs = KINDS[kind](eager)
    give(eager, 0)
    give(replayed, 0)
    held = torch.cuda.memory_allocated()
    graph = captured(mine)
    assert torch.cuda.memory_allocated() <= held + 1024, "state was made in the capture"  # torch's own graph has 1,024
    for step in range(4):
        give(eager, step)
        theirs.step()
        give(replayed, step)
        graph.replay()
    assert_same((eager, theirs), (replayed, mine))


def test_a_table_by_value_is_not_refreshed() -> None:
    params, optimizer = begun(KINDS["adamw"], transport="struct")
    graph = captured(optimizer)
    give(params, 3, in_place=False)
    with pytest.raises(RuntimeError, match="transport='struct' passes its table by value"):
        optimizer.refresh()
    graph.replay()


# --- a graph owns what it reads: it leaks nothing, outlives its optimizer, and if it fails leaves no trace ------------


def buffers() -> int:
    """How many pieces of the driver's memory are alive in this process; others use the card, too."""
    return sum(isinstance(each, driver.DeviceMemory | driver.Event | driver.Buffer) for each in gc.get_objects())


def test_a_thousand_captures_leak_nothing() -> None:
    params, optimizer = begun(KINDS["adamw"])

    def capture_and_replay(count: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(count):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()  # torch.cuda.graph collects all garbage each time
                optimizer.step()
                graph.capture_end()
                graph.replay()
        torch.cuda.synchronize()

    capture_and_replay(10)
    settled()
    before, reserved = (count_held(), buffers()), torch.cuda.memory_reserved()
    capture_and_replay(1000)
    settled()
    assert all(now <= then for now, then in zip((count_held(), buffers()), before, strict=True))
    assert torch.cuda.memory_reserved() <= reserved
    assert float(optimizer.state[params[0]]["step"]) == 2 + 1010


def test_a_graph_outlives_its_optimizer() -> None:
    eager = begun(KINDS["adamw"])
    params, optimizer = begun(KINDS["adamw"], **PLACES["in place"])
    graph = captured(optimizer)
    del optimizer
    settled()
    junk = [torch.full((70_001,), float("nan"), device="cuda") for _ in range(8)]
    for step in range(2, 6):
        give(eager[0], step)
        eager[1].step()
        give(params, step)
        graph.replay()
    torch.cuda.synchronize()
    assert same(eager[0], params)
    assert len(junk) == 8


@pytest.mark.parametrize("error", [RuntimeError("no launch"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_capture_that_fails_leaves_the_optimizer_as_it_was(error: BaseException, monkeypatch: Any) -> None:
    (params, optimizer), eager = begun(KINDS["adamw"]), begun(KINDS["adamw"])
    count = count_held()
    with monkeypatch.context() as patch:
        patch.setattr(cuda.CudaKernel, "__call__", raising(error))
        with pytest.raises(type(error)), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    settled()
    assert count_held() == count
    assert_same((params, optimizer), eager)
    captured(optimizer).replay()
    eager[1].step()
    assert_same((params, optimizer), eager)


def test_an_interrupt_anywhere_in_a_refresh_is_mended_by_the_next_one() -> None:
    params, optimizer = begun(KINDS["adamw"])
    eager = begun(KINDS["adamw"])
    graph = captured(optimizer)
    give(params, 2, in_place=False)
    lines = interrupt_at(0, signal.SIGINT, optimizer.refresh).events
    assert lines > 20
    for step, at in enumerate(range(1, lines, lines // 25), 3):
        for world in ((params, optimizer), eager):
            give(world[0], step, in_place=False)
        interrupt_at(at, signal.SIGINT, optimizer.refresh)
        optimizer.refresh()
        graph.replay()
        eager[1].step()
        assert_same((params, optimizer), eager)


# --- steps in functions that are compiled, into CUDA graphs or not ---------------------------------------------------


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("budget", [None, 0], ids=["resident", "away"])
def test_a_step_between_other_operators_has_the_bits_of_an_eager_one(mode: str, budget: int | None) -> None:
    """Dynamo may read groups of parameters that have no state yet, and still sets no ``capturable`` in them."""
    results = []
    for compiled in (True, False):
        params = [torch.nn.Parameter(torch.ones(n, device="cuda")) for n in (3, 1, 1 << 20)]
        optimizer = PagedAdamW(params, lr=1e-2, device_budget=budget)

        def step(optimizer: PagedAdamW = optimizer, first: torch.Tensor = params[0]) -> torch.Tensor:
            optimizer.param_groups[0]["lr"] *= 0.9
            with torch.no_grad():
                first.mul_(2)
                optimizer.step()
                return first + 1

        run = torch.compile(step, mode=mode) if compiled else step
        after = []
        for i in range(6):
            for j, p in enumerate(params):
                p.grad = torch.full_like(p, 0.1 * (i + j + 1))
            after.append(run().clone())
        assert optimizer.param_groups[0]["capturable"] is False
        state = [t for p in params for t in optimizer.state[p].values()]
        results.append([t.detach().clone() for t in (*params, *state, *after)])
    assert all(map(torch.equal, *results))
