"""A parameter as a kernel sees it: complex numbers, gaps, and layouts that differ work as they do in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from edits import numbers, values
from gpu_support import DEVICES
from optim_support import ready, same, step_on_ones, stepped
from torch.nn import Parameter

from pagedopt import PagedAdamW, PagedSGD
from tests.optim.specs import BY_STATE as OPTIMIZERS
from tests.optim.specs import SPECS

#: How a parameter is made, from numbers that belong to a seed.
MAKERS: dict[str, Callable[[int, str], torch.Tensor]] = {
    "complex": lambda s, d: values((30, 40), s, d, torch.complex64),
    "complex128": lambda s, d: values((7, 5), s, d, torch.complex128),
    "complex transposed": lambda s, d: values((30, 40), s, d, torch.complex64).t(),
    "complex with gaps": lambda s, d: values((30, 40), s, d, torch.complex64)[:, ::3],
    "complex scalar": lambda s, d: values((1,), s, d, torch.complex64).reshape(()),
    "with gaps": lambda s, d: numbers((30, 80), s, d)[:, ::2],
    "row with gaps": lambda s, d: numbers((50_000,), s, d)[::7],
    "transposed with gaps": lambda s, d: numbers((30, 80), s, d)[:, ::2].t(),
    "part of a matrix": lambda s, d: numbers((30, 40), s, d)[3:20, 5:9],
    "interleaved": lambda s, d: numbers((40,), s, d).as_strided((3, 2), (2, 3)),
    "bfloat16 with gaps": lambda s, d: numbers((30, 80), s, d).bfloat16()[:, ::2],
    "channels last": lambda s, d: numbers((4, 6, 5, 3), s, d).to(memory_format=torch.channels_last),
    "permuted": lambda s, d: numbers((4, 6, 5), s, d).permute(2, 0, 1),
}


def backwards(t: torch.Tensor) -> torch.Tensor:
    return t.permute(tuple(reversed(range(t.dim()))))


#: How a gradient is laid out that has the values of another.
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda g: g,
    "contiguous": lambda g: g.contiguous(),
    "reversed": lambda g: backwards(backwards(g).contiguous()),
    "with gaps": lambda g: torch.stack([g, g], -1)[..., 1],
    "conjugated": lambda g: g.conj().resolve_conj().conj(),
}


class Rounded(Parameter):
    """A parameter of torch's, in float32 if it would be bfloat16: then it and its state are rounded once a step, as by
    a kernel of ours, and not after every operation."""

    def __new__(cls, p: torch.Tensor) -> Rounded:
        narrow = p.dtype == torch.bfloat16
        made = super().__new__(cls, torch.empty_strided(p.shape, p.stride(), device=p.device).copy_(p) if narrow else p)
        made.is_rounded = narrow
        return made

    def round(self, state: dict[str, torch.Tensor]) -> None:
        for t in (self, *(t for name, t in state.items() if name != "step")) if self.is_rounded else ():
            t.data.copy_(t.data.bfloat16())


def pair(name: str, device: str, **options: Any) -> tuple[Any, Any, list[Any], list[Any]]:
    """An optimizer of ours and torch's with equal parameters, odd ones between ordinary ones."""
    worlds = []
    for theirs in (False, True):
        params = [numbers((33, 3), 7, device), *(make(20 + i, device) for i, make in enumerate(MAKERS.values()))]
        params = [(Rounded if theirs else Parameter)(p) for p in (*params, numbers((5,), 9, device))]
        how = {} if theirs else options
        worlds.append((OPTIMIZERS[name].make(theirs, [{"params": params}], **how), params))
    (ours, mine), (other, others) = worlds
    return ours, other, mine, others


def train(optimizer: Any, params: list[Any], steps: range, layout: str = "as it is") -> None:
    for step in steps:
        for i, p in enumerate(params):
            if step % 3 == 2 and i == step % len(params):
                p.grad = None
                continue
            grad = values(p.shape, 1000 * step + 10 * i, p.device.type, p.dtype)
            grad = grad.bfloat16() if getattr(p, "is_rounded", False) else grad
            p.grad = GRADIENTS[layout](torch.empty_like(p, requires_grad=False).copy_(grad))
        optimizer.step()
        for p in params:
            if isinstance(p, Rounded):
                p.round(optimizer.state[p])


