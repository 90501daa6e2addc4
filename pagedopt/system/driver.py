"""Calls of the CUDA driver, the text of their errors, and objects that own driver memory and events.

Only the driver API is used: it works in the context that torch has made current, whichever CUDA runtime torch brought.
This file decides nothing, and cuda-bindings is imported only when a CUDA device is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing import reductions

from .look import compiled_look

#: Largest share of free device memory that managed allocations may take: oversubscription can hang a driver.
MANAGED_SHARE = 0.25
#: The driver may put smaller managed allocations into one page of memory, and advice applies to whole pages.
BLOCK = 2 << 20


class CudaError(RuntimeError):
    """A failed call of the CUDA driver.  ``code`` is the driver's name of the error (``CUDA_ERROR_NOT_SUPPORTED``)."""

    def __init__(self, call: str, code: str, text: str) -> None:
        super().__init__(f"{call} failed with {code}: {text}")
        self.code = code


class Location(enum.Enum):
    """Where memory may be: a type instead of the device number -1 for the host, which CUDA 13 no longer takes."""

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
    host_pages: bool = False  # pinned host pages in a virtual address range of the device


@functools.cache
def bindings() -> ModuleType:
    """Return the module ``cuda.bindings.driver``; RuntimeError if cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise RuntimeError(f"CUDA tensors need the package cuda-bindings: {how_to_install()}") from error
    return module


def how_to_install() -> str:
    """Return the command that installs what CUDA tensors need, for the CUDA version that torch was built for."""
    major = int((torch.version.cuda or "13").partition(".")[0])
    return f"pip install cupy-cuda{major}x 'cuda-bindings>={major},<{major + 1}'"


def check_code(name: str, code: int) -> None:
    """Raise CudaError if a driver call gave another error than 0."""
    if code:
        check(name, (bindings().CUresult(code),))


def check(name: str, result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call; CudaError if it failed.  ``result`` is what the bindings returned."""
    code, *values = result
    if int(code) != 0:
        text = bindings().cuGetErrorString(code)[1]
        raise CudaError(name, code.name, text.decode() if text else "unknown error")
    return values[0] if values else None


def call(name: str, *arguments: Any) -> Any:
    """Call the driver function ``name`` and return its value; CudaError if it fails."""
    return check(name, getattr(bindings(), name)(*arguments))


@contextlib.contextmanager
def explained(device: int, nbytes: int, where: Location) -> Iterator[None]:
    """Say what to do if memory runs out in the block: torch.OutOfMemoryError on the device, MemoryError on the host."""
    try:
        yield
    except CudaError as error:
        if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        if where is Location.DEVICE:
            free, total = torch.cuda.mem_get_info(device)
            raise torch.OutOfMemoryError(
                "CUDA out of memory. "  # accelerate and Lightning look for these words to try a smaller batch
                f"cuda:{device} has no {nbytes:,} bytes left for optimizer state ({free:,} of {total:,} free); "
                "lower device_budget, or give back what torch caches (torch.cuda.empty_cache())"
            ) from error
        raise MemoryError(
            f"the host gave no {nbytes:,} bytes of page-locked memory for optimizer state ({error}); raise "
            "device_budget, use a smaller state_format, or free host memory"
        ) from error


