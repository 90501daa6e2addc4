"""Environment variables are in one table: what the package reads in notes/setup.md, the others in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT


def named(*files: Path) -> set[str]:
    return {name for path in files for name in re.findall(r"PAGEDOPT_[A-Z_]+", path.read_text())}


def listed(page: str) -> list[str]:
    return re.findall(r"^\| `(PAGEDOPT_[A-Z_]+)` \|", (ROOT / page).read_text(), re.M)


def test_every_variable_is_in_one_table() -> None:
    users = named(*(ROOT / "pagedopt").rglob("*.py"))
    others = [path for folder in ("experiments", "scripts") for path in (ROOT / folder).rglob("*.py")]
    developers = named(*others, ROOT / "Makefile", ROOT / ".ci/run") - users
    assert listed("notes/setup.md") == sorted(users)
    assert listed("CONTRIBUTING.md") == sorted(developers)
