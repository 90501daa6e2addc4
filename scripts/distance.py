"""How many lines of code lie between a question of experiments and its number?

    python scripts/distance.py

Counted are the question's file and all of ``experiments`` that it imports, what draws pictures left out: code without
blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
#: What draws is not on the way to a number.
DRAWS = ROOT / "experiments" / "pictures.py"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def main() -> None:
    """Print each question's lines, and the median."""
    found = {path: sum(map(code, reached(path))) for path in ROOT.glob("experiments/*/*.py") if asks(path)}
    for path, lines in sorted(found.items(), key=lambda item: item[1]):
        print(f"{lines:6,} {path.relative_to(ROOT)}")
    print(f"{median(found.values()):6,.0f} in the median of {len(found)} questions")


def asks(path: Path) -> bool:
    """Whether a file is a question."""
    return "\ndef report(" in path.read_text()


def reached(path: Path) -> set[Path]:
    """A file, and what it imports of experiments, through others too."""
    found, todo = set[Path](), {path}
    while todo:
        found.add(here := todo.pop())
        todo |= set(imported(here)) - found - {DRAWS}
    return found


def imported(path: Path) -> Iterator[Path]:
    """Files of experiments that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
            folder = ROOT.joinpath(*(node.module or "").split("."))
            files = [folder.with_suffix(".py"), *(folder / f"{name.name}.py" for name in node.names)]
            yield from (file for file in files if file.is_file())


def code(path: Path) -> int:
    """Lines that are no blank ones, comments or docstrings."""
    text, docs = path.read_text(), set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate((line.strip() for line in text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docs for number, line in lines)


if __name__ == "__main__":
    main()
