"""CUDA graphs: what one that is being captured keeps alive, and graphs that are built node by node."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import libc
from .copies import Copy
from .driver import Event, bindings, call, check, destroy, relaxed_capture

# --- what a graph keeps alive -----------------------------------------------------------------------------------------
#
# A graph that is being captured takes hold of Python objects until it is destroyed.  CUDA calls a *user object's*
# destructor once the graph, and all that was instantiated from it, is gone: on a thread of its own, where no call of
# CUDA is allowed.  Here the destructor is the C library's ``sem_post``.  It runs no Python and frees nothing.  The
# next :func:`drop_released` sees the semaphore and lets the objects go.  What no graph has released when the
# interpreter ends is left as it is: the destructor may still run then, and needs the semaphore.

#: More bytes than any Linux has in a ``sem_t``.
_SEMAPHORE_WORDS = 8


class Held:
    """An object that a graph keeps alive.  :attr:`released` tells whether the graph is gone."""

    __slots__ = ("_semaphore", "address", "kept")

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self._semaphore = (ctypes.c_uint64 * _SEMAPHORE_WORDS)()
        #: Where it is: the destructor's argument.
        self.address = ctypes.addressof(self._semaphore)
        libc.call("sem_init", self.address, 0, 0)

    @property
    def released(self) -> bool:
        """Whether the destructor has run."""
        count = ctypes.c_int()
        libc.call("sem_getvalue", self.address, ctypes.addressof(count))
        return count.value > 0


def destructor() -> int:
    """The address of the function that CUDA calls with :attr:`Held.address`."""
    return int(ctypes.cast(libc.function("sem_post"), ctypes.c_void_p).value or 0)


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
        libc.call("sem_post", held.address)
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


# --- graphs of ours: built node by node, each behind others, and launched as a whole ----------------------------------
#
# Nothing is captured: no stream is, so that no call of another thread can end a capture; events may be those of all.

#: A node of a graph, as the driver names it.
Node = Any


class Nodes:
    """Adds nodes to a graph.

    Args:
        graph: its handle.
        device: index of the CUDA device.
    """

    def __init__(self, graph: Any, device: int) -> None:
        self.graph, self.device = graph, device
        with torch.cuda.device(device):
            self._context = call("cuCtxGetCurrent")

    def copy(self, copy: Copy, behind: Sequence[Node]) -> Node:
        """Add a copy behind other nodes, and return its node."""
        parameters = copy.parameters()
        return call("cuGraphAddMemcpyNode", self.graph, [*behind], len(behind), parameters, self._context)

    def kernel(
        self, function: int, blocks: int, threads: int, argument: npt.NDArray[Any], behind: Sequence[Node]
    ) -> Node:
        """Add a launch of a kernel with one argument, which the driver copies now."""
        parameters = bindings().CUDA_KERNEL_NODE_PARAMS()
        parameters.func = function
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = blocks, 1, 1
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = threads, 1, 1
        addresses = np.array([argument.ctypes.data], np.uint64)
        parameters.kernelParams = int(addresses.ctypes.data)
        return call("cuGraphAddKernelNode", self.graph, [*behind], len(behind), parameters)

    def record(self, event: Event, behind: Sequence[Node]) -> Node:
        """Add a node that records an event: after each launch others may hold it, as if a stream had recorded it."""
        return call("cuGraphAddEventRecordNode", self.graph, [*behind], len(behind), event.handle)


class BuiltGraph:
    """An empty graph on a device, to be filled by :attr:`nodes` and then made executable.

    It is destroyed with this object, the executable one behind its last launch.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        graph = call("cuGraphCreate", 0)
        weakref.finalize(self, destroy, "cuGraphDestroy", graph)
        self.nodes = Nodes(graph, device)
        self._executable: Any = None
        #: Bytes of device memory that it has taken, as far as the driver had to ask for more.
        self.nbytes = 0

    def instantiate(self, stream: int) -> None:
        """Make it executable, and send it to the device on a stream.

        Raises:
            CudaError: the driver refuses, as when there is no memory.
        """
        with torch.cuda.device(self.device), relaxed_capture():
            before = torch.cuda.mem_get_info(self.device)[0]
            executable = call("cuGraphInstantiate", self.nodes.graph, 0)
            weakref.finalize(self, destroy, "cuGraphExecDestroy", executable)
            call("cuGraphUpload", executable, stream)
            self.nbytes = max(0, before - torch.cuda.mem_get_info(self.device)[0])
        self._executable = executable

    def launch(self, stream: int) -> None:
        """Launch it on a stream, behind its own launches so far; after a CudaError nothing was launched."""
        check("cuGraphLaunch", bindings().cuGraphLaunch(self._executable, stream))
