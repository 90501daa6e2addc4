"""A step in a graph of ``torch.compile``: one operator, with the bits of eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import Ended, Made, backward, ended, equal, graphs, made
from torch import nn

from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD

pytestmark = [pytest.mark.usefixtures("nothing_compiled"), pytest.mark.filterwarnings("ignore")]

BACKENDS = ("eager", "aot_eager", "inductor")
#: Compilers that carry writes themselves, and so hand clones or decide that none is needed.
CARRYING = BACKENDS[1:]

every_backend = pytest.mark.parametrize("backend", BACKENDS)
carrying = pytest.mark.parametrize("backend", CARRYING)


def trained(
    backend: str | None,
    act: Callable[[PagedOptimizer], None] = lambda optimizer: optimizer.step(),
    before: Callable[[Made, int], None] = lambda made, i: None,
    make: Callable[..., PagedOptimizer] = PagedAdamW,
    **options: Any,
) -> Ended:
    """What four steps end in; compiled without a graph break, or eager (None)."""
    both = model, optimizer = made(make, **options)

    def step() -> None:
        act(optimizer)

    run = step if backend is None else torch.compile(step, backend=backend, fullgraph=True)
    for i in range(4):
        optimizer.zero_grad()
        backward(model, i)
        before(both, i)
        run()
    return ended(model, optimizer)


CASES: dict[str, tuple[Callable[..., PagedOptimizer], dict[str, Any]]] = {
    "AdamW": (PagedAdamW, {}),
    "AdamW, in a file": (PagedAdamW, {"device_budget": 0}),
    "AdamW, int8": (PagedAdamW, {"state_format": "int8"}),
    "SGD": (PagedSGD, {"momentum": 0.9}),
    "Lion": (PagedLion, {}),
}


@every_backend
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_has_the_bits_of_an_eager_one(backend: str, name: str) -> None:
    make, options = CASES[name]
    assert equal(trained(backend, make=make, **options), trained(None, make=make, **options))
    assert graphs() == 1


@every_backend
def test_a_changed_learning_rate_is_the_same_graph(backend: str) -> None:
    def change(made: Made, i: int) -> None:
        made[1].param_groups[0]["lr"] = 0.02 * (i + 1)

    assert equal(trained(backend, before=change), trained(None, before=change))
    assert not equal(trained(None, before=change), trained(None))
    assert graphs() == 1


@every_backend
def test_two_steps_in_one_graph(backend: str) -> None:
    def twice(optimizer: PagedOptimizer) -> None:
        optimizer.step()
        optimizer.step()

    assert equal(trained(backend, twice), trained(None, twice))


@every_backend
def test_gradients_that_come_late_or_go(backend: str) -> None:
    def before(made: Made, i: int) -> None:
        for j, p in enumerate(made[0].parameters()):
            if (i, j) in [(0, 1), (1, 1), (2, 3), (3, 0)]:
                p.grad = None

    assert equal(trained(backend, before=before), trained(None, before=before))


@every_backend
def test_a_graph_between_reads_and_writes_of_parameters(backend: str) -> None:
    def again(optimizer: PagedOptimizer) -> None:
        with torch.no_grad():
            first.mul_(2)
            optimizer.step()
            first.add_(1)

    results = []
    for how in (backend, None):
        model, optimizer = made()
        first = next(model.parameters())
        run = again if how is None else torch.compile(again, backend=how, fullgraph=True)
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            run(optimizer)
        results.append(ended(model, optimizer))
    assert equal(*results)


@every_backend
def test_a_gradient_that_the_graph_takes_away_is_not_used(backend: str) -> None:
    results = []
    for how in (backend, None):
        model, optimizer = made()
        first, *_ = model.parameters()

        def act(optimizer: PagedOptimizer = optimizer, first: torch.Tensor = first) -> None:
            first.grad = None
            optimizer.step()

        run = act if how is None else torch.compile(act, backend=how, fullgraph=True)
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            run()
            assert first.grad is None
        results.append(ended(model, optimizer))
    assert equal(*results)


@every_backend
def test_one_compiled_function_steps_two_optimizers(backend: str) -> None:
    run = torch.compile(lambda optimizer: optimizer.step(), backend=backend, fullgraph=True)
    results = []
    for step in (run, lambda optimizer: optimizer.step()):
        both = [made(seed=0), made(seed=1)]
        for i in range(3):
            for model, optimizer in both:
                optimizer.zero_grad()
                backward(model, i)
                step(optimizer)
        results.append([t for each in both for t in ended(*each)])
    assert equal(*results)


@every_backend
def test_parameters_that_are_views_of_one_memory(backend: str) -> None:
    """They take an opaque step: as one operator, torch 2.11 lost updates of them."""
    results = []
    for how in (backend, None):
        flat = torch.linspace(-1, 1, 64)
        params = [nn.Parameter(flat[:32]), nn.Parameter(flat[32:])]
        optimizer = PagedAdamW(params, lr=0.1)

        def act(optimizer: PagedOptimizer = optimizer) -> None:
            optimizer.step()

        run = act if how is None else torch.compile(act, backend=how)
        for i in range(3):
            for p in params:
                p.grad = torch.full_like(p, i + 1.0)
            run()
        results.append([flat.clone()])
    assert equal(*results)


def test_inductor_makes_no_clone() -> None:
    from torch._inductor.utils import run_and_get_code

    model, optimizer = made()
    backward(model, 0)
    _, (code, *more) = run_and_get_code(torch.compile(lambda: optimizer.step(), fullgraph=True))
    assert not more
    assert code.count("torch.ops.pagedopt.step_.default") == 1
    for word in ("clone", "empty_strided", "copy_(", "cpp_fused"):
        assert word not in code.split("def call(")[1], word


@carrying
def test_a_function_that_returns_the_loss_of_the_next_forward(backend: str) -> None:
    """The graph has a forward that autograd follows, behind the step."""
    results = []
    for how in (backend, None):
        model, optimizer = made()

        def act(model: nn.Module = model, optimizer: PagedOptimizer = optimizer) -> torch.Tensor:
            optimizer.step()
            return model(torch.ones(4, 7)).square().sum()

        run = act if how is None else torch.compile(act, backend=how, fullgraph=True)
        backward(model, 0)
        for _ in range(3):
            loss = run()
            optimizer.zero_grad()
            loss.backward()
        results.append(ended(model, optimizer))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch does not trace backward()"
)
@carrying
def test_forward_backward_and_step_as_one_graph(backend: str) -> None:
    """Close, and not bit for bit: a compiler computes other gradients than autograd."""
    results = []
    for how in (backend, None):
        model, optimizer = made()

        def act(x: torch.Tensor, model: nn.Module = model, optimizer: PagedOptimizer = optimizer) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            for p in model.parameters():
                p.grad = None
            return loss.detach()

        with torch._dynamo.config.patch(trace_autograd_ops=True):
            run = act if how is None else torch.compile(act, backend=how, fullgraph=True)
            for i in range(4):
                run(torch.full((4, 7), 0.1 * (i + 1)))
        results.append(ended(model, optimizer))
    assert graphs() == 1
    assert not equal(results[0], ended(*made()))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@every_backend
@pytest.mark.parametrize("first", [False, True], ids=["behind the step", "before the step"])
def test_a_graph_that_reads_state_is_refused_by_name(backend: str, first: bool) -> None:
    model, optimizer = made()
    backward(model, 0)
    optimizer.step()
    p = next(model.parameters())

    def act() -> torch.Tensor:
        before = optimizer.state[p]["exp_avg"] + 1 if first else None
        optimizer.step()
        return optimizer.state[p]["exp_avg"] + 1 if before is None else before

    run = torch.compile(act, backend=backend, fullgraph=True)
    if backend == "eager" and not first:  # no compiler behind Dynamo: the order is that of the function
        assert torch.equal(run(), optimizer.state[p]["exp_avg"] + 1)
        return
    was = ended(model, optimizer)
    with pytest.raises(Exception, match="reads state 'exp_avg' of parameter 0, and takes a step of its PagedAdamW"):
        run()
    assert equal(ended(model, optimizer), was)


@every_backend
def test_groups_that_change(backend: str) -> None:
    """A group is added; a state dict is loaded, which makes new groups of the same parameters; then both."""
    results = []
    for how in (backend, None):
        model, optimizer = made()
        more = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        run = (
            optimizer.step if how is None else torch.compile(lambda o=optimizer: o.step(), backend=how, fullgraph=True)
        )

        def go(i: int, model: nn.Module = model, more: Any = more, run: Any = run) -> None:
            model.zero_grad()
            backward(model, i)
            for p in more:
                p.grad = torch.ones(3)
            run()

        go(0)
        optimizer.add_param_group({"params": more[:1], "lr": 0.5})
        go(1)
        optimizer.load_state_dict(optimizer.state_dict())
        go(2)
        optimizer.add_param_group({"params": more[1:], "lr": 0.25})
        go(3)
        results.append([*ended(model, optimizer), *(p.detach().clone() for p in more)])
    assert equal(*results)


def test_groups_that_change_unseen_are_refused_once() -> None:
    model, optimizer = made()
    more = nn.Parameter(torch.ones(3))
    more.grad = torch.ones(3)
    run = torch.compile(lambda: optimizer.step(), backend="aot_eager", fullgraph=True)
    backward(model, 0)
    run()
    optimizer.param_groups = [*optimizer.param_groups, {**optimizer.param_groups[0], "params": [more]}]
    before = ended(model, optimizer)
    with pytest.raises(RuntimeError, match="the groups of this PagedAdamW hold other parameters"):
        run()
    assert equal(ended(model, optimizer), before)
    run()
    assert not torch.equal(more, torch.ones(3))


def test_dynamo_does_not_change_the_groups() -> None:
    model, optimizer = made()
    before = [{**group} for group in optimizer.param_groups]
    backward(model, 0)
    torch.compile(lambda: optimizer.step(), backend="aot_eager", fullgraph=True)()
    assert [{**group} for group in optimizer.param_groups] == before


@pytest.mark.parametrize("what", ["attached", "a parameter twice"])
def test_steps_that_the_operator_cannot_take_are_opaque(what: str) -> None:
    results = []
    for compiled in (False, True):
        model, optimizer = made()
        if what == "attached":
            optimizer.attach(model)
        else:
            optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])
        run = torch.compile(lambda o=optimizer: o.step(), backend="aot_eager") if compiled else optimizer.step
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            run()
        optimizer.wait()
        results.append(ended(model, optimizer))
    assert equal(*results)


def test_sparse_gradients_are_refused_as_in_an_eager_step() -> None:
    model, optimizer = made()
    backward(model, 0)
    p = next(model.parameters())
    p.grad = torch.zeros_like(p).to_sparse()
    run = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    with pytest.raises(RuntimeError, match="sparse"):
        run()


def test_a_compiled_step_without_gradients_does_nothing() -> None:
    model, optimizer = made()
    before = ended(model, optimizer)
    torch.compile(lambda: optimizer.step(), backend="aot_eager", fullgraph=True)()
    assert equal(ended(model, optimizer), before)
    assert not optimizer.state


@every_backend
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_group_that_the_function_changes_before_the_step(backend: str, name: str) -> None:
    """Dynamo changes it behind the graph, so the step is none of the graph."""
    results = []
    for how in (backend, None):
        both = model, optimizer = made(PagedSGD)

        def act(optimizer: PagedOptimizer = optimizer) -> None:
            optimizer.param_groups[0][name] = 0.3
            optimizer.step()

        run = act if how is None else torch.compile(act, backend=how)
        for i in range(3):
            optimizer.zero_grad()
            backward(model, i)
            run()
        results.append(ended(*both))
    assert equal(*results)


def test_parameters_that_come_to_share_memory_are_refused_where_a_compiler_passes_clones() -> None:
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    optimizer = PagedSGD(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    run = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    run()
    params[1].data = params[0].data.view(-1)[:5]
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match="share memory now"):
        run()
    assert torch.equal(params[0], before)
    torch._dynamo.reset()
    run()
    assert not torch.equal(params[0], before)
