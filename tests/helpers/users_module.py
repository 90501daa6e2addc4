"""Modules of users, in files: a rule is read from its file."""

from __future__ import annotations

import linecache
import tempfile
import types
from pathlib import Path


def module(text: str, folder: Path) -> types.ModuleType:
    """A module of a user, in a file."""
    path = folder / "users_module.py"
    if path.exists():
        path = Path(tempfile.mkdtemp(dir=folder)) / path.name
    path.write_text(text)
    linecache.clearcache()
    made = types.ModuleType("users_module")
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made
