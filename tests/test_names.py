"""Test files that pytest imports by their bare names need different ones: one process may be given any two of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_files_have_one_name() -> None:
    files = [p for p in Path(__file__).parent.rglob("*.py") if not (p.parent / "__init__.py").exists()]
    names = Counter(p.name for p in files if p.name != "conftest.py")  # pytest knows those by their folders
    assert [name for name, count in names.items() if count > 1] == []
