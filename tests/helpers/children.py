"""Python in processes of their own: new interpreters, or forks of a server, which start at once.

The server has loaded torch and Numba, which takes an interpreter seconds, and no module of ours.  A test asks for a new
interpreter (``fresh=True``) for one of these reasons:

* it looks at which modules are loaded, or at the memory that they take;
* it looks at what happens when Python exits, or when it is interrupted while it loads modules;
* it sets a variable that a library reads when it is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

#: What the server loads.  (torch loads its compiler with a process's first optimizer.)
LOADED = [
    "torch", "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict", "torch._dynamo", "numba",
]  # fmt: skip


def python(*arguments: object, timeout: float = 100, cwd: object = None, fresh: bool = False, **variables: str) -> str:
    """What Python says, given these arguments and more variables of the environment; it ends well."""
    done = run(*arguments, timeout=timeout, cwd=cwd, fresh=fresh, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(
    *arguments: object, timeout: float = 100, cwd: object = None, fresh: bool = False, out: object = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """What comes of Python, given these arguments and more variables of the environment; ``out``: as of :func:`start`.

    What goes to ``out`` is not returned.
    """
    command = [*map(str, arguments)]
    if fresh:
        assert out is None
        return subprocess.run(  # type: ignore[call-overload, no-any-return]
            [sys.executable, *command], capture_output=True, text=True, timeout=timeout, cwd=cwd,
            env=environment(**variables), check=False,
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="pagedopt-child-") as folder:
        said, err = Path(folder) / "out", Path(folder) / "err"
        child = start(*command, cwd=cwd, out=out or said, err=err, **variables)
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(command, timeout, err.read_bytes())
        return subprocess.CompletedProcess(command, child.exitcode, "" if out else said.read_text(), err.read_text())


def start(
    *arguments: object, cwd: object = None, out: object = os.devnull, err: object = None, **variables: str
) -> ForkServerProcess:
    """A fork of the server that does what Python would.

    Args:
        arguments: of Python: ``-W`` with a filter; then ``-c``, ``-m`` or a file, and the program's own.
        cwd: its folder; None: this process's.
        out: the file that its stdout goes to.
        err: the same of stderr; None: this process's.
        variables: of its environment, beside this process's.
    """
    streams = [None if stream is None else str(stream) for stream in (out, err)]
    given = ([*map(str, arguments)], str(cwd or os.getcwd()), environment(**variables), *streams)
    child = server().Process(target=_be_python, args=given, daemon=True)
    child.start()
    return child


def server() -> ForkServerContext:
    """The context of processes that are forks of the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context


def environment(**variables: str) -> dict[str, str]:
    """This process's, with its path of modules, and more variables."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def _be_python(arguments: list[str], cwd: str, variables: dict[str, str], out: str, err: str | None) -> None:
    """Do what an interpreter does with these arguments, and end as it does."""
    for path, descriptor in ((out, 1), (err, 2)):
        if path is not None:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    code = 1
    try:
        _run(arguments)
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(code)


def _run(arguments: list[str]) -> None:
    rest = [*arguments]
    while rest[0] == "-W":
        _, rule, *rest = rest
        warnings._setoption(rule)  # type: ignore[attr-defined]
    how, *sys.argv = rest
    path = [folder for folder in os.environ["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
    sys.path[:0] = ["", *path]
    if how == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        text, sys.argv[0] = sys.argv[0], "-c"
        exec(compile(text, "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(how).resolve().parent)
        sys.argv = [how, *sys.argv]
        runpy.run_path(how, run_name="__main__")


BESIDE_TORCH = """
import json, sys, torch
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
torch.optim.AdamW([p]).step()
before = set(sys.modules)
from pagedopt import PagedAdamW
optimizer = PagedAdamW([p])
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@functools.cache
def loaded_beside_torch() -> list[str]:
    """Modules that a step and a load import where torch's optimizer has taken a step."""
    names: list[str] = json.loads(python("-c", BESIDE_TORCH, fresh=True))
    return names
