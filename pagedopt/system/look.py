"""Builds the compiled look, ``look.cpp``, in the background, keeps it in the cache of kernels, and loads it."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from . import cache
from .warn import asks_for

#: "python": optimizers made from now on have no compiled look.  Otherwise they have it where it can be built.
VARIABLE = "PAGEDOPT_LOOK"
#: What a step finds, as in ``look.cpp``.  Of all but DONE nothing is changed: ANEW, the look is of no use any more;
#: LONG, this step needs more than it; IN_USE, a kernel may still read a buffer whose table would change; from REFUSED
#: on the driver's error is added to once REFUSED, or twice if a launch came before.
DONE, ANEW, LONG, IN_USE = range(4)
REFUSED = 1 << 20
#: Seconds that the compiler may take, and after which it is asked again where it has failed.
LIMIT, RETRY = 900, 86_400
#: The status of a process that has loaded the extension.
_LOADED = 42
_NAME, _SOURCE = "pagedopt_look", Path(__file__).with_name("look.cpp")
_PENDING = "it is being compiled"


def is_wanted() -> bool:
    """Return whether the environment leaves the choice of the look to us; warn once of a value without meaning."""
    return not asks_for(VARIABLE, "python", usual="compiled")


# --- compiling --------------------------------------------------------------------------------------------------------


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _command(source: str, target: str) -> list[str]:
    """Return the command that compiles ``look.cpp`` as torch compiles its extensions."""
    root, python = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    standards = re.findall(r"'-std=(c\+\+\d+)'", (root / "utils" / "cpp_extension.py").read_text())
    return [
        *_compiler(), "-O2", f"-std={max(standards, default='c++17')}", "-shared", "-fPIC", "-fvisibility=hidden",
        "-ffp-contract=off", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DTORCH_EXTENSION_NAME={_NAME}", f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{python}", source, "-o", target, f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


@functools.cache
def _file() -> str:
    """Return the name of the extension in the cache: of this build of torch and Python, this command and text.

    Copies of the package share it, wherever they lie.
    """
    build = torch.__version__, torch.version.git_version, sys.version, platform.machine()
    text = repr((build, _command("", ""), _SOURCE.read_text()))
    return f"look-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def _obstacle() -> str | None:
    """Return why no child can compile it here, as far as that is known without trying."""
    if shutil.which(_compiler()[0]) is None:
        return f"there is no C++ compiler {_compiler()[0]!r}; install one, or name yours in CXX"
    if not (header := Path(sysconfig.get_paths()["include"], "Python.h")).exists():
        return f"{header} is missing; the system's package python3-dev has it"
    # What a frozen application calls its interpreter is the application.
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        return f"sys.executable, {sys.executable!r}, is no Python interpreter"
    return None if cache.keeps() else f"there is no place to keep it; set {cache.VARIABLE} to a folder of yours"


def main() -> None:
    """Compile the extension in this process, and keep it, or why there is none: what :func:`_start` starts."""
    with _SOURCE.open("rb") as source, contextlib.suppress(OSError):
        fcntl.flock(source, fcntl.LOCK_EX)  # of many processes one compiles
        if cache.find(_file()) is None and _failure() is None:
            _compile()


def _compile() -> None:
    with tempfile.TemporaryDirectory(prefix="pagedopt-") as folder:
        target = Path(folder, "look.so")
        try:
            done = subprocess.run(
                _command(str(_SOURCE), str(target)), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            cache.store(_reason(), f"the compiler took more than {LIMIT} s".encode())
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)  # what it has started, and this process
        if done.returncode:
            cache.store(_reason(), done.stderr.encode())
            return
        data = target.read_bytes()
    if not (fork := os.fork()):
        _try(data)
    if os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == _LOADED:
        cache.store(_file(), data)
        if (reason := cache.find(_reason())) is not None:
            reason.path.unlink(missing_ok=True)
    elif _failure() is None:
        cache.store(_reason(), b"loading it ended the process")


def _try(data: bytes) -> NoReturn:
    """Load the extension and end this process; a crash or an exit with status 0 is no success.  Keep Python's error."""
    status = 1
    try:
        _load(data)
        status = _LOADED
    except Exception as error:
        cache.store(_reason(), str(error).encode())
    finally:
        os._exit(status)


