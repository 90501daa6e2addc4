"""The flags and hyperparameters of torch's classes are taken and refused as torch does, with its type of error.

What is asked is the installed torch.  ``capturable`` and ``differentiable`` are refused by name, and are not among it;
nor are complex parameters with ``fused=True``, which torch refuses and these classes update.
"""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import pytest
import torch
from optim_support import ready

import pagedopt
from pagedopt.formats.int8 import BLOCK, FEWEST
from pagedopt.optim.foreign_options import NAMES, OPTIONS
from pagedopt.optim.registry import OPTIMIZERS, Entry
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


# --- names of other libraries are answered with the line to write, which works ----------------------------------------


ASKED = ("PagedAdamW32bit", "PagedAdamW8bit", "PagedLion8bit", "AdamW8bit", "CPUOffloadOptimizer", "Adam8bit",
         "AdamW4bit", "AdamWFp8", "GlobalOptimManager")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_class_of_theirs_is_answered_with_a_line_that_works(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^module 'pagedopt' has no attribute '{name}': ") as caught:
        getattr(pagedopt, name)
    text = str(caught.value)
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        exec(f"from pagedopt import {name}")
    assert not hasattr(pagedopt, name)
    assert ("not there yet" in text) == name.endswith(("4bit", "Fp8"))
    assert ("state_format='int8'" in text) == name.endswith(("8bit", "4bit", "Fp8", "GlobalOptimManager"))
    assert (f"below {FEWEST:,} elements" in text) == name.endswith("8bit")
    found = re.search(r"pagedopt\.(\w+)\(params, …(.*?)\)", text)
    assert found
    params = [ready()]
    optimizer = eval(f"pagedopt.{found[1]}(params{found[2]})", {"pagedopt": pagedopt, "params": params})
    optimizer.step()
    assert (params[0] != 1).all()


@pytest.mark.parametrize("name", [name for name in NAMES if "Adam" in name and "AdamW" not in name])
def test_lines_for_adam_have_the_numbers_of_adam(name: str) -> None:
    found = re.search(r"pagedopt\.PagedAdam\(params, …(.*?)\)", NAMES[name])
    assert found
    assert ("device_budget" in found[1]) == name.startswith("Paged")
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    optimizer = eval(f"pagedopt.PagedAdam([ours]{found[1]})", {"pagedopt": pagedopt, "ours": ours})
    rival = torch.optim.Adam([theirs])
    ours.grad = theirs.grad = torch.linspace(1, -1, 9)
    for _ in range(20):
        optimizer.step()
        rival.step()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)  # so few elements have state in float32


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("8bit")])
def test_lines_for_8_bits_store_8_bits(name: str) -> None:
    found = re.search(r"pagedopt\.(\w+)\(params, …(.*?)\)", NAMES[name])
    assert found
    large, small = (ready(numel) for numel in (FEWEST, FEWEST - 1))
    more = ", momentum=0.9" if found[1] == "PagedSGD" else ""
    names = {"pagedopt": pagedopt, "params": [large, small]}
    optimizer = eval(f"pagedopt.{found[1]}(params{found[2]}{more})", names)
    optimizer.step()
    for p, dtypes in ((large, {torch.int8, torch.uint8}), (small, {torch.float32})):
        elements = [value.dtype for value in optimizer.state[p].values() if value.shape == p.shape]
        assert elements
        assert set(elements) <= dtypes


def test_a_group_is_what_overrides_8_bits() -> None:
    """As the answer to ``GlobalOptimManager`` has it."""
    text = NAMES["GlobalOptimManager"]
    group, line = re.search(r"\{.*?\}", text), re.search(r"pagedopt\.\w+\(.*?\)", text)
    assert group
    assert line
    few, rest = ready(FEWEST), ready(FEWEST)
    groups = [eval(group[0].replace("…", "[few]"), {"few": few}), {"params": [rest]}]
    optimizer = eval(line[0].replace(", …", ""), {"pagedopt": pagedopt, "params": groups})
    optimizer.step()
    assert optimizer.state[few]["exp_avg_sq"].dtype is torch.float32
    assert optimizer.state[rest]["exp_avg_sq.root4"].dtype is torch.uint8


def test_those_that_people_look_for_are_there() -> None:
    assert set(ASKED) <= set(NAMES)
    assert not set(NAMES) & set(pagedopt.__all__)  # no class pretends


def test_no_option_says_that_8_bits_are_missing() -> None:
    for name in ("optim_bits", "block_wise", "block_size", "min_8bit_size"):
        assert "state_format='int8'" in OPTIONS[name]
        assert "not there" not in OPTIONS[name]
    assert f"below {FEWEST:,} elements" in OPTIONS["min_8bit_size"]
    assert f"{BLOCK} elements" in OPTIONS["block_wise"]
    assert f"{BLOCK} elements" in OPTIONS["block_size"]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("entry", OPTIMIZERS, ids=lambda entry: entry.name)
def test_an_option_of_theirs_is_answered_in_words(name: str, entry: Entry) -> None:
    kind = entry.optimizer
    if name in inspect.signature(kind).parameters:
        return
    params = [torch.nn.Parameter(torch.ones(3))]
    text = rf"^{kind.__name__}\.__init__\(\) got an unexpected keyword argument '{name}': {re.escape(OPTIONS[name])}$"
    with pytest.raises(TypeError, match=text):
        kind(params, **{name: 8})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nosuch'$"):
        kind(params, nosuch=8)
