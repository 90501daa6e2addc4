"""CUDA virtual memory management: one address range whose pages are device memory or page-locked host memory.

Only the device is given access, to host pages too.  A range of which the CPU can reach a part is a trap: the driver
then copies to and from it with CPU instructions, and runs into the pages that the CPU cannot reach (notes/traps.md).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..interrupts import Uninterrupted
from ..state_lost import StateLost
from .driver import CudaError, Location, bindings, check, location, relaxed_capture, view


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
    """The bytes of which sizes and offsets of pages at ``where`` are multiples."""
    d = bindings()
    least = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    call = d.cuMemGetAllocationGranularity(_properties(where, device), least)
    return int(check("cuMemGetAllocationGranularity", call))


class Range:
    """A reserved address range.  Freed when the last tensor from :meth:`tensor` and this object are gone.

    Args:
        nbytes: a multiple of the granule.
        device: whose address it is.

    Raises:
        CudaError: the driver refuses.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        d = bindings()
        with torch.cuda.device(device), relaxed_capture():
            self.address = int(check("cuMemAddressReserve", d.cuMemAddressReserve(nbytes, 0, 0, 0)))
        self.nbytes, self.device = nbytes, device
        self._pages: dict[int, tuple[Any, int, Location]] = {}  # by offset: handle, bytes, where
        weakref.finalize(self, _free, self.address, nbytes, self._pages, device)

    def tensor(self) -> torch.Tensor:
        """The whole range as uint8; every page must have been given.  Keeps the range alive."""
        return view(self.address, self.nbytes, self.device, self)

    def bytes_at(self, where: Location) -> int:
        """Bytes of the range whose memory is at ``where``."""
        return sum(nbytes for _, nbytes, at in self._pages.values() if at is where)

    def give(self, offset: int, nbytes: int, where: Location) -> None:
        """Back a page that has no memory yet.

        Raises:
            CudaError: the driver has no memory (``CUDA_ERROR_OUT_OF_MEMORY``); nor has the page then.
        """
        with torch.cuda.device(self.device), relaxed_capture(), contextlib.ExitStack() as undo:
            handle = self._create(nbytes, where)
            undo.callback(release, [handle])
            self._map(self.address + offset, nbytes, handle)
            undo.pop_all()
        self._pages[offset] = (handle, nbytes, where)

    def move(self, offsets: Sequence[int], where: Location, stream: int) -> list[Any]:
        """Bring pages to ``where`` at the same addresses, with what is in them: all or none.  Waits for ``stream``.

        No kernel may be using them.

        Returns:
            The memory they had before, to be given back (:func:`release`).

        Raises:
            CudaError: there is no memory; the pages are where they were.
            StateLost: they could not even be left there.
        """
        new: dict[int, tuple[Any, int, Location]] = {}
        with torch.cuda.device(self.device), relaxed_capture(), contextlib.ExitStack() as undo:
            for offset in offsets:  # what may fail for want of memory comes first, for all of them
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
                    _unmap(self.address + offset, nbytes)
                except CudaError:
                    gone.pop()  # it is still there
                    raise
                self._map(self.address + offset, nbytes, handle)
            undo.pop_all()
            before = [self._pages[offset][0] for offset in new]
            self._pages.update(new)
            return before

    def _create(self, nbytes: int, where: Location) -> Any:
        return check("cuMemCreate", bindings().cuMemCreate(nbytes, _properties(where, self.device), 0))

    def _map(self, address: int, nbytes: int, handle: Any) -> None:
        d = bindings()
        check("cuMemMap", d.cuMemMap(address, nbytes, 0, handle, 0))
        with contextlib.ExitStack() as undo:
            undo.callback(_unmap, address, nbytes)
            check("cuMemSetAccess", d.cuMemSetAccess(address, nbytes, [_access(self.device)], 1))
            undo.pop_all()

    def _put_back(self, offsets: Sequence[int]) -> None:
        """Map the memory that pages had before, whatever is mapped there now.

        Raises:
            StateLost: the driver refuses.
        """
        lost, reason = 0, None
        for offset in offsets:
            handle, nbytes, _ = self._pages[offset]
            bindings().cuMemUnmap(self.address + offset, nbytes)  # unchecked: there may be nothing
            try:
                self._map(self.address + offset, nbytes, handle)
            except CudaError as error:
                lost, reason = lost + nbytes, error
        if lost:
            raise StateLost(
                f"{lost:,} bytes of optimizer state were neither moved nor left where they were ({reason}); load a "
                "checkpoint"
            ) from reason

    def _copy_into(self, handle: Any, source: int, nbytes: int, stream: int) -> None:
        """Fill new memory through an address of its own."""
        d = bindings()
        with contextlib.ExitStack() as after:
            target = int(check("cuMemAddressReserve", d.cuMemAddressReserve(nbytes, 0, 0, 0)))
            after.callback(_free_address, target, nbytes)
            self._map(target, nbytes, handle)
            after.callback(_unmap, target, nbytes)
            after.callback(_wait, stream)  # also if something fails: a copy may be on its way there
            check("cuMemcpyAsync", d.cuMemcpyAsync(target, source, nbytes, stream))


def release(handles: Sequence[Any]) -> None:
    """Give memory back that is no longer mapped.

    Raises:
        CudaError: the driver refuses one; the others are given back all the same.
    """
    results = [bindings().cuMemRelease(handle) for handle in handles]
    for result in results:
        check("cuMemRelease", result)


def _unmap(address: int, nbytes: int) -> None:
    check("cuMemUnmap", bindings().cuMemUnmap(address, nbytes))


def _free_address(address: int, nbytes: int) -> None:
    check("cuMemAddressFree", bindings().cuMemAddressFree(address, nbytes))


def _wait(stream: int) -> None:
    check("cuStreamSynchronize", bindings().cuStreamSynchronize(stream))


def _free(address: int, nbytes: int, pages: dict[int, tuple[Any, int, Location]], device: int) -> None:
    # At exit the context may be gone already, and its memory with it.
    with Uninterrupted(), contextlib.suppress(Exception), torch.cuda.device(device), relaxed_capture():
        d = bindings()
        d.cuCtxSynchronize()  # a kernel may still be reading it, and unmapping does not wait
        for offset, (handle, page, _) in pages.items():
            d.cuMemUnmap(address + offset, page)
            d.cuMemRelease(handle)
        d.cuMemAddressFree(address, nbytes)