def _reason() -> str:
    """Return the name of the text in the cache that says why there is no extension."""
    return _file().removesuffix(".so") + ".txt"


def _failure() -> str | None:
    """Return what the compiler has said in vain; None: it has said nothing lately."""
    found = cache.find(_reason())
    if found is None or time.time() - found.path.stat().st_mtime > RETRY:
        return None
    lines = found.data.decode(errors="replace").splitlines()
    first = next((line for line in lines if "error" in line), lines[-1] if lines else "it said nothing")
    return f"{first.strip()} (all of it: {found.path})"


def _load(data: bytes) -> Any:
    """Load an extension from memory: the file in the cache begins with its digest."""
    handle = os.memfd_create(_NAME)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        path = f"/proc/self/fd/{handle}"
        loader = importlib.machinery.ExtensionFileLoader(_NAME, path)
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(_NAME, loader, origin=path))
        loader.exec_module(module)
    return module


# --- using it ---------------------------------------------------------------------------------------------------------


def _start(priority: int) -> int:
    """Start the child process in a group of its own, which no Ctrl-C reaches; return its number.

    The child waits for the compiler.  It cannot if it inherits an ignored SIGCHLD, so it gets the default action.

    Raises:
        OSError: it cannot be started.
    """
    code = f"import os, sys; os.nice({priority}); sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", VARIABLE: "python"}
    command = [sys.executable, "-c", code]
    return os.posix_spawn(
        sys.executable, command, environment, file_actions=nothing, setpgroup=0, setsigdef=[signal.SIGCHLD]
    )


def _end_of(child: int, wait: bool) -> str:
    """Return how the child process has ended, in words; "": it has not."""
    try:
        ended, status = os.waitpid(child, 0 if wait else os.WNOHANG)
    except ChildProcessError:  # somebody else has waited for it
        return "ended"
    return f"ended with {os.waitstatus_to_exitcode(status)}" if ended else ""


class _Build:
    """The extension once it is there, and the child process until then.

    Attributes:
        extension: it; None: there is none (yet).
        reason: why there is none; :data:`_PENDING` while that may change.
    """

    def __init__(self, extension: Any = None, reason: str = _PENDING) -> None:
        self.extension, self.reason = extension, reason
        self._child, self._asking = 0, threading.Lock()

    def ask(self, wait: bool) -> Any:
        """Return the extension; None: there is none (yet)."""
        with self._asking:
            if self.reason is _PENDING and not self._child:
                self._begin(0 if wait else 10)
            if self.reason is _PENDING and (how := _end_of(self._child, wait)):
                self._find(f"the process that should compile it {how}")
            return self.extension

    def _begin(self, priority: int) -> None:
        if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
            self.reason = "this Python has no global interpreter lock"
            return
        self._find(_obstacle() or _PENDING)
        if self.reason is _PENDING:
            try:
                self._child = _start(priority)
            except OSError as error:
                self.reason = str(error)

    def _find(self, otherwise: str) -> None:
        """Look into the cache; ``otherwise``: why there is no extension if it says nothing."""
        try:
            if (found := cache.find(_file())) is not None:
                self.extension, self.reason = _load(found.data), ""
            else:
                self.reason = _failure() or otherwise
        except (ImportError, OSError) as error:
            self.reason = str(error)


_build = _Build()


def _after_fork() -> None:
    global _build
    _build = _Build(_build.extension, _build.reason)  # its lock may be held, and the child is the parent's


os.register_at_fork(after_in_child=_after_fork)


def compiled_look(wait: bool = False) -> Any:
    """Return the extension; None: there is none (yet).  The first call begins to compile it, if none is in the cache.

    Args:
        wait: until the compiler has ended.
    """
    return _build.extension or _build.ask(wait)


def pending() -> bool:
    """Return whether :func:`compiled_look` may return something else later."""
    return _build.reason is _PENDING


def why_none() -> str:
    """Return why there is no compiled look."""
    return _build.reason
