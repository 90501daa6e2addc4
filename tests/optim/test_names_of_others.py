"""Names and options of other libraries are answered with the line to write, which works."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from optim_support import ready

import pagedopt
from pagedopt.formats.int8 import FEWEST
from pagedopt.optim.foreign_options import NAMES, OPTIONS
from pagedopt.optim.registry import OPTIMIZERS, Entry


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
