"""CUDA virtual memory management: one address range whose pages are device memory or pinned host memory.

Only the device gets access, also to host pages.  If the CPU could reach a part of the range, the driver would copy
with CPU instructions and crash on the pages that the CPU cannot reach (notes/traps.md).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..interrupts import Uninterrupted
from ..state_lost import lost_in_move
from .driver import CudaError, Location, bindings, call, check, location, relaxed_capture, view

#: Bytes of each page on a device, by its handle.
device_pages: dict[int, int] = {}
#: Called with the bytes of a device page before it is created; each may refuse it (page_limit.py).
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
            after.callback(call, "cuStreamSynchronize", stream)  # also after an error: the copy may have begun
            call("cuMemcpyAsync", target, source, nbytes, stream)


def release(handles: Sequence[Any]) -> None:
    """Free memory that is no longer mapped; CudaError if the driver refuses one, after the others are freed."""
    results = [bindings().cuMemRelease(handle) for handle in handles]
    for handle in handles:
        device_pages.pop(int(handle), None)
    for result in results:
        check("cuMemRelease", result)


def _free(address: int, nbytes: int, pages: dict[int, tuple[Any, int, Location]], device: int) -> None:
    # When the process exits the context may already be gone, and its memory with it.
    with Uninterrupted(), contextlib.suppress(Exception), torch.cuda.device(device), relaxed_capture():
        d = bindings()
        d.cuCtxSynchronize()  # unmapping does not wait for kernels that still read the memory
        for offset, (handle, page, _) in pages.items():
            d.cuMemUnmap(address + offset, page)
            d.cuMemRelease(handle)
            device_pages.pop(int(handle), None)
        d.cuMemAddressFree(address, nbytes)
