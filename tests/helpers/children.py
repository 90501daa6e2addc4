"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def python(*arguments: object, timeout: float = 100, cwd: object = None, **variables: str) -> str:
    """What Python says, given these arguments and more variables of the environment; it ends well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)
