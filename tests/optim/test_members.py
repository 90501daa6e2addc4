"""A parameter as a kernel sees it: complex numbers, gaps, and layouts that differ work as they do in torch.

Gradients that are laid out otherwise, and layouts that change in training, are in ``tests/contract``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import DEVICES
from often import MARKS
from optim_support import ready, same, step_on_ones, stepped
from support import BF16, F32, F64

from pagedopt import PagedAdamW
from tests.acts import transposed, with_gaps, within
from tests.loads import exchange, load
from tests.optim.quick_steps import look
from tests.specs import BY_STATE, CASES, Case
from tests.world import DENSE, SIDES, World, Worlds, one_group, values

__all__ = ["look"]

#: How a parameter lies in memory, made of a matrix of (30, 42).
LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    within, transposed, torch.t, with_gaps,
    lambda t: t.reshape(5, 6, 7, -1).to(memory_format=torch.channels_last),
    lambda t: t.reshape(6, 7, -1).permute(2, 0, 1),
    lambda t: t[3:20, 5:9], lambda t: t[3:20, 5:9].t(), lambda t: t.flatten()[::7],
    lambda t: t.as_strided((3, 2), (2, 3)),
    lambda t: t[:, None, :, None].as_strided((30, 1, 42, 1), (42, 9, 1, 7)),
)  # fmt: skip
SIZES = ((), (0,), (1,), (3,), (4097,), (70_001,), (0, 5))
KINDS = {
    "real": (F32,),
    "complex": (torch.complex64, torch.complex128),
    "several": (F32, BF16, F64, torch.complex64),
}


def odd(kind: str) -> dict[str, Any]:
    """Each layout with each dtype, and each size."""

    def make(device: str) -> list[torch.Tensor]:
        matrices = [values((30, 42), i, device, dtype) for i, dtype in enumerate(KINDS[kind])]
        sizes = [values(size, i, device, KINDS[kind][i % len(matrices)]) for i, size in enumerate(SIZES)]
        return [layout(matrix.clone()) for layout in LAYOUTS for matrix in matrices] + sizes

    return {"make": make, "groups": one_group}


def one_is_absent(world: World) -> None:
    if world.count % 3 == 2:
        world.params[world.count % len(world.params)].grad = None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, id=f"{case}-{kind}", marks=MARKS[case.name == "adamw" or i % 3 == j])
        for i, case in enumerate(CASES.values())
        for j, kind in enumerate(KINDS)
    ],
)
def test_odd_parameters_follow_torch(case: Case, kind: str, device: str) -> None:
    """And have the bits of those that are contiguous."""
    worlds = Worlds(case, *SIDES, DENSE, device=device, **odd(kind)).step(4, one_is_absent)
    if case.name in BY_STATE and not case.ours.initial:  # torch's load ends what a group sets, and rounds numbers
        worlds.do(load(copy.deepcopy)).step(2, one_is_absent).do(exchange(copy.deepcopy)).step(1)
    assert not worlds.over


@pytest.mark.parametrize("layout", ["dense", "with gaps", "complex", "transposed"])
@pytest.mark.parametrize("nbytes", [0, 8])
@pytest.mark.parametrize("what", ["param", "state"])
def test_what_has_lost_its_memory_is_refused_before_the_launch(what: str, nbytes: int, layout: str) -> None:
    """A parameter or its state: torch's own steps write on, and tear the heap."""
    made = {
        "dense": torch.ones(50, 50), "with gaps": torch.ones(50, 100)[:, ::2], "transposed": torch.ones(50, 50).t(),
        "complex": torch.ones(50, 50, dtype=torch.complex64),
    }[layout]  # fmt: skip
    ordinary, p = torch.nn.Parameter(torch.ones(7)), torch.nn.Parameter(made)
    optimizer = PagedAdamW([ordinary, p])
    step_on_ones(optimizer)
    before = ordinary.detach().clone()
    for tensor in [p] if what == "param" else [v for v in optimizer.state[p].values() if v.dim()]:
        tensor.untyped_storage().resize_(nbytes)
    with pytest.raises(RuntimeError, match="memory for all of it"):
        optimizer.step()
    assert torch.equal(ordinary, before)
    assert float(optimizer.state[ordinary]["step"]) == 1


def test_a_refusal_says_what_has_changed_since_the_last_step() -> None:
    p, optimizer = stepped(6)
    p.data, p.grad = torch.ones(4), None
    p.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"'exp_avg'.*parameter 0 of shape \(4,\)") as caught:
        optimizer.step()
    assert caught.value.__notes__ == ["since the last step: tensor 0 of param has shape (4,), the table has (6,)"]


def test_a_refusal_is_said_once() -> None:
    p, optimizer = stepped(6)
    p.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory") as caught:
        optimizer.step()
    assert not hasattr(caught.value, "__notes__")


def test_state_in_bfloat16_of_complex_parameters_is_refused_at_once() -> None:
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex"):
        PagedAdamW([p, q], state_format="bfloat16")
    optimizer = PagedAdamW([p], state_format={"exp_avg": "bfloat16"})
    with pytest.raises(ValueError, match="complex"):
        optimizer.add_param_group({"params": [q]})
    assert len(optimizer.param_groups) == 1


def test_state_in_float32_of_a_complex128_parameter_is_complex64() -> None:
    p = ready(3, 1 + 2j, torch.complex128)
    optimizer = PagedAdamW([p], state_format="float32")
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.complex64
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((3,), 0.1 + 0.2j))


def test_complex_state_of_a_real_parameter_is_refused() -> None:
    p, optimizer = stepped()
    optimizer.state[p]["exp_avg_sq"] = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="complex64"):
        optimizer.step()


# --- what no longer fits is noticed before anything is updated, whichever way a step looks ----------------------------


def shrunk(p: Any) -> None:
    p.data = p.data[:2]


def recast(p: Any) -> None:
    """With its gradient, as module.half() does; else torch follows."""
    p.grad, p.data = None, p.data.half()
    p.grad = torch.ones_like(p)


HARMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shrunk": (shrunk, r"tensor 1 of param has shape \(2,\), the table has \(5,\)"),
    "freed": (lambda p: p.grad.untyped_storage().resize_(0), "tensor 1 of grad has no memory"),
    "recast": (recast, "tensor 1 of param is torch.float16"),
    "resized": (lambda p: p.grad.resize_(1), r"tensor 1 of grad has shape \(1,\)"),
    "sparse": (lambda p: setattr(p, "grad", torch.ones(5).to_sparse()), "AdamW does not support sparse gradients"),
}


@pytest.mark.parametrize(("harm", "message"), HARMS.values(), ids=HARMS)
@pytest.mark.usefixtures("look")
def test_a_tensor_that_changed_is_noticed_before_anything_is_updated(harm: Any, message: str) -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5, 7)]
    double = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))  # another launch, prepared after the first
    opt = PagedAdamW([double, *params])
    for _ in range(6):
        step_on_ones(opt)
    others = [params[0], params[2], double]
    before = [p.clone() for p in others]
    harm(params[1])
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        opt.step()
    assert same(others, before)
    assert float(opt.state[double]["step"]) == 6


@pytest.mark.usefixtures("look")
def test_versions_of_what_is_written_go_up_and_no_others() -> None:
    params = [ready(), ready()]
    opt = PagedAdamW(params)
    for step in range(6):
        params[1].grad = None if step % 2 else torch.ones(3)
        written = [*params, opt.state[params[0]].get("exp_avg", params[0])]
        before = [t._version for t in written]
        opt.step()
        assert [t._version - v for t, v in zip(written, before, strict=True)] == [1, 1 - step % 2, 1]
