"""Which source a result was measured with: the commit, and whether anything but results and notes differs from it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
#: Names the commit where git cannot, as on a machine that got a copy of the files.
VARIABLE = "PAGEDOPT_COMMIT"
#: What a run writes itself, and what is written about it.
WRITTEN = ("experiments/results", "notes")

HELP = (
    f"Results name the commit and whether the tree differs from it outside of {' and '.join(WRITTEN)}; --note takes "
    f"them from a clean tree only. Where there is no .git, give both: {VARIABLE}=abc1234 or {VARIABLE}=abc1234-dirty."
)


def refuse(text: str) -> NoReturn:
    """End with exit status 2 and one line.

    Raises:
        SystemExit: always.
    """
    print(text, file=sys.stderr)
    raise SystemExit(2)


def revision(root: Path = ROOT) -> dict[str, Any]:
    """``commit`` (None: unknown) and ``dirty`` (None: unknown) of the source in ``root``.

    Raises:
        SystemExit: the variable that names them is needed and holds something else.
    """
    # A folder inside somebody else's repository is not of its commits.
    if (root / ".git").exists() and (commit := git(root, "rev-parse", "--short", "HEAD")):
        others = [f":(exclude){path}" for path in WRITTEN]
        changes = git(root, "status", "--porcelain", "--", ".", *others)
        return {"commit": commit, "dirty": None if changes is None else bool(changes)}
    if not (named := os.environ.get(VARIABLE)):
        return {"commit": None, "dirty": None}
    found = re.fullmatch(r"([0-9a-f]{7,64})(-dirty)?", named)
    if not found:
        refuse(f"{VARIABLE} is {named!r}; give 7 hexadecimal digits or more, and -dirty behind them if files differ")
    return {"commit": found[1], "dirty": found[2] is not None}


@functools.cache
def this_revision() -> Mapping[str, Any]:
    """The revision as it was when first asked for: files may be edited while a run measures."""
    return revision()


def check_source(result: Mapping[str, Any], name: str) -> None:
    """Refuse results that nobody could measure again.  Those from before the state was recorded pass.

    Raises:
        SystemExit: results, or a part of them, are of a dirty tree or of an unknown commit.
    """
    sources = {"": result["machine"], **{f", part {key}": part for key, part in result.get("parts", {}).items()}}
    for part, source in sources.items():
        if "dirty" in source and (source["dirty"] is not False or not source["commit"]):
            refuse(
                f"{name}{part}: measured at {words(source)}; a note is filled from a clean tree only. Commit and "
                f"measure again (without a .git set {VARIABLE})"
            )


def words(source: Mapping[str, Any]) -> str:
    """The commit and its state, as "commit abc1234, files changed"."""
    state = {False: "", True: ", files changed", None: ", state unknown"}[source.get("dirty", False)]
    return f"commit {source['commit']}{state}" if source["commit"] else "commit unknown"


def git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None if it is not here or fails; takes no lock that another git would wait for."""
    if shutil.which("git") is None:
        return None
    command = ("git", "--no-optional-locks", "-C", str(root), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
