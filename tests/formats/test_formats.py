"""How state is stored is asked for by names that exist."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pagedopt
from pagedopt.formats import FORMATS, Format
from pagedopt.formats.floating import StateFormat, check_format, chosen_format

STATES = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(
    "state_format", [None, "bfloat16", {}, {"exp_avg": "bfloat16"}, {"exp_avg": None, "exp_avg_sq": "float32"}]
)
@pytest.mark.parametrize("states", [None, STATES, frozenset(STATES)])
def test_formats_of_known_states_are_taken(state_format: StateFormat, states: tuple[str, ...] | None) -> None:
    check_format(state_format, states)


@pytest.mark.parametrize(
    ("given", "name"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("float", "float32"),
     ("double", "float64"), ("fp64", "float64"), *((form.columns[0].dtype, name) for name, form in FORMATS.items())],
    ids=str,
)  # fmt: skip
def test_dtypes_and_short_names_are_formats_too(given: Any, name: str) -> None:
    for said, key in ((given, given), ({"exp_avg": given}, given)):
        check_format(said, STATES)
        assert chosen_format(said, "exp_avg") is FORMATS[name], key
    net = torch.nn.Linear(3, 2)
    one, other = (pagedopt.PagedAdamW(net.parameters(), state_format=form) for form in (given, name))
    net(torch.ones(1, 3)).sum().backward()
    for optimizer in (one, other):
        optimizer.step()
    assert (
        one.state[net.weight]["exp_avg"].dtype
        is other.state[net.weight]["exp_avg"].dtype
        is FORMATS[name].columns[0].dtype
    )
    assert copy.deepcopy(one).state_format == given
    assert pagedopt.estimate([(5, 5)], state_format=given) == pagedopt.estimate([(5, 5)], state_format=name)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_state_cannot_have_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"state_format is {dtype}; there are float32"):
        check_format(dtype)


@pytest.mark.parametrize("states", [None, STATES])
def test_an_unknown_format_is_refused(states: tuple[str, ...] | None) -> None:
    for state_format in ("int8", {"exp_avg": "int8"}):
        with pytest.raises(
            ValueError, match="state_format is 'int8'; there are float32, bfloat16, float16, float64, or None"
        ):
            check_format(state_format, states)


@pytest.mark.parametrize("value", ["bfloat16", None])
def test_an_unknown_state_is_refused_with_the_names_there_are(value: str | None) -> None:
    text = "state_format names the state 'no_such_state'; there are exp_avg, exp_avg_sq"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        check_format({"exp_avg": "bfloat16", "no_such_state": value}, STATES)


def test_an_optimizer_without_state_says_so() -> None:
    with pytest.raises(ValueError, match="'momentum_buffer'; there is none"):
        check_format({"momentum_buffer": "bfloat16"}, ())


def test_any_state_may_be_named_where_states_are_not_known() -> None:
    check_format({"of_a_rule_to_come": "bfloat16"})


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_numbers_are_encoded_as_torch_converts_them(form: Format) -> None:
    values = torch.randn(257, dtype=form.arithmetic, generator=torch.Generator().manual_seed(1))
    (stored,) = form.encode(values)
    assert torch.equal(stored, values.to(form.columns[0].dtype))
    assert torch.equal(form.decode(stored, numel=257), stored.to(form.arithmetic))


def test_no_room_but_this_one_lists_dtypes() -> None:
    """A container of several in one expression: of any other module, that says what formats are to say."""
    package = Path(pagedopt.__file__).parent
    dtypes = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                items = (node.keys + node.values) if isinstance(node, ast.Dict) else node.elts
                named = [i for i in items if isinstance(i, ast.Attribute) and i.attr in dtypes]
                if len(named) > 1 and path.parent.name != "formats":
                    found.append(f"{path}:{node.lineno}")
    assert found == []
