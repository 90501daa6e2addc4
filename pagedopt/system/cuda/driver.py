"""The mechanism: every CUDA driver call of the library and the text of every driver error.

Only the driver API is used: it works in whatever context torch has made current, whichever CUDA runtime torch brought.
Nothing here decides anything, and nothing here is imported before a CUDA device is really used.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import mmap
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import sharing

#: Largest share of free device memory that managed allocations may take: oversubscription can hang a driver.
MANAGED_SHARE = 0.25
#: Managed allocations below so many bytes may stand beside each other in a page, and advice goes by whole pages.
BLOCK = 2 << 20


class CudaError(RuntimeError):
    """A CUDA driver call failed.  ``code`` is the driver's name of the error, e.g. ``CUDA_ERROR_NOT_SUPPORTED``."""

    def __init__(self, call: str, code: str, text: str, hint: str = "") -> None:
        super().__init__(f"{call} failed with {code}: {text}" + (f"; {hint}" if hint else ""))
        self.code = code


class Location(enum.Enum):
    """Where managed pages may be asked to live.  A type and not -1: CUDA 13 dropped the integer form."""

    DEVICE = "device"
    HOST = "host"


class Advice(enum.Enum):
    """Names of ``cuMemAdvise``."""

    READ_MOSTLY = "CU_MEM_ADVISE_SET_READ_MOSTLY"
    PREFERRED = "CU_MEM_ADVISE_SET_PREFERRED_LOCATION"
    ACCESSED_BY = "CU_MEM_ADVISE_SET_ACCESSED_BY"


@dataclass(frozen=True)
class Capabilities:
    """What a device can do with memory of the host (CUDA device attributes)."""

    managed: bool
    concurrent_managed: bool
    mapped: bool
    host_pages: bool = False  # page-locked host pages in a virtual range of the device (CUDA virtual memory management)


@functools.cache
def bindings() -> ModuleType:
    """The ``cuda.bindings.driver`` module.

    Raises:
        RuntimeError: cuda-bindings is not installed.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise RuntimeError(f"CUDA tensors need the package cuda-bindings: {how_to_install()}") from error
    return module


def how_to_install() -> str:
    """The line that installs what CUDA tensors need, in the major version that torch was built for."""
    major = int((torch.version.cuda or "13").partition(".")[0])
    return f"pip install cupy-cuda{major}x 'cuda-bindings>={major},<{major + 1}'"


def check(call: str, result: tuple[Any, ...], hint: str = "") -> Any:
    """The value of a driver call, or CudaError."""
    code, *values = result
    if int(code) != 0:
        text = bindings().cuGetErrorString(code)[1]
        raise CudaError(call, code.name, text.decode() if text else "unknown error", hint)
    return values[0] if values else None


@contextlib.contextmanager
def explained(device: int, nbytes: int, where: Location) -> Iterator[None]:
    """Say what to do when memory runs out inside the block.

    Raises:
        torch.OutOfMemoryError: the device is full.
        MemoryError: the host will not give more page-locked memory.
    """
    try:
        yield
    except CudaError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        if where is Location.DEVICE:
            free, total = torch.cuda.mem_get_info(device)
            raise torch.OutOfMemoryError(
                "CUDA out of memory. "  # by these words accelerate and Lightning know it, and try a smaller batch
                f"cuda:{device} has no {nbytes:,} bytes left for optimizer state ({free:,} of {total:,} free); "
                "lower device_budget, or give back what torch caches (torch.cuda.empty_cache())"
            ) from error
        raise MemoryError(
            f"the host gave no {nbytes:,} bytes of page-locked memory for optimizer state ({error}); raise "
            "device_budget, use a smaller state_format, or free host memory"
        ) from error


@functools.cache
def capabilities(device: int) -> Capabilities:
    """What CUDA device ``device`` can do."""
    d = bindings()
    names = d.CUdevice_attribute
    handle = check("cuDeviceGet", d.cuDeviceGet(device))

    def has(attribute: Any) -> bool:
        return bool(check("cuDeviceGetAttribute", d.cuDeviceGetAttribute(attribute, handle)))

    return Capabilities(
        managed=has(names.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
        concurrent_managed=has(names.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS),
        mapped=has(names.CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
        host_pages=has(names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) and has_host_pages(has),
    )


class _Attribute(enum.IntEnum):
    """Device attributes by number, for what the enum of cuda-bindings 12 does not name."""

    HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145


def has_host_pages(has: Callable[[Any], bool]) -> bool:
    """Whether virtual ranges take host memory.

    Drivers of CUDA 13 know the attribute, whichever cuda-bindings asks them; for an older one its number is no value.
    """
    try:
        return has(_Attribute.HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    except CudaError as error:
        if error.code != "CUDA_ERROR_INVALID_VALUE":
            raise
        return False


@functools.cache
def location(where: Location, device: int) -> Any:
    """The driver's struct for a place."""
    d = bindings()
    location = d.CUmemLocation()
    kinds = d.CUmemLocationType
    location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if where is Location.HOST else kinds.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0 if where is Location.HOST else device
    return location


