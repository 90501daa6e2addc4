"""``notes/methods.md`` is made of docstrings, and has all that optimizers offer beside torch's."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from pagedopt import MemoryReport, PagedOptimizer
from pagedopt.optim.overlap.overlap import OverlapReport
from pagedopt.optim.rule_optimizer import RuleOptimizer
from tests.optim import methods_page
from tests.optim.made_pages import entries_of, sections_of

LISTED = [thing for things in methods_page.PARTS.values() for thing in things]


def test_the_page_is_made_of_docstrings() -> None:
    assert methods_page.PAGE.read_text() == methods_page.page(), "write it anew, as tests/optim/methods_page.py says"


def test_every_method_is_there() -> None:
    """Those of :class:`RuleOptimizer` are for who writes an optimizer; of torch's, state dicts say more here."""
    own = set(dir(PagedOptimizer)) - set(dir(torch.optim.Optimizer)) - set(dir(RuleOptimizer))
    methods = {name for name in own if name[0] != "_" and inspect.isfunction(getattr(PagedOptimizer, name))}
    assert methods | {"state_dict", "load_state_dict"} == {m.__name__ for m in LISTED if inspect.isfunction(m)}
    assert len(LISTED) == len(set(LISTED))


@pytest.mark.parametrize("kind", [MemoryReport, OverlapReport])
def test_every_field_of_a_report_is_explained(kind: Any) -> None:
    lines = sections_of(inspect.getdoc(kind) or "")["Attributes"]
    assert [name for name, text in entries_of(lines) if text] == [field.name for field in dataclasses.fields(kind)]
    assert kind in LISTED


@pytest.mark.parametrize("thing", LISTED, ids=lambda thing: thing.__name__)
def test_every_argument_is_explained(thing: Any) -> None:
    if inspect.isfunction(thing) and (names := list(inspect.signature(thing).parameters)[1:]):
        sections = sections_of(inspect.getdoc(thing) or "")
        known = {name for name, _ in entries_of(sections.get("Args", []))}
        assert known == set(names)


def test_the_pages_where_one_looks_name_it() -> None:
    root = methods_page.PAGE.parent.parent
    for page in ("README.md", "notes/README.md", "notes/usage.md"):
        assert "methods.md)" in (root / page).read_text(), page
