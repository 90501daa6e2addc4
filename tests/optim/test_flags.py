"""The flags and hyperparameters of torch's classes are taken and refused as torch does, with its type of error.

What is asked is the installed torch.  ``capturable`` and ``differentiable`` are refused by name, and are not among it;
nor are complex parameters with ``fused=True``, which torch refuses and these classes update.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from optim_support import ready

from tests.specs import SPECS, TWO, Spec

SPECS_OF_TORCH = [spec for spec in SPECS.values() if spec.entry.torch]
PAIRS = [(spec.entry.optimizer, spec.entry.torch) for spec in SPECS_OF_TORCH]
ONE = TWO[:1]
FUSED = [pair for pair in PAIRS if "fused" in inspect.signature(pair[1]).parameters]
VALUES: list[dict[str, Any]] = [
    {}, {"lr": TWO[0]}, {"lr": TWO}, {"lr": ONE}, {"lr": 0}, {"maximize": True}, {"nope": 1},
    {"fused": True, "differentiable": True}, {"params": []},
]  # fmt: skip


def flags_of(kind: Any) -> list[dict[str, Any]]:
    """``foreach`` and, where torch's class has it, ``fused``: each value with each."""
    names = [name for name in ("foreach", "fused") if name in inspect.signature(kind).parameters]
    values = itertools.product((None, False, True), repeat=len(names))
    return [dict(zip(names, each, strict=True)) for each in values]


def outcome(make: Any, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """What making it and a step say: the type of the error, or the flags of its group and the parameter."""
    p = ready(3, 0.5, dtype)
    params = options.get("params", [p])
    try:
        optimizer = make(params, **{name: value for name, value in options.items() if name != "params"})
        optimizer.step()
    except Exception as error:
        return (type(error),)
    group = optimizer.param_groups[0]
    return {name: group[name] for name in ("foreach", "fused", "maximize") if name in group}, p.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("spec", SPECS_OF_TORCH, ids=str)
def test_what_torch_takes_is_taken_and_what_it_refuses_is_refused(spec: Spec, dtype: torch.dtype) -> None:
    ours, theirs, refused = spec.entry.optimizer, spec.entry.torch, 0
    for values in [*VALUES, *(bad.hyper for bad in spec.bad), *spec.asked]:
        for flags in flags_of(theirs):
            options = {**flags, **values}
            if dtype.is_complex and options.get("fused"):
                continue
            mine, want = (outcome(make, options, dtype) for make in (ours, theirs))
            if values.get("lr") is ONE and want == (TypeError,):  # an older torch: see tests/contract/differences.py
                assert torch.equal(mine[-1], outcome(ours, {**options, "lr": 0.5}, dtype)[-1]), f"{options}: {mine}"
                continue
            assert len(mine) == len(want), f"{options}: {mine}, torch: {want}"
            if len(want) == 1:
                refused += 1
                assert mine == want, f"{options}"
            else:
                assert mine[0] == want[0], f"{options}"
                torch.testing.assert_close(mine[1], want[1], equal_nan=True)
    assert refused > 10


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda c: c.__name__)
def test_what_is_not_built_is_refused_by_name(ours: Any, theirs: Any) -> None:
    with pytest.raises(ValueError, match=rf"differentiable=True.*{ours.__name__}.*torch.optim.{theirs.__name__}"):
        ours([torch.nn.Parameter(torch.ones(3))], differentiable=True)


@pytest.mark.parametrize(("ours", "theirs"), FUSED, ids=lambda c: c.__name__)
def test_a_scaler_of_gradients_unscales_them_before_a_step_called_fused(ours: Any, theirs: Any) -> None:
    results = []
    for make, flags in ((ours, {"fused": True}), (theirs, {})):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = make([p], lr=0.5, **flags)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale((p * p).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(p.detach())
    torch.testing.assert_close(*results)
