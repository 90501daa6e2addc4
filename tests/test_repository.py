"""Files for those who work on the project say what is so."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from command_line import Program
from paths import ROOT
from slices import SLICES, Slice, slice_of


def test_hooks_run_what_make_lint_runs() -> None:
    """The same ruff, with the same options, and the same files as the whole."""
    lint = re.search(r"^lint:.*?\n\n", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert lint
    entries = re.findall(r"entry: \.venv/bin/python -m (ruff .*)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert entries == ["ruff check", "ruff format --check"]
    for entry in entries:
        assert f"$(PY) -m {entry} .\n" in lint[0]


def test_what_the_issue_template_asks_for_is_there(program: Program) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "problem.yml").read_text()
    assert "`pagedopt doctor --json`" in text
    report = program.reports("doctor", "--quick", "--device", "cpu")
    assert {"packages", "cards", "host", "placements"} <= report.keys()
    assert "print(optimizer.memory_report())" in text


def test_the_changelog_is_short_and_has_its_headings() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^### (\w+)$", text, re.M) == ["Added", "Changed", "Removed"]
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


# --- test files have names of their own: one process may be given any two of them, and imports them by these ----------


def test_no_two_files_have_one_name() -> None:
    files = [p for p in Path(__file__).parent.rglob("*.py") if not (p.parent / "__init__.py").exists()]
    names = Counter(p.name for p in files if p.name != "conftest.py")  # pytest knows those by their folders
    assert [name for name, count in names.items() if count > 1] == []


# --- environment variables are in one table: those of users in notes/setup.md, the others in CONTRIBUTING.md ----------


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


# --- the time of the tests --------------------------------------------------------------------------------------------


def test_make_says_what_the_front_page_says_of_its_time() -> None:
    said = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (time,) = re.findall(r"takes (\d+ to \d+ minutes on two cores)", said)
    assert f"takes {time}" in (ROOT / "README.md").read_text()


# --- slices of the long tests: each is in one of them, and a night runs one -------------------------------------------


def items(count: int) -> list[Any]:
    """Tests of which every third is not long."""
    marker = {"long": object()}
    return [
        SimpleNamespace(nodeid=f"tests/test_a.py::test_b[µ-{n}]", get_closest_marker=({} if n % 3 == 0 else marker).get)
        for n in range(count)
    ]


def test_each_long_test_is_in_one_slice() -> None:
    known, gone = items(3000), list[Any]()
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    in_slices = Counter[str]()
    for number in range(SLICES):
        gone.clear()
        left = list(known)
        Slice(number).pytest_collection_modifyitems(config, left)
        assert sorted(item.nodeid for item in left + gone) == sorted(item.nodeid for item in known)
        assert 50 < len(left) < 150, "slices are about as large as each other"
        in_slices.update(item.nodeid for item in left)
    assert in_slices == {item.nodeid: 1 for n, item in enumerate(known) if n % 3}


def test_a_slice_is_the_same_everywhere() -> None:
    """On any machine, in any process: 0xe1de0c67 and 0x334a0512 modulo 20."""
    assert [slice_of("tests/test_a.py::test_b"), slice_of("tests/test_a.py::test_b[µ-1]")] == [7, 18]