def advise(address: int, nbytes: int, advice: Advice, where: Location, device: int) -> None:
    """``cuMemAdvise`` on a managed range."""
    d = bindings()
    call = getattr(d, "cuMemAdvise_v2", d.cuMemAdvise)  # CUDA 12 has both forms, 13 only this one under the old name
    check("cuMemAdvise", call(address, nbytes, getattr(d.CUmem_advise, advice.value), location(where, device)))


def prefetch(address: int, nbytes: int, where: Location, device: int, stream: int) -> None:
    """``cuMemPrefetchAsync`` of a managed range, in stream order."""
    d = bindings()
    call = getattr(d, "cuMemPrefetchAsync_v2", d.cuMemPrefetchAsync)
    check("cuMemPrefetchAsync", call(address, nbytes, location(where, device), 0, stream))


def copy_to_device(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy host → device in stream order; asynchronous when ``source`` is page-locked."""
    check("cuMemcpyHtoDAsync", bindings().cuMemcpyHtoDAsync(target, source, nbytes, stream))


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy between any two addresses the device knows, in stream order."""
    check("cuMemcpyAsync", bindings().cuMemcpyAsync(target, source, nbytes, stream))


class Buffer:
    """Memory that host and device both name: freed with this object, which every view keeps alive.

    Attributes:
        address: the address the device uses.
        host: the same memory as bytes, for the host.
        nbytes: its size.

    Args:
        free: the call that frees what begins at ``base``, by default at the host's address.
    """

    def __init__(
        self, address: int, host_address: int, nbytes: int, device: int, free: str, base: int | None = None
    ) -> None:
        self.address, self.nbytes, self.device = address, nbytes, device
        raw: Any = (ctypes.c_ubyte * nbytes).from_address(host_address)
        # The view keeps ``raw``, whose end frees the memory.  Nothing points back here: a cycle would wait for the
        # garbage collector, and memory outside of Python's sight does not make it run.
        self.host: npt.NDArray[np.uint8] = np.frombuffer(raw, np.uint8)
        base = host_address if base is None else base
        self._release = weakref.finalize(raw, _free, free, base, device)


def _free(call: str, address: int, device: int) -> None:
    # At exit the context may be gone already, and its memory with it.
    with contextlib.suppress(Exception), torch.cuda.device(device), relaxed_capture():
        getattr(bindings(), call)(address)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow allocation while a stream of this process is being captured into a graph, as torch's allocator does."""
    d = bindings()
    mode = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check("cuThreadExchangeStreamCaptureMode", d.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        check("cuThreadExchangeStreamCaptureMode", d.cuThreadExchangeStreamCaptureMode(before))


def allocate_managed(nbytes: int, device: int) -> Buffer:
    """``nbytes`` of managed memory, without advice, in pages of its own: no advice for other memory reaches it.

    Raises:
        CudaError: the driver refuses (``CUDA_ERROR_NOT_SUPPORTED`` on some virtual GPUs and containers).
        MemoryError: the request exceeds a quarter of free device memory.
    """
    d = bindings()
    with torch.cuda.device(device), relaxed_capture():
        free, taken = torch.cuda.mem_get_info(device)[0], managed_bytes(device)
        if nbytes + taken > MANAGED_SHARE * free:
            raise MemoryError(
                f"{nbytes:,} bytes of managed memory asked for on cuda:{device}, where this process has {taken:,} and "
                f"{free:,} bytes are free; the limit is {MANAGED_SHARE:.0%} of that, because oversubscribed managed "
                "memory can hang the driver. Use placement='mapped' (any size the host has) or 'device', or a smaller "
                "state_format"
            )
        flag = int(d.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        asked = _whole_pages(nbytes) + (mmap.PAGESIZE if nbytes < BLOCK else 0)
        base = int(check("cuMemAllocManaged", d.cuMemAllocManaged(asked, flag)))
    address = _whole_pages(base)
    buffer = Buffer(address, address, nbytes, device, "cuMemFree", base)
    _managed.add(buffer)
    return buffer


def _whole_pages(nbytes: int) -> int:
    """A number of bytes, or an address, rounded up to the next page of the host."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_managed: weakref.WeakSet[Buffer] = weakref.WeakSet()


def managed_bytes(device: int) -> int:
    """Bytes of managed memory that :func:`allocate_managed` gave out for ``device`` and that are still in use."""
    return sum(b.nbytes for b in _managed if b.device == device)


def allocate_mapped(nbytes: int, device: int) -> Buffer:
    """``nbytes`` of page-locked host memory that the device reads in place.

    Raises:
        CudaError: the driver refuses.
    """
    d = bindings()
    with torch.cuda.device(device), relaxed_capture():
        flags = d.CU_MEMHOSTALLOC_PORTABLE | d.CU_MEMHOSTALLOC_DEVICEMAP
        host = int(check("cuMemHostAlloc", d.cuMemHostAlloc(nbytes, flags)))
        address = int(check("cuMemHostGetDevicePointer", d.cuMemHostGetDevicePointer(host, 0)))
    return Buffer(address, host, nbytes, device, "cuMemFreeHost")


def allocate_pinned(nbytes: int, device: int) -> Buffer:
    """``nbytes`` of page-locked host memory to copy from; ``address`` is the host's.  Works where mapping does not.

    Raises:
        CudaError: the driver refuses.
    """
    d = bindings()
    with torch.cuda.device(device), relaxed_capture():
        host = int(check("cuMemHostAlloc", d.cuMemHostAlloc(nbytes, d.CU_MEMHOSTALLOC_PORTABLE)))
    return Buffer(host, host, nbytes, device, "cuMemFreeHost")


class Event:
    """A CUDA event without timing."""

    def __init__(self, device: int) -> None:
        d = bindings()
        with torch.cuda.device(device), relaxed_capture():
            self.handle = check("cuEventCreate", d.cuEventCreate(int(d.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
        weakref.finalize(self, _destroy_event, int(self.handle))

    def record(self, stream: int) -> None:
        """Mark the work given to ``stream`` so far."""
        check("cuEventRecord", bindings().cuEventRecord(self.handle, stream))

    def hold(self, stream: int) -> None:
        """Let work given to ``stream`` from now on wait for the marked work."""
        check("cuStreamWaitEvent", bindings().cuStreamWaitEvent(stream, self.handle, 0))

    def has_passed(self) -> bool:
        """Whether the marked work has ended; False also where the driver does not say."""
        d = bindings()  # relaxed_capture() written out: many steps ask
        change = d.cuThreadExchangeStreamCaptureMode
        before = check(
            "cuThreadExchangeStreamCaptureMode", change(d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        )
        try:
            return int(d.cuEventQuery(self.handle)[0]) == 0
        finally:
            check("cuThreadExchangeStreamCaptureMode", change(before))

    def wait(self) -> None:
        """Block the host until the marked work has ended."""
        check("cuEventSynchronize", bindings().cuEventSynchronize(self.handle))


def _destroy_event(handle: int) -> None:
    with contextlib.suppress(Exception):
        bindings().cuEventDestroy(handle)


class _ArrayInterface:
    """What ``torch.as_tensor`` needs to view memory on the device; torch keeps this object, and so the owner."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def view(address: int, nbytes: int, device: int, owner: object, part: bool = False) -> torch.Tensor:
    """Memory as a CUDA tensor (uint8) that keeps ``owner`` alive; ``part``: of what another such tensor views."""
    interface = _ArrayInterface(address, nbytes, owner)
    if not part:
        sharing.copy_what_cannot_be_shared()
        sharing.ranges[address] = nbytes
        weakref.finalize(interface, sharing.ranges.pop, address, None)
    return torch.as_tensor(interface, device=f"cuda:{device}")


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """The bytes of ``buffer`` as a CUDA tensor (uint8) that keeps it alive."""
    return view(buffer.address, buffer.nbytes, buffer.device, (buffer, buffer.host))
