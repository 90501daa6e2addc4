"""CUDA virtual memory management: one address range whose pages are device memory or pinned host memory.

Only the device gets access, also to host pages.  If the CPU could reach a part of the range, the driver would copy
with CPU instructions and crash on the pages that the CPU cannot reach (notes/traps.md).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .driver import CudaError, Location, bindings, call, check, location, relaxed_capture, view
from .interrupts import Uninterrupted
from .warn import lost_in_move

#: Bytes of each page on a device, by its handle.
device_pages: dict[int, int] = {}
#: Called with the bytes of a device page before it is created; each may refuse it (:func:`device_page_limit`).
limits: list[Callable[[int], None]] = []


@functools.cache
def _properties(where: Location, device: int) -> Any:
    d = bindings()
    properties = d.CUmemAllocationProp()
    properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = location(where, device)
    return properties


@functools.cache
def _access(device: int) -> Any:
    d = bindings()
    access = d.CUmemAccessDesc()
    access.location = location(Location.DEVICE, device)
    access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def granule(where: Location, device: int) -> int:
    """Return the granularity in bytes: sizes and offsets of pages at ``where`` must be multiples of it."""
    least = bindings().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", _properties(where, device), least))


class Range:
    """A reserved address range of a multiple of the granule.  It is freed after this object and all its tensors."""

    def __init__(self, nbytes: int, device: int) -> None:
        free_dead()
        with torch.cuda.device(device), relaxed_capture():
            self.address = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))
        self.nbytes, self.device = nbytes, device
        self._pages: dict[int, tuple[Any, int, Location]] = {}  # by offset: handle, bytes, location
        weakref.finalize(self, _free, self.address, nbytes, self._pages, device)

    def tensor(self) -> torch.Tensor:
        """Return the whole range as uint8.  Every page must have memory; the tensor keeps the range alive."""
        return view(self.address, self.nbytes, self.device, self)

    def bytes_at(self, where: Location) -> int:
        """Return how many bytes of the range have their memory at ``where``."""
        return sum(nbytes for _, nbytes, at in self._pages.values() if at is where)

    def give(self, offset: int, nbytes: int, where: Location) -> None:
        """Give memory to a page that has none; after a CudaError it still has none."""
        with torch.cuda.device(self.device), relaxed_capture(), contextlib.ExitStack() as undo:
            handle = self._create(nbytes, where)
            undo.callback(release, [handle])
            self._map(self.address + offset, nbytes, handle)
            undo.pop_all()
        self._pages[offset] = (handle, nbytes, where)

    def move(self, offsets: Sequence[int], where: Location, stream: int) -> list[Any]:
        """Move pages with their content to ``where``, all or none; addresses stay.  Waits for ``stream``.

        No kernel may be using the pages.

        Returns:
            The handles of the old memory, to be given to :func:`release`.

        Raises:
            CudaError: there is no memory; the pages are where they were.
            StateLost: the pages could not even be left there.
        """
        new: dict[int, tuple[Any, int, Location]] = {}
        with torch.cuda.device(self.device), relaxed_capture(), contextlib.ExitStack() as undo:
            for offset in offsets:  # first, for all pages, what may fail for lack of memory
                _, nbytes, at = self._pages[offset]
                if at is not where:
                    handle = self._create(nbytes, where)
                    undo.callback(release, [handle])
                    self._copy_into(handle, self.address + offset, nbytes, stream)
                    new[offset] = (handle, nbytes, where)
            gone: list[int] = []
            undo.callback(self._put_back, gone)
            for offset, (handle, nbytes, _) in new.items():
                gone.append(offset)
                try:
                    call("cuMemUnmap", self.address + offset, nbytes)
                except CudaError:
                    gone.pop()  # it is still mapped
                    raise
                self._map(self.address + offset, nbytes, handle)
            undo.pop_all()
            before = [self._pages[offset][0] for offset in new]
            self._pages.update(new)
            return before

    def _create(self, nbytes: int, where: Location) -> Any:
        if where is Location.HOST:
            return call("cuMemCreate", nbytes, _properties(where, self.device), 0)
        for check_limit in limits:
            check_limit(nbytes)
        handle = call("cuMemCreate", nbytes, _properties(where, self.device), 0)
        device_pages[int(handle)] = nbytes
        return handle

    def _map(self, address: int, nbytes: int, handle: Any) -> None:
        call("cuMemMap", address, nbytes, 0, handle, 0)
        with contextlib.ExitStack() as undo:
            undo.callback(call, "cuMemUnmap", address, nbytes)
            call("cuMemSetAccess", address, nbytes, [_access(self.device)], 1)
            undo.pop_all()

    def _put_back(self, offsets: Sequence[int]) -> None:
        """Map the old memory of pages again, whatever is mapped there now; StateLost if the driver refuses."""
        lost, reason = 0, None
        for offset in offsets:
            handle, nbytes, _ = self._pages[offset]
            bindings().cuMemUnmap(self.address + offset, nbytes)  # unchecked: nothing may be mapped there
            try:
                self._map(self.address + offset, nbytes, handle)
            except CudaError as error:
                lost, reason = lost + nbytes, error
        if lost:
            raise lost_in_move(lost, reason) from reason

    def _copy_into(self, handle: Any, source: int, nbytes: int, stream: int) -> None:
        """Fill new memory through a temporary address."""
        with contextlib.ExitStack() as after:
            target = int(call("cuMemAddressReserve", nbytes, 0, 0, 0))
            after.callback(call, "cuMemAddressFree", target, nbytes)
            self._map(target, nbytes, handle)
            after.callback(call, "cuMemUnmap", target, nbytes)
            try:
                call("cuMemcpyAsync", target, source, nbytes, stream)
            finally:  # also after an error: the copy may have begun
                try:
                    call("cuStreamSynchronize", stream)
                except BaseException:
                    after.pop_all()  # it may still run: the temporary address stays mapped
                    raise


def release(handles: Sequence[Any]) -> None:
    """Free memory that is no longer mapped; CudaError if the driver refuses one, after the others are freed."""
    results = [bindings().cuMemRelease(handle) for handle in handles]
    for handle in handles:
        device_pages.pop(int(handle), None)
    for result in results:
        check("cuMemRelease", result)


class _Dead(NamedTuple):
    """An address range whose object has died: its pages are unmapped once no kernel can use them any more."""

    address: int
    nbytes: int
    pages: dict[int, tuple[Any, int, Location]]
    device: int


#: Ranges that died while a stream was being captured; :func:`free_dead` frees them.
dead: list[_Dead] = []
#: Errors of a call that waits for a device one of whose streams is being captured.
_CAPTURING = {
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "CUDA_ERROR_CAPTURED_EVENT",
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
}  # fmt: skip
#: Errors that say that the context is gone, and its memory with it, as when the process ends.
_GONE = {
    "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_INVALID_CONTEXT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
}  # fmt: skip


def _free(*range_: Any) -> None:
    dead.append(_Dead(*range_))
    free_dead()


def free_dead() -> None:
    """Free ranges that have died, after waiting for their devices.

    While a stream is being captured CUDA allows no wait: then they stay until the next call, which the next range, the
    end of another one or the next step of an optimizer makes.

    Raises:
        RuntimeError: a device cannot be waited for; what kernels may still use stays mapped.
    """
    stay = []
    with Uninterrupted():
        try:
            while dead:
                if not _give_back(each := dead.pop()):
                    stay.append(each)
        finally:
            dead.extend(stay)


def _give_back(each: _Dead) -> bool:
    """Wait for the device and free a range; return False if a stream is being captured.

    Raises RuntimeError as :func:`free_dead`.
    """
    failed = None
    # When the process exits the context may already be gone, and its memory with it.
    with contextlib.suppress(Exception), torch.cuda.device(each.device), relaxed_capture():
        if torch.cuda.is_current_stream_capturing():  # asked first, as a wait that is refused ends the capture
            return False
        failed = _unmap(each)
    if failed is None or failed.code in _GONE:
        return True
    if failed.code in _CAPTURING:  # that of another stream
        return False
    raise RuntimeError(
        f"{each.nbytes:,} bytes of optimizer state on cuda:{each.device} stay mapped, as kernels may still use them: "
        f"{failed}"
    ) from failed


def _unmap(each: _Dead) -> CudaError | None:
    """Free a range; return the error if its device cannot be waited for: then nothing is unmapped."""
    try:
        call("cuCtxSynchronize")  # unmapping does not wait for kernels that still read the memory
    except CudaError as error:
        return error
    d = bindings()
    for offset, (handle, page, _) in each.pages.items():
        d.cuMemUnmap(each.address + offset, page)
        d.cuMemRelease(handle)
        device_pages.pop(int(handle), None)
    d.cuMemAddressFree(each.address, each.nbytes)
    return None


@contextlib.contextmanager
def device_page_limit(nbytes: int, beside: Callable[[], int] = int) -> Iterator[None]:
    """Refuse device pages of ``placement="mapped"`` beyond a limit, to test code that makes room for itself.

    It holds for the whole process.  Limits inside each other all hold.  Pages that are there already stay.

    Args:
        nbytes: bytes that all device pages of this process and what is beside them may hold.
        beside: returns the bytes that others hold now, by default 0; it is called before every page.

    Raises:
        ValueError: ``nbytes`` is negative.

    Example:
        >>> with device_page_limit(64 << 20):  # doctest: +SKIP
        ...     optimizer.set_device_budget("100%")
        torch.OutOfMemoryError: CUDA out of memory. cuda:0 has no 2,097,152 bytes left for optimizer state …
    """
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; give the bytes that device pages may hold, from 0 on")

    def check(more: int) -> None:
        held, others = sum(device_pages.values()), beside()
        if held + others + more > nbytes:
            said = f"the limit of {nbytes:,} bytes: device pages hold {held:,}, and beside them are {others:,}"
            raise CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", said)

    limits.append(check)
    try:
        yield
    finally:
        limits.remove(check)
