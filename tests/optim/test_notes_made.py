"""Notes that are made of the package are as it is now, and say all of it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

import pagedopt
from pagedopt import MemoryReport, PagedOptimizer
from pagedopt.optim.foreign_options import NO_RULES
from pagedopt.optim.overlap.overlap import OverlapReport
from pagedopt.optim.registry import OPTIMIZERS
from pagedopt.optim.rule_optimizer import RuleOptimizer
from pagedopt.rules import sqrt

sys.path.append(str(ROOT / "scripts"))
from notes_made import PAGES, PARTS, entries_of, file_of, sections_of


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_the_package(name: str) -> None:
    assert file_of(name).read_text() == PAGES[name](), "write it anew, as scripts/notes_made.py says"


# --- ``methods.md``: all that optimizers offer beside torch's ---------------------------------------------------------


LISTED = [thing for things in PARTS.values() for thing in things]


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
    for page in ("README.md", "notes/README.md", "notes/usage.md"):
        assert "methods.md)" in (ROOT / page).read_text(), page


# --- ``optimizers.md`` ------------------------------------------------------------------------------------------------


def test_the_front_page_counts_them() -> None:
    assert (
        f"AdamW and [{len(OPTIMIZERS) - 1} other optimizers](notes/optimizers.md)" in (ROOT / "README.md").read_text()
    )


@pytest.mark.parametrize("name", ["LAMB", "PagedLAMB8bit", "LARS", "Adafactor", "Muon", "PagedMuon", "SOAP", "Shampoo"])
def test_what_no_rule_can_do_is_refused_by_name_with_the_page(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}': it needs .*; notes/optimizers.md says what"):
        getattr(pagedopt, name)
    assert re.search(rf"\b{name.removeprefix('Paged').removesuffix('8bit')}\b", file_of("optimizers").read_text())
    assert name in NO_RULES


def test_lamb_in_three_calls_is_the_papers(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", file_of("optimizers").read_text(), re.S)
    assert code
    (tmp_path / "lamb.py").write_text(code[1])  # a rule is read from its file
    generator = torch.Generator().manual_seed(1)
    lists = [[torch.rand(n, generator=generator) for n in (70, 3)] for _ in range(5)]
    numbers = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "step": 3}
    want = []
    for p, g, m, v in zip(*[[t.double() for t in each] for each in lists[:4]], strict=True):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        update = m / (1 - 0.9**3) / ((v / (1 - 0.99**3)).sqrt() + 1e-6) + 0.1 * p
        want.append(p - 0.05 * p.norm() / update.norm() * update)
    names = dict(zip(("params", "grads", "exp_avgs", "exp_avg_sqs", "updates"), lists, strict=True))
    names |= {"pagedopt": pagedopt, "sqrt": sqrt, "numbers": numbers, "lr": 0.05, "__name__": "lamb"}
    exec(compile(code[1], str(tmp_path / "lamb.py"), "exec"), names)
    for p, expected in zip(lists[0], want, strict=True):
        torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-6)
