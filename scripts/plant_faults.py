"""Plant faults in the project, one at a time, and see that the test named beside each finds it.

    python scripts/plant_faults.py        # all, in a copy of the tree
    python scripts/plant_faults.py 3 7    # these

A refactoring of the tests must leave every one of them found.  tests/planted_faults.toml lists them: the file, a piece
of its text, what takes its place, and the test.  Each test runs once without any fault; with a fault it has to fail.
Only tests that ``make test`` runs count.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "planted_faults.toml"
#: Exit statuses of pytest: all tests passed, some failed; beyond, it did not come to run them, and below, it crashed.
PASSED, FAILED = 0, 1


def faults() -> list[dict[str, Any]]:
    """Each with ``what``, ``file`` (below the root), ``before``, ``after`` and ``test`` (arguments of pytest)."""
    found: list[dict[str, Any]] = tomllib.loads(LIST.read_text())["fault"]
    return found


def is_found(fault: dict[str, Any], tree: Path) -> bool:
    """Whether the test fails with the fault in ``tree``, a copy of the project; the copy is whole again afterwards.

    Raises:
        RuntimeError: the text to replace does not stand in the file once; or the test fails without the fault, or is
            not there, or cannot be collected with it.
    """
    path = tree / fault["file"]
    text = path.read_text()
    if text.count(fault["before"]) != 1:
        raise RuntimeError(f"{fault['file']}: {fault['before']!r} stands there {text.count(fault['before'])} times")
    if (status := without_faults(fault["test"], tree)) != PASSED:
        raise RuntimeError(f"{fault['test']}: pytest ends with {status} without the fault, not with {PASSED}")
    try:
        path.write_text(text.replace(fault["before"], fault["after"]))
        status = run(fault["test"], tree)
    finally:
        path.write_text(text)
    if status > FAILED:
        raise RuntimeError(f"{fault['test']}: pytest ends with {status} with the fault: {fault['what']}")
    return status != PASSED


@functools.cache
def without_faults(test: str, tree: Path) -> int:
    """The exit status of a test in a whole tree, where it runs once however many faults name it."""
    return run(test, tree)


def run(test: str, tree: Path) -> int:
    """The exit status of pytest."""
    marks = ["-m", "not long and not clients"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *marks, *shlex.split(test)]
    return subprocess.run(command, cwd=tree, capture_output=True).returncode


def copy_of_the_project(tree: Path) -> None:
    """What git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def main() -> int:
    """Returns how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="which, from 1 on (default: all)")
    numbers = parser.parse_args().numbers
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_of_the_project(tree)
        for number, fault in enumerate(faults(), 1):
            if not numbers or number in numbers:
                begin = time.perf_counter()
                found = is_found(fault, tree)
                missed += not found
                took = f"{time.perf_counter() - begin:4.0f} s"
                word = "found " if found else "MISSED"
                print(f"{number:3} {word} {took}  {fault['file']}: {fault['what']}  [{fault['test']}]", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
