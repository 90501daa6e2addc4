"""Clipped and scaled steps on a played card, hidden, captured, or left out: they end in the bits of a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from often import both_ways

from tests.card.card import Card
from tests.card.runs import Ends, Run, ends_of, played, some_orders

SIZES = (3000, 17, 1500, 4097)


@pytest.mark.parametrize("card_first", [True, False], ids=["card first", "host first"])
@played(some_orders)
def test_a_first_step_without_gradients_has_a_norm(run: Run, card_first: bool) -> Ends:
    """On the device of the first parameter, whichever gets gradients later."""
    there, here = run.params(SIZES[:2]), [torch.nn.Parameter(torch.ones(5))]
    groups = [{"params": each} for each in ((there, here) if card_first else (here, there))]
    optimizer = run.adamw(groups, max_grad_norm=2.0)
    found = []
    for params in ([], there, [*there, *here], []):
        optimizer.zero_grad()
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        optimizer.step()
        found.append(optimizer.grad_norm)
    assert found[0].device == optimizer.param_groups[0]["params"][0].device
    assert found[0] == 0
    return [*ends_of([*there, *here], optimizer), *(norm.cpu() for norm in found)]


def give_scaling(run: Run, optimizer: Any, number: int) -> None:
    optimizer.grad_scale = torch.full((), 8.0 + number, device=run.device)
    optimizer.found_inf = torch.full((), float(number == 2), device=run.device)


def step(run: Run, optimizer: Any, number: int, scaled: bool) -> None:
    """A step whose scale is deleted right behind it; the third one is skipped."""
    if scaled:
        give_scaling(run, optimizer, number)
    optimizer.step()
    if scaled:
        del optimizer.grad_scale, optimizer.found_inf
        torch.full((), 3.0, device=run.device)


SCALED = pytest.mark.parametrize("scaled", [False, True], ids=["clipped", "clipped and scaled"])


@both_ways
@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@SCALED
@played(some_orders)
def test_the_forward_hides_such_a_step(run: Run, scaled: bool, capturable: bool) -> Ends:
    model, optimizer = run.net(fused=scaled or None, max_grad_norm=0.01, capturable=capturable)
    found = []
    for number in range(5):
        loss = run.backward(model)
        step(run, optimizer, number, scaled)
        found += [loss, optimizer.grad_norm]
        optimizer.zero_grad()
    optimizer.wait()
    if run.card is not None:
        report = optimizer.overlap_report()
        assert report.hidden
        assert all(why.startswith("no forward of an attached model was seen") for why in report.plain)
    return [*(t.cpu() for t in found), *ends_of(model.parameters(), optimizer)]


@pytest.mark.parametrize(
    "options", [{}, {"device_budget": "16KiB", "host_access": "in_place"}, {"device_budget": "16KiB"}], ids=str
)
@SCALED
@played(some_orders)
def test_each_replay_has_the_norm_of_its_refresh(run: Run, options: dict[str, Any], scaled: bool) -> Ends:
    """Its scale lies where it lay when the step was captured."""
    params = run.params(SIZES)
    optimizer = run.adamw(params, capturable=True, fused=scaled or None, max_grad_norm=1.0, **options)
    run.gradients(params)
    step(run, optimizer, 0, scaled)
    norms, scaling = [], []
    if scaled:
        scaling = [torch.full((), 4.0, device=run.device), torch.full((), 0.0, device=run.device)]
        optimizer.grad_scale, optimizer.found_inf = scaling
    replay = run.captured(optimizer)
    for number in range(6):
        run.gradients(params)
        optimizer.max_grad_norm = 0.5 + number
        for value, tensor in zip((2.0 + number, float(number == 2)), scaling, strict=False):
            tensor.fill_(value)
        run.refresh(optimizer)
        replay()
        norms.append(optimizer.grad_norm)
    return [*ends_of(params, optimizer), *(norm.cpu() for norm in norms)]


def test_a_captured_step_knows_what_it_was_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with Card(monkeypatch).playing() as card:
        run = Run(card)
        params = run.params(SIZES)
        optimizer = run.adamw(params, capturable=True, max_grad_norm=1.0)
        run.gradients(params)
        optimizer.step()
        replay = run.captured(optimizer)
        optimizer.check_capture()
        optimizer.max_grad_norm = 2.0
        with pytest.raises(RuntimeError, match="since the step was captured max_grad_norm has changed"):
            optimizer.check_capture()
        optimizer.refresh()
        optimizer.check_capture()
        optimizer.max_grad_norm = None
        with pytest.raises(
            RuntimeError, match="this captured step is void: gradients are clipped or scaled now, and w"
        ):
            optimizer.refresh()
        del replay


@SCALED
@played(some_orders)
def test_parameters_on_both_sides(run: Run, scaled: bool) -> Ends:
    """One norm of all; the host waits for the card's part, as it does in torch's ``clip_grad_norm_``."""
    params = [*run.params(SIZES), torch.nn.Parameter(torch.arange(5.0))]
    optimizer = run.adamw(params, fused=scaled or None, max_grad_norm=1.0)
    norms = []
    for number in range(4):
        run.gradients(params[:-1])
        params[-1].grad = torch.full((5,), 3.0 + number)
        step(run, optimizer, number, scaled)
        norms.append(optimizer.grad_norm)
    return [*ends_of(params, optimizer), *(norm.cpu() for norm in norms if norm is not None)]


@pytest.mark.parametrize(("clipped", "scaled"), [(True, False), (False, True), (True, True)])
@played(some_orders)
def test_the_first_step_is_captured(run: Run, clipped: bool, scaled: bool) -> Ends:
    """All that it needs was made with the optimizer; a change of the norm before is known to the graph."""
    params = run.params(SIZES)
    own = {"max_grad_norm": 1.0 if clipped else None, "fused": scaled or None}
    optimizer = run.adamw(params, capturable=True, preallocate=True, **own)
    optimizer.max_grad_norm = 0.5 if clipped else None
    run.gradients(params)
    if scaled:
        give_scaling(run, optimizer, 0)
    run.captured(optimizer)()
    return [*ends_of(params, optimizer), *([optimizer.grad_norm.cpu()] if clipped else [])]


@pytest.mark.parametrize(
    "options",
    [{"fused": True}, {"fused": True, "device_budget": 0}, {}, {"captured": True}, {"fused": True, "scaled": True}],
    ids=str,
)
@played(some_orders)
def test_steps_without_a_finite_norm_are_left_out(run: Run, options: dict[str, Any]) -> Ends:
    """On the card, or by the host, which reads the norm; and so in each replay of a graph."""
    captured, by_scaler = options.get("captured", False), options.get("scaled", False)
    own = {name: value for name, value in options.items() if name not in ("captured", "scaled")}
    params, replay = run.params(SIZES), None
    optimizer = run.adamw(params, max_grad_norm=1.0, skip_nonfinite=True, capturable=captured, **own)
    for number in range(7):
        run.gradients(params)
        if number in (1, 4, 5):
            params[1].grad[3] = float("nan" if number == 4 else "inf")
        if replay is not None:
            run.refresh(optimizer)
            replay()
            continue
        step(run, optimizer, number, by_scaler)
        if captured and number == 2:
            replay = run.captured(optimizer)
    counts = [optimizer.state[p]["step"].detach().cpu() for p in params]
    skipped = torch.tensor(optimizer.skipped)
    return [*ends_of(params, optimizer), *counts, skipped, optimizer.grad_norm.cpu()]
