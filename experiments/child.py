"""A function of a module in a process of its own: its rows come back one by one, as far as it gets.

For what may end the process, leave a CUDA context broken, never answer, or must be the first to do something in it.
The function's arguments are plain values, and what it yields are plain dicts; each is sent at once.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from experiments.child import serve; serve(*sys.argv[2:])"


class Child:
    """A process that calls a function; iterating over it gives its rows as they come, and waits for its end.

    Args:
        function: of a module (not a method, nothing local), a generator of plain dicts.
        limit: seconds after which it is killed.
        environment: variables that it has besides those of this process.

    Attributes:
        pid: of the process.
        ended: how it failed, None while all is well: "was stopped after 2 s", "ended with -11: …".
    """

    def __init__(
        self,
        function: Callable[..., Iterator[dict[str, Any]]],
        *arguments: Any,
        limit: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or not name.isidentifier():
            raise ValueError(f"{module}.{name}: a child calls a function of a module, which it can import")
        self.ended: str | None = None
        self._limit = limit
        ours, theirs = os.pipe()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-P", "-c", BOOT, str(ROOT), str(theirs), module, name]
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(arguments)],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
            )
        finally:
            os.close(theirs)
        self._rows = os.fdopen(ours)
        self.pid = self._process.pid

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows as they come.  Whatever ends the iteration ends the process."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._limit, stop)
        timer.daemon = True
        timer.start()
        code = None
        try:
            for line in self._rows:
                if line.endswith("\n"):  # a process that is killed may leave half a line
                    yield json.loads(line)
            code = self._process.wait()
        finally:
            timer.cancel()
            self._process.kill()
            self._process.wait()
            self._rows.close()
            if late.is_set():
                self.ended = f"was stopped after {self._limit:g} s"
            elif code:
                self._errors.seek(0)
                self.ended = f"ended with {code}: {self._errors.read().strip()[-800:]}"
            self._errors.close()


def only(function: Callable[..., Iterator[dict[str, Any]]], *arguments: Any, **options: Any) -> dict[str, Any]:
    """The one row of a child that is to yield one; the arguments are those of :class:`Child`.

    Raises:
        RuntimeError: the process failed; with its last words.
    """
    child = Child(function, *arguments, **options)
    rows = list(child)
    if child.ended or len(rows) != 1:
        raise RuntimeError(f"the process of {function.__qualname__} {child.ended or f'gave {len(rows)} rows, not one'}")
    return rows[0]


def serve(out: str, module: str, name: str, arguments: str) -> None:
    """In the child: send every row, and leave without cleaning up: a CUDA context may be beyond it."""
    code = 1
    with os.fdopen(int(out), "w") as rows:
        try:
            for row in getattr(importlib.import_module(module), name)(*json.loads(arguments)):
                print(json.dumps(row), file=rows, flush=True)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
