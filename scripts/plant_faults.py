"""Plant faults in the package, one at a time, and see that the test named beside each finds it.

    python scripts/plant_faults.py        # all, in a copy of the tree; about a minute for eight
    python scripts/plant_faults.py 3 7    # these

A refactoring of the tests must leave every one of them found.  tests/planted_faults.toml lists them: the file, a piece
of its text, what takes its place, and the test.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "planted_faults.toml"


def faults() -> list[dict[str, Any]]:
    """Each with ``file`` (below ``pagedopt/``), ``before``, ``after`` and ``test``."""
    found: list[dict[str, Any]] = tomllib.loads(LIST.read_text())["fault"]
    return found


def is_found(fault: dict[str, Any], tree: Path) -> bool:
    """Whether the test fails with the fault in ``tree``, a copy of the project; the copy is whole again afterwards.

    Raises:
        RuntimeError: the test fails without the fault, too, or there is no such test.
    """
    path = tree / "pagedopt" / fault["file"]
    text = path.read_text()
    if not _passes(fault["test"], tree):
        raise RuntimeError(f"{fault['test']} fails, or is not there, without the fault")
    try:
        path.write_text(text.replace(fault["before"], fault["after"]))
        return not _passes(fault["test"], tree)
    finally:
        path.write_text(text)


def _passes(test: str, tree: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(test)]
    return subprocess.run(command, cwd=tree, capture_output=True).returncode == 0


def main() -> int:
    """Returns how many were not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="which, from 1 on (default: all)")
    numbers = parser.parse_args().numbers
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        for number, fault in enumerate(faults(), 1):
            if not numbers or number in numbers:
                found = is_found(fault, tree)
                missed += not found
                print(f"{number:3} {'found ' if found else 'MISSED'} {fault['file']}: {fault['what']}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
