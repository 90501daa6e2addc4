"""Variables of the environment that choose between two ways: other values are told, once."""

from __future__ import annotations

import warnings

import pytest
import torch

from pagedopt import PagedAdamW
from pagedopt.placements import store
from pagedopt.system import look as build
from pagedopt.system import warn

WAYS = [(build.VARIABLE, "python", "compiled"), (store.VARIABLE, "calls", "graph")]
pytestmark = pytest.mark.parametrize(("variable", "word", "usual"), WAYS)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_said", set())


def made() -> PagedAdamW:
    return PagedAdamW([torch.nn.Parameter(torch.ones(3))])


def takes_the_usual_way(variable: str) -> bool:
    return build.is_wanted() if variable == build.VARIABLE else made().store.graphs.wanted


def test_what_has_a_meaning_is_not_told(variable: str, word: str, usual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (word, usual, ""):
        monkeypatch.setenv(variable, value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made()
            assert takes_the_usual_way(variable) == (value != word)


@pytest.mark.parametrize("value", ["Python", "call", "0", "1"])
def test_another_value_is_told_once(
    value: str, variable: str, word: str, usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            made()
    (warning,) = told
    assert str(warning.message) == (
        f"{variable}={value!r} has no meaning and is ignored: use {word!r}, or {usual!r}, as without it"
    )
    assert warning.filename == __file__
    assert takes_the_usual_way(variable)
