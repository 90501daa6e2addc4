"""Captured steps: a replay is a step, whatever has changed in memory."""

from __future__ import annotations

import functools
import gc
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from captured_toys import CAPTURABLE, HYPER, KINDS, PLACES, assert_same, begun, captured, give, parameters
from gpu_support import launching
from optim_support import same

from pagedopt import PagedAdamW, PagedSGD

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


def test_nadam_s_own_numbers_lie_on_the_device() -> None:
    params, optimizer = begun(KINDS["nadam"])
    assert all(optimizer.state[p]["mu_product"].is_cuda for p in params)


# --- what cannot be captured, or not yet, and what is said then -------------------------------------------------------


def refused(optimizer: Any, words: str) -> None:
    """A capture is refused, and afterwards the optimizer steps."""
    with pytest.raises(RuntimeError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    torch.cuda.synchronize()
    optimizer.step()


def test_a_group_that_is_not_capturable_is_refused_as_in_torch() -> None:
    params, optimizer = begun(functools.partial(PagedAdamW, **HYPER))
    refused(
        optimizer, "Attempting CUDA graph capture of step.. for an instance of PagedAdamW but .*capturable is False"
    )
    theirs = torch.optim.AdamW(params)
    theirs.step()
    with pytest.raises(RuntimeError, match="Attempting CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        theirs.step()


def test_eager_steps_are_warned_of_once_where_torch_does() -> None:
    """torch's constructor marks the warning as given, so that only optimizers that come from a pickle give it."""

    def told(optimizer: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(2):
                for p in optimizer.param_groups[0]["params"]:
                    p.grad = torch.ones_like(p)
                optimizer.step()
        return [str(w.message)[:50] for w in found]

    said = {}
    for kind in (torch.optim.AdamW, PagedAdamW):
        optimizer = kind(parameters(), capturable=True)
        said[kind] = told(optimizer), told(pickle.loads(pickle.dumps(optimizer)))
    assert said[PagedAdamW] == said[torch.optim.AdamW]
    assert len(said[PagedAdamW][1]) == 1


def test_a_first_step_is_refused_unless_its_state_is_made() -> None:
    params = parameters()
    give(params, 0)
    optimizer = PagedAdamW(params, **CAPTURABLE)
    refused(optimizer, "state 'step' of parameter 0 is not made yet: step once before the capture, or give preall")
    plain = PagedSGD(params, lr=0.1)
    refused(plain, "its kernel is not made yet")


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


def test_a_budget_that_moves_pages_is_refused() -> None:
    _, optimizer = begun(KINDS["adamw"], placement="mapped", device_budget="auto", host_access="in_place")
    refused(optimizer, "device_budget='auto', which moves pages")


def test_strides_that_need_copies_are_refused() -> None:
    p = torch.nn.Parameter(torch.randn(40, 30, device="cuda")[:, ::2])
    p.grad = torch.ones_like(p)
    optimizer = PagedAdamW([p], **CAPTURABLE)
    optimizer.step()
    refused(optimizer, "complex, have gaps or differ in strides")


def test_a_table_by_value_is_not_refreshed() -> None:
    params, optimizer = begun(KINDS["adamw"], transport="struct")
    graph = captured(optimizer)
    give(params, 3, in_place=False)
    with pytest.raises(RuntimeError, match="transport='struct' passes its table by value"):
        optimizer.refresh()
    graph.replay()


def test_a_gradient_of_another_dtype_is_refused_by_a_refresh() -> None:
    params, optimizer = begun(KINDS["adamw"])
    graph, eager = captured(optimizer), begun(KINDS["adamw"])
    params[1].grad = None
    params[1].grad_dtype = torch.bfloat16 if hasattr(params[1], "grad_dtype") else None
    if params[1].grad_dtype is None:
        pytest.skip("this torch has no gradients of another dtype")
    params[1].grad = torch.ones_like(params[1], dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match=r"the gradient of parameter 1 is torch.bfloat16, the captured one reads torch.float32"
    ):
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
