"""The functions of ``cuda.bindings.driver`` on a played card: memory, copies, streams, events and graphs.

All memory that the card knows is in one region of this process, at the same addresses for host and card, and no address
is given twice.  What CUDA refuses is refused: mapping where something is mapped, unmapping where nothing is, freeing an
address range in which something is mapped, releasing a handle twice, allocating and waiting during a capture.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cuda.bindings import driver as real

from pagedopt.kernels import cuda
from pagedopt.system import driver, libc
from tests.card.order import Event, Graph, Memory, Order, Touched

GRANULE = 4096
Result = real.CUresult
#: Not allowed while a stream is being captured, but for threads that have said "relaxed".
_UNSAFE = {
    "cuMemAlloc", "cuMemAllocManaged", "cuMemHostAlloc", "cuMemFree", "cuMemFreeHost", "cuMemCreate", "cuMemMap",
    "cuMemUnmap", "cuMemSetAccess", "cuStreamCreate", "cuStreamSynchronize", "cuEventSynchronize",
}  # fmt: skip
#: Calls that a test neither sees nor lets fail.
_UNSEEN = {"cuGetErrorString", "cuThreadExchangeStreamCaptureMode"}
#: Of handles and events; those of another card are unknown.
_numbers = itertools.count(1)
_RELAXED = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """What takes the place of functions of ``cuda.bindings.driver``; enumerations and structures stay.

    Attributes:
        calls: names of the calls so far.
        before: called with the name of each call, may return an error in its stead, or raise.
        handles: of virtual memory those that live, with their bytes.
        files: the descriptor of each of them.
        mapped: by address: handle, bytes.
        accessible: addresses of what is mapped and may be touched.
        ranges: reserved address ranges, with their bytes.
        lacks: attributes that the device has not, by a part of their names.
    """

    def __init__(self, order: Order, memory: Memory) -> None:
        self.order, self.memory = order, memory
        self.calls: list[str] = []
        self.before: Callable[[str], Any] = lambda name: None
        self.handles: dict[int, int] = {}
        self.files: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.ranges: dict[int, int] = {}
        self.lacks: tuple[str, ...] = ()
        self._lock = threading.RLock()
        self._mode = 0
        self._events, self._user_objects, self._graphs = dict[int, Event](), dict[int, Any](), dict[int, Graph]()
        self._nodes, self._executables = dict[int, Event](), dict[int, Graph]()
        #: Of kernels by their handles: given the address of the argument and the grid, what they are and their work.
        self.functions: dict[int, Callable[[int, int], tuple[str, Callable[[], Touched]]]] = {}
        self.kept: dict[Graph, list[Any]] = {}  # what calls the destructors of what a graph keeps alive

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of the driver."""
        for name in dir(self):
            if name.startswith("cu") and hasattr(real, name):  # some have two forms in CUDA 12
                monkeypatch.setattr(real, name, functools.partial(self._call, name))
        for module in (driver, cuda):  # compiled calls would reach a real one, where there is one
            monkeypatch.setattr(module, "extension_with_driver", lambda: None)

    @property
    def is_installed(self) -> bool:
        """Whether it is in the place of the driver."""
        return getattr(getattr(real.cuEventDestroy, "func", None), "__self__", None) is self

    def close(self) -> None:
        """Give back the memory of handles that nobody has released."""
        while self.files:
            os.close(self.files.popitem()[1])

    def fail(self, at: int, error: Any = Result.CUDA_ERROR_OUT_OF_MEMORY) -> None:
        """Let the ``at``-th call from now on fail, or raise."""
        number = itertools.count()

        def before(name: str) -> Any:
            if next(number) != at:
                return None
            if isinstance(error, BaseException):
                raise error
            return error

        self.before = before

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        with self._lock:
            return self._locked(name, *arguments)

    def _locked(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        if name not in _UNSEEN:
            self.calls.append(name)
            if (error := self.before(name)) is not None:
                return error, None
        if name in _UNSAFE and self.order.captures and self._mode != _RELAXED:
            return Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None
        try:
            value = getattr(self, name)(*arguments)
        except (AssertionError, KeyError, ValueError):
            return Result.CUDA_ERROR_INVALID_VALUE, None
        if isinstance(value, Result):
            return value, None
        return Result.CUDA_SUCCESS, *(value if isinstance(value, tuple) else (value,))

    def cuGetErrorString(self, code: Any) -> bytes:
        return b"as asked for"

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        before, self._mode = self._mode, mode
        return before

    def cuDeviceGet(self, given: int, *_: Any) -> int:
        return given

    cuMemHostGetDevicePointer = cuDeviceGet

    def cuMemAdvise(self, *_: Any) -> None:
        pass

    cuMemAdvise_v2 = cuMemAdvise
    cuStreamDestroy = cuMemAdvise  # what it was given is carried out all the same

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        return int(not any(name in getattr(attribute, "name", "") for name in self.lacks))

    # --- memory

    def cuMemAlloc(self, nbytes: int, *_: Any) -> int:
        return self.memory.take(nbytes)

    cuMemHostAlloc = cuMemAlloc

    def cuMemAllocManaged(self, nbytes: int, flags: int) -> int:
        return self.memory.use(self.memory.reserve(nbytes, mmap.PAGESIZE), nbytes)

    def cuMemFree(self, address: int) -> None:
        self.order.wait()
        self.order.host("freeing", writes=[self.memory.drop(address)])

    cuMemFreeHost = cuMemFree

    def cuMemPrefetchAsync(self, address: int, nbytes: int, location: Any, flags: int, stream: int) -> None:
        self.order.submit(int(stream), "prefetching", lambda: ((), ()))

    cuMemPrefetchAsync_v2 = cuMemPrefetchAsync

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.order.submit(int(stream), "a copy", self._copy([(target, source)], nbytes))

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        now = source if self.memory.knows(source) else ctypes.string_at(source, nbytes)  # pageable: read at the call
        self.order.submit(int(stream), "a copy", self._copy([(target, now)], nbytes))

    def cuMemcpy3DAsync(self, copy: Any, stream: int) -> None:
        self.order.submit(int(stream), "a copy of several ranges", self._slices(copy))

    def _slices(self, copy: Any) -> Callable[[], Touched]:
        """Return the work of a copy of slices of one row each."""
        unified, most = real.CUmemorytype.CU_MEMORYTYPE_UNIFIED, 1 << 31
        assert copy.srcMemoryType == copy.dstMemoryType == unified
        assert copy.Height == 1
        assert copy.WidthInBytes <= min(copy.srcPitch, copy.dstPitch) <= max(copy.srcPitch, copy.dstPitch) < most
        to, of = copy.dstPitch * copy.dstHeight, copy.srcPitch * copy.srcHeight
        pairs = [(int(copy.dstDevice) + i * to, int(copy.srcDevice) + i * of) for i in range(copy.Depth)]
        return self._copy(pairs, copy.WidthInBytes)

    def _copy(self, pairs: Sequence[tuple[int, int | bytes]], nbytes: int) -> Callable[[], Touched]:
        """Return the work of copies: of each an address, and an address or the bytes that go there."""
        writes = [(to, to + nbytes) for to, _ in pairs]
        reads = [(of, of + nbytes) for _, of in pairs if isinstance(of, int)]

        def work() -> Touched:
            self.memory.check("a copy", *reads, *writes)
            for to, of in pairs:
                ctypes.memmove(to, of, nbytes)
            return reads, writes

        return work

    # --- virtual memory: a handle is a file in memory

    def cuMemGetAllocationGranularity(self, *_: Any) -> int:
        return GRANULE

    def cuMemAddressReserve(self, nbytes: int, *_: Any) -> int:
        address = self.memory.reserve(nbytes, GRANULE)
        self.ranges[address] = nbytes
        return address

    def cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert self.ranges[address] == nbytes
        assert not any(address <= at < address + nbytes for at in self.mapped)
        del self.ranges[address]

    def cuMemCreate(self, nbytes: int, *_: Any) -> int:
        file, handle = os.memfd_create("page"), next(_numbers)
        os.ftruncate(file, nbytes)
        self.handles[handle], self.files[handle] = nbytes, file
        return handle

    def cuMemRelease(self, handle: int) -> None:
        del self.handles[handle]
        os.close(self.files.pop(handle))  # what is mapped stays until it is unmapped, as in CUDA

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert self.handles[handle] == nbytes
        assert address not in self.mapped
        self.mapped[address] = (handle, nbytes)

    def cuMemSetAccess(self, address: int, nbytes: int, *_: Any) -> None:
        handle, size = self.mapped[address]
        assert size == nbytes
        libc.map_file_at(address, nbytes, self.files[handle], 0)
        self.accessible.add(address)
        self.memory.use(address, nbytes, None)

    def cuMemUnmap(self, address: int, nbytes: int) -> None:
        assert self.mapped.pop(address)[1] == nbytes
        if address in self.accessible:
            self.accessible.remove(address)
            self.order.host("unmapping", writes=[self.memory.drop(address)])
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc._MAP_FIXED
            libc.call("mmap", address, nbytes, libc._PROT_READ_WRITE, flags, -1, 0)

    # --- streams and events

    def cuStreamCreate(self, flags: int) -> int:
        return self.order.stream()

    def cuStreamSynchronize(self, stream: int) -> None:
        self.order.wait(dict(self.order.behind(int(stream))))

    def cuCtxSynchronize(self) -> Any:
        if self.order.captures:  # also for threads that have said "relaxed"
            self.order.faults.append("a wait for the whole card has ended a capture")
            return Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        self.order.wait()
        return None

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        self.order.hold(int(stream), self._events[int(event)])

    def cuEventCreate(self, flags: int) -> int:
        number = next(_numbers)
        self._events[number] = Event()
        return number

    def cuEventRecord(self, event: int, stream: int) -> None:
        self.order.record(self._events[int(event)], int(stream))

    def cuEventSynchronize(self, event: int) -> None:
        self.order.wait(self._events[int(event)].clock)

    def cuEventDestroy(self, event: int) -> None:
        del self._events[int(event)]

    # --- graphs

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        status, graph = real.CUstreamCaptureStatus, self.order.captures.get(int(stream))
        if graph is None:
            return status.CU_STREAM_CAPTURE_STATUS_NONE, 0, 0, [], [], 0
        self._graphs[id(graph)] = graph
        now = Event()
        self.order.record(now, int(stream))
        self._nodes[id(now)] = now
        return status.CU_STREAM_CAPTURE_STATUS_ACTIVE, 1, id(graph), [id(now)], [], 1

    def cuStreamUpdateCaptureDependencies(self, stream: int, nodes: Any, data: Any, count: int, flags: int) -> None:
        assert data is None
        assert flags == int(real.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        graph = self.order.captures[int(stream)]
        for node in nodes[:count]:
            graph.calls.append((int(stream), "hold", self._nodes[int(node)]))

    def cuCtxGetCurrent(self) -> int:
        return 1

    def cuGraphCreate(self, flags: int) -> int:
        graph = Graph(self.order.stream())
        self._graphs[id(graph)] = graph
        return id(graph)

    def cuGraphAddMemcpyNode(self, graph: int, behind: Any, count: int, copy: Any, context: Any) -> int:
        return self._add(graph, behind[:count], "a copy", self._slices(copy))

    def cuGraphAddKernelNode(self, graph: int, behind: Any, count: int, parameters: Any) -> int:
        play = self.functions[int(parameters.func)]
        argument = ctypes.c_uint64.from_address(int(parameters.kernelParams)).value
        what, work = play(argument, parameters.gridDimX)
        return self._add(graph, behind[:count], what, work)

    def cuGraphAddEventRecordNode(self, graph: int, behind: Any, count: int, event: int) -> int:
        return self._add(graph, behind[:count], "external", self._events[int(event)])

    def _add(self, graph: int, behind: Any, what: str, asked: Any) -> int:
        node = self.order.add_node(self._graphs[int(graph)], [self._nodes[int(each)] for each in behind], what, asked)
        self._nodes[id(node)] = node
        return id(node)

    def cuGraphInstantiate(self, graph: int, flags: int) -> int:
        built, number = self._graphs[int(graph)], next(_numbers)
        whole = Graph(built.origin, [*built.calls, *((built.origin, "hold", node) for node in built.nodes)])
        self._executables[number] = whole
        return number

    def cuGraphUpload(self, executable: int, stream: int) -> None:
        assert int(executable) in self._executables

    def cuGraphLaunch(self, executable: int, stream: int) -> None:
        self.order.launch(self._executables[int(executable)], int(stream))

    def cuGraphExecDestroy(self, executable: int) -> None:
        del self._executables[int(executable)]  # what was launched is carried out all the same

    def cuGraphDestroy(self, graph: int) -> None:
        for node in self._graphs.pop(int(graph)).nodes:
            del self._nodes[id(node)]

    def cuUserObjectCreate(self, kept: int, destructor: Any, count: int, flags: int) -> int:
        number = next(_numbers)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(destructor))
        self._user_objects[number] = lambda: call(kept)
        return number

    def cuGraphRetainUserObject(self, graph: int, owner: int, count: int, flags: int) -> None:
        self.kept.setdefault(self._graphs[graph], []).append(self._user_objects.pop(owner))

    def cuUserObjectRelease(self, owner: int, count: int) -> None:
        self._user_objects.pop(owner)()

    def destroy(self, graph: Graph) -> None:
        """Let go of what a graph keeps alive; its replays end before."""
        self._graphs.pop(id(graph), None)
        self.order.run()
        for destructor in self.kept.pop(graph, ()):
            destructor()
