"""A function that contains a step, under ``torch.compile``: its graph breaks there, and the step is the eager one."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from children import loaded_beside_torch

from pagedopt import PagedAdamW, PagedOptimizer, PagedSGD, rule

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@rule
def sign_descent(param, grad, *, lr):  # type: ignore[no-untyped-def]
    param = param - lr * (1.0 if grad > 0 else -1.0)
    return param


class Bare(PagedOptimizer):
    rule = sign_descent


class SignDescent(Bare):
    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr}, **options)


def lower(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


class StepsTwice(PagedAdamW):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        super().step()
        return super().step(closure)


Act = Callable[[PagedOptimizer, torch.nn.Parameter], Any]


def lowered_before(optimizer: PagedOptimizer, p: torch.nn.Parameter) -> None:
    lower(optimizer)
    optimizer.step()


def lowered_behind(optimizer: PagedOptimizer, p: torch.nn.Parameter) -> None:
    optimizer.step()
    lower(optimizer)


def written_around(optimizer: PagedOptimizer, p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)
        optimizer.step()
        p.add_(1)


def without_a_gradient(optimizer: PagedOptimizer, p: torch.nn.Parameter) -> None:
    p.grad = None
    optimizer.step()


def with_state_read(optimizer: PagedOptimizer, p: torch.nn.Parameter) -> torch.Tensor:
    optimizer.step()
    read = sum(t.sum() for t in optimizer.state[p].values())
    optimizer.step()
    return torch.as_tensor(read)


def plain(optimizer: PagedOptimizer, p: torch.nn.Parameter) -> None:
    optimizer.step()


def with_a_closure(optimizer: PagedOptimizer, p: torch.nn.Parameter) -> Any:
    return optimizer.step(lambda: p.numel())


def nothing(optimizer: PagedOptimizer) -> None:
    pass


ACTS: dict[str, tuple[Act, Callable[[PagedOptimizer], Any], Callable[..., PagedOptimizer]]] = {
    "AdamW, learning rate before": (lowered_before, nothing, PagedAdamW),
    "SGD, learning rate behind": (lowered_behind, nothing, PagedSGD),
    "hook before": (plain, lambda o: o.register_step_pre_hook(lower), PagedAdamW),
    "hook behind": (plain, lambda o: o.register_step_post_hook(lower), PagedSGD),
    "scheduler": (plain, lambda o: torch.optim.lr_scheduler.StepLR(o, 1), PagedAdamW),
    "a closure": (with_a_closure, nothing, PagedAdamW),
    "state in a file": (plain, nothing, functools.partial(PagedAdamW, device_budget=0)),
    "a class of the user's own": (plain, nothing, SignDescent),
    "a step of the user's own": (lowered_behind, nothing, StepsTwice),
    "parameters are written around it": (written_around, nothing, PagedAdamW),
    "a gradient goes": (without_a_gradient, nothing, PagedAdamW),
    "state is read": (with_state_read, nothing, PagedAdamW),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ACTS)
def test_numbers_and_groups_are_those_of_eager_steps(name: str, backend: str) -> None:
    """Groups, too: where Dynamo reads them, it sets ``capturable`` for torch's own optimizers."""
    act, prepare, make = ACTS[name]
    results = []
    for compiled in (False, True):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (40, 3)]
        optimizer = make(params, lr=0.1)
        alive = prepare(optimizer)

        def train(x: torch.Tensor, o: PagedOptimizer = optimizer, p: torch.nn.Parameter = params[0]) -> Any:
            y = x + 1
            return act(o, p), y * 2  # with a tensor, so that what is behind the step is traced, too

        run = torch.compile(train, backend=backend) if compiled else train
        said = []
        for i in range(3):
            for p in params:
                p.grad = torch.full_like(p, i + 1.0)
            said.append(run(torch.ones(3)))
        del alive
        groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        state = [{key: value.tolist() for key, value in entry.items()} for entry in optimizer.state.values()]
        results.append(([p.tolist() for p in params], state, groups, [str(each) for each in said]))
    assert results[0] == results[1]


def test_a_whole_graph_is_refused_in_a_sentence() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = PagedAdamW([p])
    told = "reason" in inspect.signature(torch.compiler.disable).parameters
    run = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="leave out fullgraph=True" if told else "PagedOptimizer._step"):
        run()
    assert torch.equal(p, torch.ones(3))
    assert not optimizer.state


@pytest.mark.parametrize(("make", "options"), [(PagedAdamW, {}), (SignDescent, {}), (Bare, {"defaults": {"lr": 1e-2}})])
def test_an_optimizer_may_be_made_in_a_compiled_function(make: Any, options: dict[str, Any]) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        p = torch.nn.Parameter(torch.linspace(-1, 1, 40))
        p.grad = torch.linspace(1, 2, 40)

        def train(p: torch.nn.Parameter = p) -> None:
            optimizer = make([p], **options)
            optimizer.step()

        with warnings.catch_warnings():
            warnings.filterwarnings("error", r".* at '(base|declared)\.py")  # what sets attributes is not traced
            (torch.compile(train, backend="eager") if compiled else train)()
        found.append(p.detach())
    assert torch.equal(*found)


def test_there_is_at_most_one_break_more_than_for_torch_s_fused_step() -> None:
    counted = []
    for make in (functools.partial(torch.optim.AdamW, fused=True), PagedAdamW):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = make([p])

        def train(x: torch.Tensor, p: torch.nn.Parameter = p, optimizer: Any = optimizer) -> None:
            (p * x).square().sum().backward()
            optimizer.step()

        torch.compile(train, backend="eager")(torch.ones(3))
        counted.append(breaks())
    assert 0 < counted[1] <= counted[0] + 1


def test_a_step_loads_no_compiler_and_no_tensors_of_several_processes_that_torch_s_does_not_load() -> None:
    loaded = loaded_beside_torch()
    assert not {"torch._dynamo", "torch._inductor"} & {*loaded}
    assert not [name for name in loaded if name.startswith("torch.distributed")]
