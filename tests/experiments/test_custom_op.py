"""Operators and what torch is told of them, lies that are caught, and pasted texts."""

from __future__ import annotations

import pytest
import torch

from experiments.operators import told
from experiments.works import judged_lies, list_operators, muladd, pasted_cases, pasted_text, planted_lies
from experiments.works.list_operators import CUSTOM_OP, DIRECT, EXTENSION, OURS
from experiments.works.muladd_used import CALLED, COMPILED, DIFFERENTIATED, EXPORTED, TRAINED

CPU = torch.device("cpu")


# --- told


def test_the_operator_is_a_times_b_plus_c() -> None:
    a, b = torch.linspace(1, 2, 12).view(3, 4), torch.linspace(-1, 1, 12).view(3, 4)
    for level in muladd.LEVELS:
        assert torch.allclose(muladd.told(level)(a, b, 0.25), a * b + 0.25), level


@pytest.mark.parametrize(
    ("level", "use", "want"),
    [
        (muladd.NOTHING, CALLED, told.RIGHT),
        (muladd.NOTHING, COMPILED, told.REFUSED),
        (muladd.OP, COMPILED, told.REFUSED),
        (muladd.OP, DIFFERENTIATED, told.WRONG),
        (muladd.FAKE, COMPILED, told.RIGHT),
        (muladd.FAKE, TRAINED, told.WRONG),
        (muladd.FAKE, EXPORTED, told.RIGHT),
        (muladd.AUTOGRAD, TRAINED, told.RIGHT),
        (muladd.NOW, TRAINED, told.RIGHT),
    ],
)
def test_what_torch_is_told_decides_what_works(level: str, use: str, want: str) -> None:
    found, said = told.found(use, muladd.told(level), CPU)
    assert found == want
    assert bool(said) is (want != told.RIGHT)


# --- lies


def test_opcheck_catches_a_secret_write_and_nobody_one_that_goes_elsewhere() -> None:
    secret, elsewhere = (judged_lies.checked(name, CPU) for name in (planted_lies.SECRET, planted_lies.OWN))
    assert secret["opcheck"] == "test_schema"
    assert (elsewhere["opcheck"], elsewhere["eager"]) == ("", judged_lies.RIGHT)
    assert judged_lies.compiled(planted_lies.OWN, CPU, "aot_eager")[0] == judged_lies.WRONG


def test_gradcheck_alone_catches_a_wrong_gradient() -> None:
    row = judged_lies.checked(planted_lies.GRADIENT, CPU)
    assert (row["opcheck"], row["eager"], row["gradcheck"]) == ("", judged_lies.WRONG, True)


# --- ways


def test_every_way_registers_an_operator_that_writes_its_first_list() -> None:
    for name in (OURS, CUSTOM_OP):
        made = list_operators.WAYS[name]()
        assert made([torch.ones(2)], [torch.ones(2)]) is None
    schema = torch.ops.pagedopt.lists_of_nothing.default._schema
    assert [argument.alias_info is not None for argument in schema.arguments] == [True, False]
    assert list_operators.lines_of(DIRECT) < list_operators.lines_of(CUSTOM_OP) < list_operators.lines_of(EXTENSION)


# --- black boxes


def test_pasting_breaks_where_composed_rules_do_not() -> None:
    works = {case: pasted_cases.as_text(pasted_text.NUMBA, case, CPU)() for case in pasted_cases.CASES}
    right = [case for case, same in works.items() if same]
    assert right == [pasted_cases.WORKS, pasted_cases.LOCAL]
    composed = [case for case in pasted_cases.CASES if case not in (pasted_cases.REDUCTION, pasted_cases.ELSEWHERE)]
    assert all(pasted_cases.as_rules(case, CPU)() for case in composed)
