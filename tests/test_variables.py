"""Environment variables stand in one table."""

from __future__ import annotations

import re

from paths import ROOT


def test_every_variable_is_in_the_readme() -> None:
    found = set()
    for folder in ("pagedopt", "experiments", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"PAGEDOPT_[A-Z_]+", path.read_text()))
    for name in ("Makefile", ".ci/run"):
        found |= set(re.findall(r"PAGEDOPT_[A-Z_]+", (ROOT / name).read_text()))
    table = re.findall(r"^\| `(PAGEDOPT_[A-Z_]+)` \|", (ROOT / "README.md").read_text(), re.M)
    assert sorted(found) == sorted(table)
