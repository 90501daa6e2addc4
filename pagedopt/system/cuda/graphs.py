"""What a CUDA graph keeps alive: a graph that is being captured takes hold of Python objects until it is destroyed.

CUDA calls a *user object's* destructor once the graph, and all that was instantiated from it, is gone: on a thread of
its own, where no call of CUDA is allowed.  Here the destructor is the C library's ``sem_post``.  It runs no Python and
frees nothing.  The next :func:`drop_released` sees the semaphore and lets the objects go.  What no graph has released
when the interpreter ends is left as it is: the destructor may still run then, and needs the semaphore.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from .driver import bindings, call, check

#: More bytes than any Linux has in a ``sem_t``.
_SEMAPHORE_WORDS = 8


class Held:
    """An object that a graph keeps alive.  :attr:`released` tells whether the graph is gone."""

    __slots__ = ("_semaphore", "kept")

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self._semaphore = (ctypes.c_uint64 * _SEMAPHORE_WORDS)()
        if _libc().sem_init(self.address, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init failed")

    @property
    def address(self) -> int:
        """Where the semaphore is: the destructor's argument."""
        return ctypes.addressof(self._semaphore)

    @property
    def released(self) -> bool:
        """Whether the destructor has run."""
        count = ctypes.c_int()
        _libc().sem_getvalue(self.address, ctypes.byref(count))
        return count.value > 0


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("sem_init", "sem_getvalue", "sem_post"):
        getattr(library, name).restype = ctypes.c_int
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    library.sem_getvalue.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.sem_post.argtypes = [ctypes.c_void_p]
    return library


def destructor() -> int:
    """The address of the function that CUDA calls with :attr:`Held.address`."""
    return int(ctypes.cast(_libc().sem_post, ctypes.c_void_p).value or 0)


_held: list[Held] = []  # changed by single calls of append and remove: a lock could be left held by an interrupt


def keep_with_graph(stream: int, kept: Any) -> Held:
    """Keep an object alive for as long as the graph that ``stream`` is being captured into.

    Args:
        stream: a stream's handle.

    Raises:
        RuntimeError: the stream is not being captured.
        CudaError: the driver refuses.
    """
    d = bindings()
    graph, _ = end_of_capture(stream)
    held = hold(kept)
    flags = int(d.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    try:
        owner = call("cuUserObjectCreate", held.address, d.CUhostFn(destructor()), 1, flags)
    except BaseException:
        _libc().sem_post(held.address)
        raise
    try:
        call("cuGraphRetainUserObject", graph, owner, 1, int(d.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE))
    except BaseException:
        call("cuUserObjectRelease", owner, 1)
        raise
    return held


def hold(kept: Any) -> Held:
    """Keep an object until the destructor has run; its semaphore to the end of the process, if it never does."""
    held = Held(kept)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    _held.append(held)
    return held


def end_of_capture(stream: int) -> tuple[Any, list[Any]]:
    """Return the graph that a stream is being captured into, and the nodes that its next one will come behind.

    Raises:
        RuntimeError: the stream is not being captured.
        CudaError: the driver refuses.
    """
    d = bindings()
    code, *values = d.cuStreamGetCaptureInfo(stream)
    check("cuStreamGetCaptureInfo", (code,))
    status, _, graph, nodes = values[:4]  # CUDA 12 and 13 return more behind these
    if status != d.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise RuntimeError("the stream is not being captured into a CUDA graph")
    return graph, [*nodes]


def go_on_behind(stream: int, nodes: Sequence[Any]) -> None:
    """Let what a stream is given next come behind nodes that were added to the graph it is being captured into."""
    d = bindings()
    flag = int(d.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    data = (None,) if d.CUDA_VERSION >= 13000 else ()  # of the edges, which have none
    call("cuStreamUpdateCaptureDependencies", stream, [*nodes], *data, len(nodes), flag)


def drop_released() -> None:
    """Let go of what graphs that are gone have kept alive.  Called where memory of CUDA may be freed."""
    for held in [each for each in _held if each.released]:
        try:
            _held.remove(held)
        except ValueError:  # another thread lets go of it
            continue
        held.kept = None
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(held))


def count_held() -> int:
    """Return how many objects graphs keep alive, those of graphs that are gone left out."""
    drop_released()
    return len(_held)
