"""A function that contains a step, under ``torch.compile``: its graph breaks there, and the step is the eager one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from children import loaded_beside_torch

from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD, rule

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


CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (PagedAdamW, {}),
    "AdamW, in a file": (PagedAdamW, {"device_budget": 0}),
    "SGD": (PagedSGD, {"momentum": 0.9}),
    "Lion": (PagedLion, {}),
    "a class of the user's own": (SignDescent, {}),
}


def lower(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def trained(
    make: Callable[..., torch.optim.Optimizer], compiled: bool, closure: bool = False, **options: Any
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = make(model.parameters(), lr=1e-2, **options)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    def train(x: torch.Tensor) -> None:
        if closure:
            optimizer.step(lambda: loss_of(x))
        else:
            loss_of(x)
            optimizer.step()

    run = torch.compile(train, backend="eager") if compiled else train
    for i in range(3):
        run(torch.full((4, 7), 0.1 * (i + 1)))
    return [p.detach().clone() for p in model.parameters()]


def breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


@pytest.mark.parametrize("closure", [False, True], ids=["", "closure"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_compiled_step_is_the_step(name: str, closure: bool) -> None:
    make, options = CLASSES[name]
    want = trained(make, compiled=False, closure=closure, **options)
    got = trained(make, compiled=True, closure=closure, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


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


def nothing(optimizer: PagedOptimizer) -> None:
    pass


ACTS: dict[str, tuple[Act, Callable[[PagedOptimizer], Any], Callable[..., PagedOptimizer]]] = {
    "AdamW, learning rate before": (lowered_before, nothing, PagedAdamW),
    "AdamW, learning rate behind": (lowered_behind, nothing, PagedAdamW),
    "Lion, learning rate before": (lowered_before, nothing, PagedLion),
    "SGD, learning rate behind": (lowered_behind, nothing, PagedSGD),
    "hook before": (plain, lambda o: o.register_step_pre_hook(lower), PagedAdamW),
    "hook behind": (plain, lambda o: o.register_step_post_hook(lower), PagedSGD),
    "scheduler": (plain, lambda o: torch.optim.lr_scheduler.StepLR(o, 1), PagedAdamW),
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


MADE = CLASSES | {"a class without a constructor": (Bare, {"defaults": {"lr": 1e-2}})}


@pytest.mark.parametrize("name", MADE)
def test_an_optimizer_may_be_made_in_a_compiled_function(name: str) -> None:
    make, options = MADE[name]
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
    trained(torch.optim.AdamW, compiled=True, fused=True)
    theirs = breaks()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trained(PagedAdamW, compiled=True)
    assert 0 < breaks() <= theirs + 1


def test_a_step_loads_no_compiler_that_torch_s_does_not_load() -> None:
    assert not {"torch._dynamo", "torch._inductor"} & set(loaded_beside_torch())


def test_nothing_of_torchs_tensors_of_several_processes_is_loaded_that_torch_does_not_load() -> None:
    assert [name for name in loaded_beside_torch() if name.startswith("torch.distributed")] == []
