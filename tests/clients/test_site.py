"""The site is built without a warning, has all pages, and asks no other machine for anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from children import run
from paths import ROOT

import pagedopt

#: What a browser fetches by itself; links are for people.
FETCHED = re.compile(r"<(?:script|img|iframe|source)[^>]*\bsrc=[\"'](https?:)?//|<link[^>]*\bhref=[\"'](?:https?:)?//"
                     r"|url\([\"']?(?:https?:)?//|@import")  # fmt: skip


def test_the_site_is_whole_and_foreign_to_nobody(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `pip install .[docs]` brings it")
    done = run("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stderr
    pages = {path.name for path in (ROOT / "notes").glob("*.md")} - {"README.md"}
    assert {f"{Path(page).stem}.html" for page in pages} | {"index.html", "notes.html", "api.html"} <= {
        path.name for path in tmp_path.glob("*.html")
    }
    api = (tmp_path / "api.html").read_text()
    assert [name for name in dir(pagedopt) if not name.startswith("_") and f"pagedopt.{name}" not in api] == []
    assert "memory_report" in api, "a method that an optimizer inherits"
    for path in (*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")):
        text = path.read_text()
        assert not FETCHED.findall(text), path.name
        for target in re.findall(r"<img[^>]*\bsrc=\"([^\":]+)\"", text):
            assert (path.parent / target).exists(), (path.name, target)
