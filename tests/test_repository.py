"""Files for those who work on the project say what is so."""

from __future__ import annotations

import re
import tomllib

from command_line import Program
from paths import ROOT


def test_hooks_run_what_make_lint_runs() -> None:
    """The same ruff, with the same options, and the same files as the whole."""
    lint = re.search(r"^lint:.*?\n\n", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert lint
    entries = re.findall(r"entry: \.venv/bin/python -m (ruff .*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert entries == ["ruff check", "ruff format --check"]
    for entry in entries:
        assert f"$(PY) -m {entry} .\n" in lint[0]


def test_editors_and_ruff_agree_on_lines() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert f"max_line_length = {ruff['line-length']}" in (ROOT / ".editorconfig").read_text()


def test_what_the_issue_template_asks_for_is_there(program: Program) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "problem.yml").read_text()
    assert "`pagedopt doctor --json`" in text
    report = program.reports("doctor", "--quick", "--device", "cpu")
    assert {"packages", "cards", "host", "placements"} <= report.keys()
    assert "print(optimizer.memory_report())" in text


def test_the_changelog_is_short_and_has_its_headings() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^### (\w+)$", text, re.M) == ["Added", "Removed"]
    assert len(text.split()) <= 400


def test_planted_faults_name_what_is_there() -> None:
    """``scripts/plant_faults.py`` replaces a text that stands once in its file, and runs test files that exist."""
    listed = tomllib.loads((ROOT / "tests" / "planted_faults.toml").read_text())
    for name, area in listed["area"].items():
        assert all(any(ROOT.glob(pattern)) for pattern in area["files"]), name
        assert all((ROOT / path).is_file() for path in area["tests"].split()), name
    for fault in listed["fault"]:
        text = (ROOT / fault["file"]).read_text()
        assert text.count(fault["before"]) == 1, fault["what"]
        faulty = text.replace(fault["before"], fault["after"])
        assert faulty != text
        if fault["file"].endswith(".py"):
            compile(faulty, fault["what"], "exec")
        assert (ROOT / fault["test"].split()[0]).is_file(), fault["what"]
