"""A parameter as a kernel sees it: complex numbers, gaps, and layouts that differ work as they do in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import DEVICES
from optim_support import ready, step_on_ones, stepped

from pagedopt import PagedAdamW, PagedSGD
from tests.acts import each_entry, grads
from tests.loads import exchange, load
from tests.specs import BY_STATE as OPTIMIZERS
from tests.specs import SPECS
from tests.world import DENSE, HALF, RESIDENT, SPILLED, Act, World, Worlds, numbers, one_group, values

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


def odd(device: str) -> list[torch.Tensor]:
    """Odd parameters between ordinary ones."""
    made = [make(20 + i, device) for i, make in enumerate(MAKERS.values())]
    return [numbers((33, 3), 7, device), *made, numbers((5,), 9, device)]


def one_is_absent(world: World) -> None:
    if world.count % 3 == 2:
        world.params[world.count % len(world.params)].grad = None


ODD: dict[str, Any] = {"make": odd, "groups": one_group}
PLACED = (RESIDENT, DENSE, SPILLED, HALF)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_odd_parameters_follow_torch(name: str, device: str) -> None:
    """And have the bits of those that are contiguous."""
    worlds = Worlds(OPTIMIZERS[name], *PLACED, device=device, **ODD).step(7, one_is_absent)
    worlds.do(load(copy.deepcopy)).step(3, one_is_absent).do(exchange(copy.deepcopy)).step(2, one_is_absent)
    assert not worlds.over


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
    worlds = Worlds(OPTIMIZERS[name], RESIDENT, DENSE, device=device, **ODD).step(2)
    assert not worlds.step(2, grads(GRADIENTS[change])).over


def of_parameters(change: Callable[[torch.Tensor], torch.Tensor]) -> Act:
    return lambda world: [setattr(p, "data", change(p.data)) for p in world.params]


EDITS: dict[str, Act] = {
    "parameters moved": of_parameters(torch.clone),
    "parameters contiguous": of_parameters(GRADIENTS["contiguous"]),
    "parameters in other strides": of_parameters(GRADIENTS["reversed"]),
    "parameters with gaps": of_parameters(GRADIENTS["with gaps"]),
    "state contiguous": each_entry(torch.Tensor.contiguous),
    "state with gaps": each_entry(lambda t: GRADIENTS["with gaps"](t) if t.dim() else t),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("edit", EDITS)
def test_layouts_may_change_in_training(edit: str, device: str) -> None:
    worlds = Worlds(OPTIMIZERS["adamw"], *PLACED, device=device, **ODD).step(3).do(EDITS[edit])
    assert not worlds.step(3, one_is_absent).over


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
