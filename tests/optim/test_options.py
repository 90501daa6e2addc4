"""What docstrings and ``notes/options.md`` say of options: it is of one table, and it is so."""

from __future__ import annotations

import pydoc
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import pagedopt
from pagedopt.formats.int8 import BLOCK, FEWEST, MAX_DECAY, SLOW
from pagedopt.optim.options import MAX_SEED, TABLE
from pagedopt.optim.registry import OPTIMIZERS
from pagedopt.paging.budget import Budget
from tests.optim import options_page

CLASSES = [pagedopt.PagedOptimizer, *(entry.optimizer for entry in OPTIMIZERS)]
VALUES = [(name, value) for name, option in TABLE.items() for value in option.taken]


def each(values: str) -> list[Any]:
    """The values that a line of the table has."""
    return list(eval(f"({values},)", {"torch": torch, "pagedopt": pagedopt}))


def test_the_page_is_made_of_the_table() -> None:
    assert options_page.PAGE.read_text() == options_page.page(), "write it anew, as tests/optim/options_page.py says"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_help_of_a_class_says_every_option(kind: type) -> None:
    said = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    for name, option in TABLE.items():
        assert f"{name} = {option.written}: {option.what}. {option.choice}." in said


def test_the_help_of_the_options_says_every_value() -> None:
    said = " ".join((pagedopt.Options.__doc__ or "").split())
    for option in TABLE.values():
        assert all(f" {value}: {' '.join(meaning.split())}." in said for value, meaning in option.values.items())


def test_the_numbers_of_8_bits_are_those_of_the_format() -> None:
    of_format, of_rounding = TABLE["state_format"].values['"int8", "8bit"'], TABLE["rounding"].values["None"]
    assert f"below {FEWEST:,} elements" in of_format
    assert f"for each {BLOCK}: {2 * (1 + 4 / BLOCK):.2f} bytes" in of_format
    assert of_format.endswith(f"above {MAX_DECAY}")
    assert f"{SLOW} or more" in of_rounding
    assert each(next(iter(TABLE["seed"].values))) == [0, MAX_SEED]


def test_options_with_more_values_than_are_listed_say_their_range() -> None:
    page = options_page.page()
    for name, said in {"seed": f"whole numbers from 0 to {MAX_SEED:,}",
                       "blocks": "None, or a whole number from 1 on"}.items():  # fmt: skip
        assert TABLE[name].choice == said
        assert f"\n## {name}\n\nValues: {said}.\n" in page


def literals(hint: Any) -> set[Any]:
    """The values that a type names."""
    if typing.get_origin(hint) is Literal:
        return set(typing.get_args(hint))
    return set().union(*map(literals, typing.get_args(hint)))


@pytest.mark.parametrize("name", TABLE)
def test_every_name_that_an_option_takes_is_in_the_table(name: str) -> None:
    option = TABLE[name]
    known = [value for values in option.values for value in each(values)]
    assert option.default in known
    assert literals(typing.get_type_hints(pagedopt.Options)[name]) <= {v for v in known if isinstance(v, str)}


@pytest.mark.parametrize(("name", "values"), VALUES)
@pytest.mark.filterwarnings("ignore:placement:UserWarning")
def test_what_the_table_shows_is_taken(name: str, values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", str(tmp_path))
    dtype = torch.float16 if "torch.float16" in values else torch.float32
    needed = {"max_grad_norm": 1.0} if name == "skip_nonfinite" else {}
    for value in each(values):
        pagedopt.PagedAdamW([torch.nn.Parameter(torch.ones(3, dtype=dtype))], **needed, **{name: value})


#: What the table's budgets are, in the words of their class.
BUDGETS = {
    'None, "all"': "all of the state",
    '"2GiB", "500 MB", 2e9, 65536': "2.00 GiB, 477 MiB, 1.86 GiB, 64.0 KiB",
    "0": "0 B",
    '"50%", 0.5': "50% of the state",
    "1.0": "100% of the state",
    '1, "50"': "refused",
    '"20 ms"': "refused",
    '"auto"': "what the device can spare",
}


def meant(value: Any) -> str:
    try:
        budget = Budget(value)
        budget.check_unit()
    except ValueError:
        return "refused"
    return str(budget)


def test_budgets_mean_what_the_table_says() -> None:
    option = TABLE["device_budget"]
    found = {values: ", ".join(dict.fromkeys(map(meant, each(values)))) for values in option.values}
    assert found == BUDGETS
    assert option.taken == [values for values in found if found[values] != "refused"]


def test_state_of_bfloat16_parameters_is_bfloat16_unless_asked() -> None:
    for value, dtype in ((None, torch.bfloat16), ("float32", torch.float32)):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = pagedopt.PagedAdamW([p], state_format=value)
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype is dtype
