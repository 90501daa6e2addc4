"""Private parts of torch and CPython that the compiled look uses, and the test that they are what they should be.

A wrong part would end the process, so nothing of them is called before a child process has called all: once for each
build of torch and Python, in the background, while steps are looked at in Python.  Its verdict is cached on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .. import cache
from ..numba.compile_text import load, with_disk_cache
from ..variables import asks_for
from . import words

#: "python": optimizers made from now on have no compiled look.  Otherwise they have it where it passes its test.
VARIABLE = "PAGEDOPT_LOOK"
_OF_C10 = {"GRAD": "_ZNK3c1010TensorImpl4gradEv"}
_OF_TORCH = {
    **{name: f"aoti_torch_{name.lower()}" for name in vars(words) if name.startswith("GET_") and name != "GET_LAYOUT"},
    "IS_NEG": "_ZN2at6native6is_negERKNS_6TensorE",
    "IS_INFERENCE": "_ZN2at6native12is_inferenceERKNS_6TensorE",
    "BUMP_VERSION": "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
    "HAS_CALLBACKS": "_ZN2at12hasCallbacksEv",
}
_OF_PYTHON = {
    "DICT_NEXT": "PyDict_Next",
    "DICT_GET": "PyDict_GetItem",
    "LET_GO": "PyEval_SaveThread",
    "TAKE_BACK": "PyEval_RestoreThread",
    "MEMCPY": "memcpy",
}
_OF_DRIVER = {"LAUNCH_KERNEL": "cuLaunchKernel", "EVENT_RECORD": "cuEventRecord"}
_OBJECT_HEADER = 16


class Look(NamedTuple):
    """The compiled functions of :mod:`.walk`, and the parts that records point to."""

    compare_groups: Any
    look: Any
    same_state: Any
    note: Any
    parts: npt.NDArray[np.int64]


def _text() -> str:
    """Return the text of the look.  It ends with a digest of the words, whose values are in the compiled code."""
    here = Path(__file__).parent
    return f"{(here / 'walk.py').read_text()}\n# {hashlib.sha256((here / 'words.py').read_bytes()).hexdigest()}\n"


def _address(library: Any, symbol: str) -> int:
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0


def _find_parts() -> npt.NDArray[np.int64]:
    """Return the parts as far as they are found without a call.

    Raises:
        OSError, AttributeError: a library or a symbol is not there.
    """
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise AttributeError("this Python has no global interpreter lock")
    folder, loaded = Path(torch.__file__).parent / "lib", os.RTLD_NOLOAD | os.RTLD_NOW
    torch_cpu = ctypes.CDLL(str(folder / "libtorch_cpu.so"), loaded)
    found = np.zeros(words.PARTS, np.int64)
    with contextlib.suppress(AttributeError):
        found[words.GET_LAYOUT] = _address(torch_cpu, "aoti_torch_get_layout")  # torch 2.6 lacks it
    for library, symbols in (
        (ctypes.CDLL(str(folder / "libc10.so"), loaded), _OF_C10),
        (torch_cpu, _OF_TORCH),
        (ctypes.pythonapi, _OF_PYTHON),
    ):
        for name, symbol in symbols.items():
            found[getattr(words, name)] = _address(library, symbol)
    with contextlib.suppress(AttributeError):
        found[words.TEAM] = _address(torch_cpu, "GOMP_parallel")
    if torch.version.cuda is not None:
        with contextlib.suppress(OSError):
            driver = ctypes.CDLL("libcuda.so.1")
            for name, symbol in _OF_DRIVER.items():
                found[getattr(words, name)] = _address(driver, symbol)
    found[[words.LIST, words.DICT, words.TENSOR, words.PARAM]] = [
        *map(id, (list, dict, torch.Tensor, torch.nn.Parameter))
    ]
    return found


def _offset_of_tensor() -> int:
    """Return where an ``at::Tensor`` lies in its Python object (torch 2.6: behind a flag of who owns it)."""
    for shape in ((), (2, 3)):
        one = torch.empty(shape, device="cpu")
        inside = np.frombuffer(ctypes.string_at(id(one), torch.Tensor.__basicsize__), np.int64)
        at = [8 * i for i in range(_OBJECT_HEADER // 8, len(inside)) if inside[i] == one._cdata]
        if len(at) != 1:
            raise AttributeError(f"the tensor is at {at} in its object")
    return at[0]


def _compile() -> Look:
    """Return the look with all its parts; calls torch through them.

    Raises:
        OSError, AttributeError: a part is missing.
    """
    parts = _find_parts()
    parts[words.OFFSET] = _offset_of_tensor()
    compare_groups = load(_text(), "look", "pagedopt.system.numba.foreign_calls")
    module = sys.modules[compare_groups.__module__]
    names = "look", "same_state", "note", "undefined_of", "told"
    look, same_state, note, undefined_of, told = (with_disk_cache(module, name) for name in names)
    cells = np.zeros(words.HEADER, np.int64)
    cells[words.PARTS_AT] = parts.ctypes.data
    at, one = cells.ctypes.data, torch.empty(2, device="cpu")
    if parts[words.GET_LAYOUT]:
        parts[words.STRIDED] = told(at, id(one), words.GET_LAYOUT)
    parts[words.CPU] = told(at, id(one), words.GET_DEVICE_TYPE)
    parts[words.UNDEFINED] = undefined_of(at, id(one))
    return Look(compare_groups, look, same_state, note, parts)


def look_of_this_build() -> Look | None:
    """Return the look, untested; None: a part is missing."""
    with _compiling:
        return _look_of_this_build()


@functools.cache
def _look_of_this_build() -> Look | None:
    try:
        return _compile()
    except (OSError, AttributeError, ImportError):
        return None


_compiling = threading.Lock()


# --- the verdict of a child process -----------------------------------------------------------------------------------

_WORKS, _FAILS = b"works", b"fails"
_EXITS = {0: _WORKS, 3: _FAILS}
#: Signals by which a wrong part ends a process.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)


def _file() -> str:
    """Return the name of the verdict: of this build of torch and Python, this processor and this text."""
    build = torch.__version__, torch.version.git_version, torch.version.cuda, sys.version, platform.machine()
    test = Path(__file__).with_name("self_test.py").read_text() + Path(__file__).read_text()
    return f"look-{hashlib.sha256(repr((build, _text(), test)).encode()).hexdigest()[:16]}.verdict"


def _cached() -> bytes | None:
    found = cache.find(_file())
    return None if found is None else cache.unseal(found)


def store_verdict(works: bool) -> None:
    """Cache the verdict for this build."""
    name = _file()
    cache.store(name, cache.seal(name, _WORKS if works else _FAILS))


#: What the child process runs.
_CODE = "from pagedopt.system.look.self_test import main; main()"


def _begin() -> int:
    """Start the child process; return its number.

    Raises:
        OSError: it cannot be started, or there is no interpreter: what a frozen application calls so is itself.
    """
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        raise FileNotFoundError(f"sys.executable is {sys.executable!r}")
    code = f"import sys; sys.path[:] = {sys.path!r}; {_CODE}"
    nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", VARIABLE: "python"}
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment, file_actions=nothing)


class _Verdict:
    """Whether the look works here: asked for once, and then known."""

    def __init__(self) -> None:
        self.known: bytes | None = None
        self._child, self._process, self._asking = 0, os.getpid(), threading.Lock()

    def ask(self, wait: bool) -> bytes | None:
        """Return the verdict; None: the child is still at work."""
        with self._asking:
            return self._ask(wait)

    def _ask(self, wait: bool) -> bytes | None:
        if self.known is None and not self._child:
            self.known = _cached()
            if self.known is None:
                try:
                    self._child = _begin()
                except OSError:
                    self.known = _FAILS
        if self.known is None and self._process == os.getpid():
            self.known = self._of_child(0 if wait else os.WNOHANG)
        return self.known

    def _of_child(self, how: int) -> bytes | None:
        try:
            ended, status = os.waitpid(self._child, how)
        except ChildProcessError:  # somebody else has waited for it
            return _cached() or _FAILS
        if not ended:
            return None
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CRASHES:
            store_verdict(False)
        return _EXITS.get(os.waitstatus_to_exitcode(status), _FAILS)


_verdict = _Verdict()


def _after_fork() -> None:
    """Locks may be held by threads that the child does not have; and the child that tests is its parent's."""
    global _compiling, _verdict
    known, _compiling, _verdict = _verdict.known, threading.Lock(), _Verdict()
    _verdict.known = known


os.register_at_fork(after_in_child=_after_fork)


def compiled_look(wait: bool = False) -> Look | None:
    """Return the compiled look; None: there is none (yet).

    Args:
        wait: for the child process that tests it, if no verdict is cached.
    """
    return look_of_this_build() if (_verdict.known or _verdict.ask(wait)) == _WORKS else None


def pending() -> bool:
    """Return whether :func:`compiled_look` may return something else later."""
    return _verdict.known is None


def is_wanted() -> bool:
    """Return whether the environment leaves the choice of the look to us; warn once of a value without meaning."""
    return not asks_for(VARIABLE, "python", usual="compiled")


__all__ = ["Look", "compiled_look", "is_wanted", "look_of_this_build", "pending", "store_verdict"]
