"""``notes/optimizers.md`` is made of the rules, and what it says of those that are none is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import pagedopt
from pagedopt.optim.foreign_options import NO_RULES
from pagedopt.rules import sqrt
from tests.optim import optimizers_page


def test_the_table_is_made_of_the_rules() -> None:
    assert optimizers_page.PAGE.read_text() == optimizers_page.page(), "write it anew, as optimizers_page.py says"


@pytest.mark.parametrize("name", ["LAMB", "PagedLAMB8bit", "LARS", "Adafactor", "Muon", "PagedMuon", "SOAP", "Shampoo"])
def test_what_no_rule_can_do_is_refused_by_name_with_the_page(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}': it needs .*; notes/optimizers.md says what"):
        getattr(pagedopt, name)
    assert re.search(rf"\b{name.removeprefix('Paged').removesuffix('8bit')}\b", optimizers_page.PAGE.read_text())
    assert name in NO_RULES


def test_lamb_in_three_calls_is_the_papers(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", optimizers_page.PAGE.read_text(), re.S)
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
