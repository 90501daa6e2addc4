"""The operator of a step: what it writes, what it is told, and what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from compiled_steps import Ended, arguments, backward, ended, equal, made, operator
from torch.fx.experimental.proxy_tensor import make_fx


def test_a_handle_does_not_outlive_its_optimizer() -> None:
    model, optimizer = made()
    backward(model, 0)
    params, grads, handle = arguments(model, optimizer)
    graph = make_fx(lambda params, grads: operator()(params, grads, handle))(params, grads)
    before = [p.clone() for p in params]
    graph(params, grads)
    assert not equal(params, before)
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match=f"the optimizer of handle {handle} is gone"):
        graph(params, grads)


def test_handles_do_not_keep_an_optimizer_alive_nor_grow() -> None:
    from pagedopt.optim.registered_step import _handed

    model, optimizer = made()
    run = torch.compile(lambda optimizer: optimizer.step(), backend="aot_eager")
    for i in range(3):
        torch._dynamo.reset()
        backward(model, i)
        run(optimizer)
    assert len(vars(optimizer)["_handles"]) == 1
    count, alive = len(_handed), weakref.ref(optimizer)
    torch._dynamo.reset()
    del optimizer
    gc.collect()
    assert alive() is None
    assert len(_handed) == count - 1


def test_opcheck_has_nothing_to_say() -> None:
    model, optimizer = made()
    backward(model, 0)
    found = torch.library.opcheck(operator(), arguments(model, optimizer))
    assert found == dict.fromkeys(found, "SUCCESS")
    assert len(found) == 4


def test_it_is_told_to_stay_out_of_cuda_graphs() -> None:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    assert tag is None or tag in operator().tags


def test_what_is_handed_is_written_and_the_optimizer_s_own_is_not() -> None:
    model, optimizer = made()
    backward(model, 0)
    params, grads, handle = arguments(model, optimizer)
    clones, own, theirs = [p.clone() for p in params], [p.grad for p in model.parameters()], [g * 2 for g in grads]
    versions = [c._version for c in clones]
    operator()(clones, theirs, handle)
    assert equal(params, ended(*made())[: len(params)])
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
    assert all(c._version > v for c, v in zip(clones, versions, strict=True))
    other, twin = made()
    for p, g in zip(other.parameters(), theirs, strict=True):
        p.grad = g
    twin.step()
    assert equal(clones, ended(other, twin)[: len(params)])


def test_a_step_that_fails_gives_parameters_and_gradients_back() -> None:
    model, optimizer = made()
    backward(model, 0)
    params, grads, handle = arguments(model, optimizer)
    own = [p.grad for p in model.parameters()]
    where = [p.data_ptr() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = "a word"
    with pytest.raises(TypeError):
        operator()([p.clone() for p in params], [g.clone() for g in grads], handle)
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == where


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (lambda p, g: (p[:-1], g), "got 3 parameters and 4 gradients"),
        (lambda p, g: (p, g[:-1]), "got 4 parameters and 3 gradients"),
        (
            lambda p, g: ([p[1], *p[1:]], g),
            r"torch.float32 \(5,\) on cpu for parameter 0, which is torch.float32 \(5, 7\)",
        ),
        (lambda p, g: ([p[0].double(), *p[1:]], g), r"torch.float64 \(5, 7\) on cpu for parameter 0"),
    ],
    ids=["parameters", "gradients", "shape", "dtype"],
)
def test_what_is_not_the_optimizer_s_is_refused(given: Callable[..., tuple[Ended, Ended]], found: str) -> None:
    model, optimizer = made()
    backward(model, 0)
    params, grads, handle = arguments(model, optimizer)
    before = ended(model, optimizer)
    with pytest.raises(ValueError, match=found):
        operator()(*given(params, grads), handle)
    assert equal(ended(model, optimizer), before)