@functools.cache
def capabilities(device: int) -> Capabilities:
    """Return the abilities of CUDA device ``device``."""
    names = bindings().CUdevice_attribute
    handle = call("cuDeviceGet", device)

    def has(attribute: Any) -> bool:
        return bool(call("cuDeviceGetAttribute", attribute, handle))

    return Capabilities(
        managed=has(names.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
        concurrent_managed=has(names.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS),
        mapped=has(names.CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
        host_pages=has(names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) and has_host_pages(has),
    )


class _Attribute(enum.IntEnum):
    """Device attributes that the enum of cuda-bindings 12 does not name."""

    HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145


def has_host_pages(has: Callable[[Any], bool]) -> bool:
    """Return whether virtual address ranges may contain host memory.

    Drivers of CUDA 13 know the attribute, also when older cuda-bindings ask; older drivers refuse its number.
    """
    try:
        return has(_Attribute.HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    except CudaError as error:
        if error.code != "CUDA_ERROR_INVALID_VALUE":
            raise
        return False


@functools.cache
def location(where: Location, device: int) -> Any:
    """Return the driver's struct for a location."""
    d = bindings()
    location, types = d.CUmemLocation(), d.CUmemLocationType
    location.type = types.CU_MEM_LOCATION_TYPE_HOST if where is Location.HOST else types.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0 if where is Location.HOST else device
    return location


def advise(address: int, nbytes: int, advice: Advice, where: Location, device: int) -> None:
    """Call ``cuMemAdvise`` on a managed range."""
    d = bindings()
    # CUDA 12 has two forms of this function; CUDA 13 has only the second one, under the old name.
    function = getattr(d, "cuMemAdvise_v2", d.cuMemAdvise)
    check("cuMemAdvise", function(address, nbytes, getattr(d.CUmem_advise, advice.value), location(where, device)))


def prefetch(address: int, nbytes: int, where: Location, device: int, stream: int) -> None:
    """Queue ``cuMemPrefetchAsync`` of a managed range on ``stream``."""
    d = bindings()
    function = getattr(d, "cuMemPrefetchAsync_v2", d.cuMemPrefetchAsync)  # two forms, as in advise()
    check("cuMemPrefetchAsync", function(address, nbytes, location(where, device), 0, stream))


def copy_to_device(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy from host to device on ``stream``; asynchronous if ``source`` is pinned."""
    check("cuMemcpyHtoDAsync", bindings().cuMemcpyHtoDAsync(target, source, nbytes, stream))


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue a copy between two addresses that the device knows on ``stream``."""
    check("cuMemcpyAsync", bindings().cuMemcpyAsync(target, source, nbytes, stream))


class Buffer:
    """Memory that the device knows by ``address`` and that ``host`` views; freed after this object and all views.

    Args:
        free: the driver call that frees the memory.
        base: the address to free; None: the host's.
    """

    def __init__(
        self, address: int, host_address: int, nbytes: int, device: int, free: str, base: int | None = None
    ) -> None:
        self.address, self.nbytes, self.device = address, nbytes, device
        raw: Any = (ctypes.c_ubyte * nbytes).from_address(host_address)
        # The memory is freed when ``raw`` dies, which the view keeps alive.  Nothing points back to this object: a
        # cycle would wait for the garbage collector, which does not notice memory outside of Python.
        self.host: npt.NDArray[np.uint8] = np.frombuffer(raw, np.uint8)
        weakref.finalize(raw, _free, free, host_address if base is None else base, device)


def _free(free: str, address: int, device: int) -> None:
    # When the process exits the context may already be gone, and its memory with it.
    with contextlib.suppress(Exception), torch.cuda.device(device), relaxed_capture():
        getattr(bindings(), free)(address)


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow allocations while a stream of this process is captured into a graph, as torch's allocator does."""
    before = call("cuThreadExchangeStreamCaptureMode", bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def allocate_managed(nbytes: int, device: int) -> Buffer:
    """Return ``nbytes`` of managed memory in host pages of its own, so that advice for other memory does not reach it.

    Raises:
        CudaError: the driver refuses (``CUDA_ERROR_NOT_SUPPORTED`` on some virtual GPUs and containers).
        MemoryError: managed memory would take more than a quarter of the free device memory.
    """
    with torch.cuda.device(device), relaxed_capture():
        free, taken = torch.cuda.mem_get_info(device)[0], managed_bytes(device)
        if nbytes + taken > MANAGED_SHARE * free:
            raise MemoryError(
                f"{nbytes:,} bytes of managed memory asked for on cuda:{device}, where this process has {taken:,} and "
                f"{free:,} bytes are free; the limit is {MANAGED_SHARE:.0%} of that, because oversubscribed managed "
                "memory can hang the driver. Use placement='mapped' (any size the host has) or 'device', or a smaller "
                "state_format"
            )
        asked = _whole_pages(nbytes) + (mmap.PAGESIZE if nbytes < BLOCK else 0)
        base = int(call("cuMemAllocManaged", asked, int(bindings().CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
    address = _whole_pages(base)
    buffer = Buffer(address, address, nbytes, device, "cuMemFree", base)
    _managed.add(buffer)
    return buffer


def _whole_pages(nbytes: int) -> int:
    """Round a number of bytes, or an address, up to the next page of the host."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


_managed: weakref.WeakSet[Buffer] = weakref.WeakSet()


def managed_bytes(device: int) -> int:
    """Return the bytes from :func:`allocate_managed` for ``device`` that are still in use."""
    return sum(b.nbytes for b in _managed if b.device == device)


def allocate_mapped(nbytes: int, device: int) -> Buffer:
    """Return ``nbytes`` of pinned host memory that the device reads in place; CudaError if the driver refuses."""
    d = bindings()
    with torch.cuda.device(device), relaxed_capture():
        host = int(call("cuMemHostAlloc", nbytes, d.CU_MEMHOSTALLOC_PORTABLE | d.CU_MEMHOSTALLOC_DEVICEMAP))
        address = int(call("cuMemHostGetDevicePointer", host, 0))
    return Buffer(address, host, nbytes, device, "cuMemFreeHost")


def allocate_pinned(nbytes: int, device: int) -> Buffer:
    """Return ``nbytes`` of pinned host memory to copy from, which also works on devices that cannot map it."""
    with torch.cuda.device(device), relaxed_capture():
        host = int(call("cuMemHostAlloc", nbytes, bindings().CU_MEMHOSTALLOC_PORTABLE))
    return Buffer(host, host, nbytes, device, "cuMemFreeHost")


class DeviceMemory:
    """``nbytes`` of device memory at ``address``, outside of torch's pools; freed with this object.

    A graph's own pool ends with the graph, and this may be allocated during a capture and outlive it.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self.device = nbytes, device
        with torch.cuda.device(device), relaxed_capture(), explained(device, nbytes, Location.DEVICE):
            self.address = int(call("cuMemAlloc", nbytes))
        weakref.finalize(self, _free, "cuMemFree", self.address, device)

    def fill(self, source: int) -> None:
        """Copy all of it from host memory, and wait: also during a capture, which does not see this copy."""
        with torch.cuda.device(self.device), relaxed_capture():
            stream = call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                copy_to_device(self.address, source, self.nbytes, stream)
                call("cuStreamSynchronize", stream)
            finally:
                call("cuStreamDestroy", stream)


class Event:
    """A CUDA event without timing."""

    def __init__(self, device: int) -> None:
        with torch.cuda.device(device), relaxed_capture():
            self.handle = call("cuEventCreate", int(bindings().CUevent_flags.CU_EVENT_DISABLE_TIMING))
        weakref.finalize(self, destroy, "cuEventDestroy", int(self.handle))

    def record(self, stream: int) -> None:
        """Record the work queued on ``stream`` so far."""
        check("cuEventRecord", bindings().cuEventRecord(self.handle, stream))

    def hold(self, stream: int) -> None:
        """Make work that is queued on ``stream`` from now on wait for the recorded work."""
        check("cuStreamWaitEvent", bindings().cuStreamWaitEvent(stream, self.handle, 0))

    def wait(self) -> None:
        """Block the host until the recorded work has ended, also while another stream is being captured."""
        with relaxed_capture():
            check("cuEventSynchronize", bindings().cuEventSynchronize(self.handle))


def destroy(name: str, handle: Any) -> None:
    """Call a driver function that destroys what ``handle`` is of, and ignore errors: the context may be gone."""
    with contextlib.suppress(Exception):
        getattr(bindings(), name)(handle)


class _ArrayInterface:
    """Device memory for ``torch.as_tensor``; the tensor keeps this object alive, and so the owner of the memory."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def view(address: int, nbytes: int, device: int, owner: object, part: bool = False) -> torch.Tensor:
    """Return memory as a CUDA tensor (uint8) that keeps ``owner`` alive; ``part``: another such tensor contains it."""
    interface = _ArrayInterface(address, nbytes, owner)
    if not part:
        copy_what_cannot_be_shared()
        ranges[address] = nbytes
        weakref.finalize(interface, ranges.pop, address, None)
    return torch.as_tensor(interface, device=f"cuda:{device}")


def as_tensor(buffer: Buffer) -> torch.Tensor:
    """Return the bytes of ``buffer`` as a CUDA tensor (uint8) that keeps it alive."""
    return view(buffer.address, buffer.nbytes, buffer.device, (buffer, buffer.host))


# --- torch.multiprocessing: tensors over our own memory ---------------------------------------------------------------
#
# torch has no handle for memory that its allocator does not know: such tensors are copied into memory of torch first.

#: The memory that our tensors view: bytes by address.
ranges: dict[int, int] = {}


@functools.cache
def copy_what_cannot_be_shared() -> None:
    """Make queues and pipes of ``torch.multiprocessing`` copy tensors that view :data:`ranges`."""
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.is_cuda and tensor.layout is torch.strided:
        at = tensor.untyped_storage().data_ptr()
        if any(start <= at < start + nbytes for start, nbytes in ranges.items()):
            tensor = tensor.clone()
    return reductions.reduce_tensor(tensor)


# --- calls whose arguments stay the same: one call of the compiled extension where there is one -----------------------


#: The name of a driver's function, and at most four arguments: addresses, handles and numbers.
Call = tuple[str, *tuple[int, ...]]


class Calls:
    """Calls in their order; a call of this object makes them.

    Args:
        calls: they.
        keeps: what they point to.

    Example:
        >>> wait = Calls([("cuStreamWaitEvent", stream, event, 0)])
        >>> wait()
    """

    def __init__(self, calls: Iterable[Call], keeps: object = None) -> None:
        self._calls, self._keeps = tuple(calls), keeps
        self._compiled: Any = None

    def __call__(self) -> None:
        """Make the calls; CudaError if the driver refuses one: those behind it are not made."""
        if self._compiled is None and (extension := extension_with_driver()) is not None:
            self._compiled = extension.Calls(self._calls)
        if self._compiled is None:
            for name, *given in self._calls:
                call(name, *given)
            return
        number, error = self._compiled.make()
        if error:
            check_code(self._calls[number][0], error)


def extension_with_driver() -> Any:
    """Return the compiled extension if it finds the driver; None: it does not, or there is none (yet)."""
    extension = compiled_look()
    return extension if extension is not None and extension.finds_driver() else None