def assert_close(mine: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """In bfloat16 up to one rounding that goes the other way; an update is of some twenty."""
    how = {"rtol": 2**-7, "atol": 1e-6} if mine.dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(mine, other.to(mine.dtype), msg=lambda text: f"{what}: {text}", **how)


def assert_alike(ours: Any, theirs: Any, mine: list[Any], others: list[Any]) -> None:
    for i, (a, b) in enumerate(zip(mine, others, strict=True)):
        assert_close(a, b, f"parameter {i}")
        assert a.stride() == b.stride()
        state, other = ours.state[a], theirs.state[b]
        assert state.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                assert state[key].stride() == value.stride()
                assert_close(state[key], value, f"{key} of parameter {i}")


PLACED: list[dict[str, Any]] = [{}, {"device_budget": 0}, {"device_budget": 200_000}]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", PLACED, ids=["resident", "spilled", "half"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_odd_parameters_follow_torch(name: str, options: dict[str, Any], device: str) -> None:
    ours, theirs, mine, others = pair(name, device, **options)
    train(ours, mine, range(7))
    train(theirs, others, range(7))
    assert_alike(ours, theirs, mine, others)
    saved = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(copy.deepcopy(saved))
    theirs.load_state_dict(saved)
    train(ours, mine, range(7, 10))
    train(theirs, others, range(7, 10))
    assert_alike(ours, theirs, mine, others)
    twin = copy.deepcopy(ours)
    copies = [p for group in twin.param_groups for p in group["params"]]
    train(ours, mine, range(10, 12))
    train(twin, copies, range(10, 12))
    assert same(mine, copies)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (case.name, change)
        for spec in SPECS.values()
        for case in spec.cases
        for change in GRADIENTS
        if case.name in OPTIMIZERS and (spec.conjugated or change != "conjugated")
    ],
)
def test_gradients_may_be_laid_out_otherwise(name: str, change: str, device: str) -> None:
    ours, theirs, mine, others = pair(name, device)
    for optimizer, params in ((ours, mine), (theirs, others)):
        train(optimizer, params, range(2))
        train(optimizer, params, range(2, 4), change)
    assert_alike(ours, theirs, mine, others)


def of_parameters(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, list[Any]], None]:
    def edit(optimizer: Any, params: list[Any]) -> None:
        for p in params:
            p.data = change(p.data)

    return edit


def of_state(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, list[Any]], None]:
    def edit(optimizer: Any, params: list[Any]) -> None:
        for entry in optimizer.state.values():
            entry.update({name: change(value) for name, value in entry.items() if name != "step"})

    return edit


EDITS = {
    "parameters moved": of_parameters(torch.clone),
    "parameters contiguous": of_parameters(GRADIENTS["contiguous"]),
    "parameters in other strides": of_parameters(GRADIENTS["reversed"]),
    "parameters with gaps": of_parameters(GRADIENTS["with gaps"]),
    "state contiguous": of_state(GRADIENTS["contiguous"]),
    "state with gaps": of_state(GRADIENTS["with gaps"]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("edit", EDITS)
def test_layouts_may_change_in_training(edit: str, device: str) -> None:
    ours, theirs, mine, others = pair("adamw", device)
    for optimizer, params in ((ours, mine), (theirs, others)):
        train(optimizer, params, range(3))
        EDITS[edit](optimizer, params)
        train(optimizer, params, range(3, 6))
    for i, (a, b) in enumerate(zip(mine, others, strict=True)):
        assert_close(a, b, f"parameter {i}")


@pytest.mark.parametrize("strides", [(0, 1), (3, 0)])
def test_a_parameter_that_overlaps_itself_is_refused_as_in_torch(strides: tuple[int, int]) -> None:
    for made in (PagedAdamW, torch.optim.AdamW):
        ordinary = torch.nn.Parameter(torch.ones(3))
        p = torch.nn.Parameter(torch.ones(9).as_strided((3, 3), strides))
        ordinary.grad, p.grad = torch.ones(3), torch.ones(3, 3)
        with pytest.raises(RuntimeError):
            made([p, ordinary]).step()
        if made is PagedAdamW:
            assert torch.equal(ordinary, torch.ones(3))


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


def test_a_parameter_without_state_may_be_cast_in_training() -> None:
    found = []
    for kind in (torch.optim.SGD, PagedSGD):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = kind([p], lr=0.1)
        for cast in (torch.float32, torch.float64, torch.float32):
            p.data, p.grad = p.data.to(cast), None
            p.grad = torch.linspace(1, 2, 7).to(cast)
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_a_refusal_is_said_once() -> None:
    p, optimizer = stepped(6)
    p.grad.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory") as caught:
        optimizer.step()
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("how", ["construct", "add group"])
def test_state_in_bfloat16_of_complex_parameters_is_refused_at_once(how: str) -> None:
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    if how == "construct":
        with pytest.raises(ValueError, match="complex"):
            PagedAdamW([p, q], state_format="bfloat16")
        return
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


@pytest.mark.parametrize("budget", [None, 0])
def test_complex_state_takes_its_own_bytes(budget: int | None) -> None:
    p, optimizer = stepped(1 << 18, dtype=torch.complex64, device_budget=budget)
    state = 2 * p.nbytes
    assert state <= sum(optimizer.memory_report().by_place.values()) <= state + (1 << 16)


def test_complex_state_of_a_real_parameter_is_refused() -> None:
    p, optimizer = stepped()
    optimizer.state[p]["exp_avg_sq"] = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="complex64"):
        optimizer.step()
