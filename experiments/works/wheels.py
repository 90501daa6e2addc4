"""Wheels of a project, by pip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def pip(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What pip says, without a network."""
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def built_wheel(project: Path, into: Path) -> Path:
    """Build a project's wheel with what is installed.

    Raises:
        RuntimeError: it cannot be built.
    """
    done = pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", into, project)
    if done.returncode:
        raise RuntimeError(f"pip wheel: {(done.stdout + done.stderr).strip()[-600:]}")
    return next(into.glob("*.whl"))
