"""Tables keep alive what they point at, and look where it lies before they are used."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from gpu_support import DEVICES
from optim_support import ready, same, step_on
from stand_ins import raising

import pagedopt
from pagedopt import DeviceTable, PagedAdamW, Sweep, multi_tensor_apply
from pagedopt.rules import mul_scalar
from pagedopt.tables.layout import HostTable

SIZE = 5000


def fresh(device: str, count: int = 20) -> list[torch.Tensor]:
    return [torch.full((SIZE,), float(i + 1), device=device) for i in range(count)]


def rows_of(table: DeviceTable) -> np.ndarray:
    """Addresses as a kernel finds them."""
    with table.rows_on_device():
        return table.host.rows["address"].copy()


@pytest.mark.parametrize("device", DEVICES)
def test_a_dropped_list_is_not_handed_to_others(device: str) -> None:
    tensors = fresh(device)
    table, sweep = DeviceTable([tensors], writes=[0]), Sweep(mul_scalar, [tensors])
    addresses, watched = [t.data_ptr() for t in tensors], [weakref.ref(t) for t in tensors]
    tensors.clear()
    gc.collect()
    assert all(w() is not None for w in watched)
    others = fresh(device, 60)
    assert not {t.data_ptr() for t in others} & set(addresses)
    sweep.run({"scalar": 3.0})
    assert rows_of(table)[:, 0].tolist() == addresses
    assert all(torch.equal(w(), torch.full((SIZE,), 3.0 * (i + 1), device=device)) for i, w in enumerate(watched))  # type: ignore[arg-type]
    assert same(others, fresh(device, 60))
    del sweep, table
    gc.collect()
    assert all(w() is None for w in watched)


@pytest.mark.parametrize("device", DEVICES)
def test_a_list_that_is_made_when_it_is_asked_for_is_made_once(device: str) -> None:
    class Lazy(list):  # type: ignore[type-arg]
        """Each look at it finds other tensors."""

        def __iter__(self) -> Any:
            made.append(fresh(device, 3))
            return iter(made[-1])

    made: list[list[torch.Tensor]] = []
    multi_tensor_apply(mul_scalar, [Lazy([0, 0, 0])], {"scalar": 2.0})
    assert [t[0].item() for t in made[-1]] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_with_other_memory_are_followed(device: str) -> None:
    tensors = fresh(device, 3)
    sweep, table = Sweep(mul_scalar, [tensors]), DeviceTable([tensors])
    sweep.run({"scalar": 2.0})
    old = tensors[1].data.clone()
    held = tensors[1].detach()
    tensors[1].data = old * 10
    sweep.run({"scalar": 2.0})
    assert [t[0].item() for t in tensors] == [4.0, 80.0, 12.0]
    assert torch.equal(held, old), "the memory that it had is somebody else's now"
    assert rows_of(table)[1, 0] == tensors[1].data_ptr()


def shrunk(t: torch.Tensor) -> None:
    t.resize_(0)


def grown(t: torch.Tensor) -> None:
    t.data = torch.ones(2 * SIZE, device=t.device)


def halved(t: torch.Tensor) -> None:
    t.data = t.data.half()


def freed(t: torch.Tensor) -> None:
    t.untyped_storage().resize_(0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", [shrunk, grown, halved, freed])
def test_tensors_that_can_no_longer_be_used_are_refused_before_the_launch(change: Any, device: str) -> None:
    tensors = fresh(device, 3)
    sweep, table = Sweep(mul_scalar, [tensors]), DeviceTable([tensors])
    change(tensors[1])
    for use in (lambda: sweep.run({"scalar": 2.0}), lambda: rows_of(table), lambda: table.rows):
        if device == "cuda" and change is halved:
            continue  # a list of two dtypes, which the next line shows
        with pytest.raises((ValueError, TypeError), match="tensor 1 of"):
            use()
    assert (tensors[0][0].item(), tensors[2][0].item()) == (1.0, 3.0)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_let_go_after_the_step(device: str) -> None:
    params = [torch.nn.Parameter(t) for t in fresh(device, 20)]
    opt = PagedAdamW(params)
    for step in range(3):
        for p in params:
            p.grad = torch.full_like(p, step + 1.0)
        watched = [weakref.ref(p.grad) for p in params]
        opt.step()
        opt.zero_grad()
        gc.collect()
        assert all(w() is None for w in watched)


@pytest.mark.exclusive
@pytest.mark.parametrize("device", DEVICES[1:])
def test_after_zero_grad_as_much_is_allocated_as_with_torch(device: str) -> None:
    def allocated(make: Any) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        opt = make([torch.nn.Parameter(t) for t in fresh(device, 50)])
        for step in range(3):
            step_on(opt, step + 1)
            opt.zero_grad()
        return torch.cuda.memory_allocated() - before

    assert allocated(PagedAdamW) == allocated(lambda p: torch.optim.AdamW(p, foreach=False))


def test_a_refresh_that_fails_while_writing_is_made_good_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the table would say that a gradient lies where the one before did."""
    monkeypatch.setenv("PAGEDOPT_LOOK", "python")  # the compiled look writes by itself
    params, twins = ([torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
    opt, twin = PagedAdamW(params), torch.optim.AdamW(twins, foreach=False)
    kept = []
    for step in range(4):
        for a, b in zip(params, twins, strict=True):
            a.grad, b.grad = torch.full((3,), step - 1.5), torch.full((3,), step - 1.5)
            kept.append(a.grad)
        if step == 2:
            with monkeypatch.context() as patch:
                patch.setattr(HostTable, "set_column", raising(MemoryError()))
                with pytest.raises(MemoryError):
                    opt.step()
        opt.step()
        twin.step()
    torch.testing.assert_close(params, twins)


@pytest.mark.parametrize("budget", [None, 0])
def test_a_first_step_that_is_refused_leaves_nothing_behind(budget: int | None) -> None:
    """SGD with dampening takes its first gradient undamped; a buffer of zeros that stayed would count as a step."""
    results = []
    for make in (lambda p: pagedopt.PagedSGD(p, 0.1, 0.9, 0.5, device_budget=budget),
                 lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5, foreach=False)):  # fmt: skip
        params = [ready(4), torch.nn.Parameter(torch.ones(2, 2))]
        opt = make(params)
        params[1].grad = torch.ones(2, 2).to_sparse()
        if isinstance(opt, pagedopt.PagedSGD):
            with pytest.raises(RuntimeError, match="sparse"):
                opt.step()
            assert not opt.state
        for step in range(3):
            step_on(opt, step + 0.5)
        results.append(params)
    torch.testing.assert_close(*results)
