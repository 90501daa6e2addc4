"""What is made here is made from outside, with public names alone; and what notes/extending.md shows is what runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = sorted(HERE.glob("*.py"))
ROOMS = ("", ".foreach_ops", ".formats", ".kernels", ".rules", ".placements", ".transports")
PUBLIC = tuple(f"pagedopt{each}" for each in ROOMS)


def trespasses(text: str) -> list[str]:
    """What a text takes of pagedopt that is not public, and every private attribute, whose ever it is."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "pagedopt" and a.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pagedopt":
            if node.module not in PUBLIC:
                found.append(node.module)
            else:
                names = importlib.import_module(node.module).__all__
                found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in names]
        elif isinstance(node, ast.Attribute):
            if node.attr.startswith("_") and not node.attr.endswith("__"):
                found.append(node.attr)
            elif isinstance(node.value, ast.Name) and node.value.id == "pagedopt":
                names = [*importlib.import_module("pagedopt").__all__, *(name.rpartition(".")[2] for name in PUBLIC)]
                found += [f"pagedopt.{node.attr}"] if node.attr not in names else []
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_private_is_used(path: Path) -> None:
    assert trespasses(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pagedopt.optim.optimizer", ["pagedopt.optim.optimizer"]),
        ("from pagedopt.placements.file import FileArena", ["pagedopt.placements.file"]),
        ("from pagedopt.placements import choose", ["pagedopt.placements.choose"]),
        ("from pagedopt import common, rule", ["pagedopt.common"]),
        ("optimizer._plan.launches", ["_plan"]),
        ("import pagedopt\npagedopt.optim.optimizer", ["pagedopt.optim"]),
        ("import pagedopt.rules\npagedopt.rules.sqrt; pagedopt.rule; x.__init__", []),
    ],
)
def test_what_is_private_would_be_found(text: str, found: list[str]) -> None:
    assert trespasses(text) == found


def test_what_is_public_is_there() -> None:
    for name in PUBLIC:
        package = importlib.import_module(name)
        assert all(getattr(package, each) is not None for each in package.__all__)


def test_the_note_shows_what_runs_here() -> None:
    note = (ROOT / "notes" / "extending.md").read_text()
    shown = re.findall(r"```python\n# (tests/outside/\w+\.py)\n(.*?)```", note, re.S)
    assert {Path(name).name for name, _ in shown} == {"rule.py", "element_format.py"}
    linked = {Path(name).name for name in re.findall(r"\(\.\./(tests/outside/\w+\.py)\)", note)}
    assert linked == {"format.py", "placement.py", "transport.py", "kernel.py"}
    for name, text in shown:
        for part in text.strip().split("\n\n    ...\n"):
            assert part.strip("\n") in (ROOT / name).read_text(), f"{name} has no such lines:\n{part}"
