"""CUDA graphs that are built node by node, each behind others, and launched as a whole.

Nothing is captured: no stream is, so that no call of another thread can end a capture, and events may be those of all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .copies import Copy
from .driver import Event, bindings, call, check, relaxed_capture

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
        weakref.finalize(self, _destroy, "cuGraphDestroy", graph)
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
            weakref.finalize(self, _destroy, "cuGraphExecDestroy", executable)
            call("cuGraphUpload", executable, stream)
            self.nbytes = max(0, before - torch.cuda.mem_get_info(self.device)[0])
        self._executable = executable

    def launch(self, stream: int) -> None:
        """Launch it on a stream, behind its own launches so far; after a CudaError nothing was launched."""
        check("cuGraphLaunch", bindings().cuGraphLaunch(self._executable, stream))


def _destroy(name: str, handle: Any) -> None:
    # When the process exits the context may already be gone.  A graph in flight is destroyed when it has ended.
    with contextlib.suppress(Exception):
        getattr(bindings(), name)(handle)
