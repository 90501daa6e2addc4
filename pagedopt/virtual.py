"""CUDA virtual memory management: one address range whose pages are device memory or page-locked host memory.

Only the device is given access, to host pages too.  A range of which the CPU can reach a part is a trap: the driver
then copies to and from it with CPU instructions, and runs into the pages that the CPU cannot reach (notes/traps.md).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any

import torch

from .memory import Location, check, driver, location, relaxed_capture, view


@functools.cache
def _properties(where: Location, device: int) -> Any:
    d = driver()
    properties = d.CUmemAllocationProp()
    properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = location(where, device)
    return properties


@functools.cache
def _access(device: int) -> Any:
    d = driver()
    access = d.CUmemAccessDesc()
    access.location = location(Location.DEVICE, device)
    access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def granule(where: Location, device: int) -> int:
    """The bytes of which sizes and offsets of pages at ``where`` are multiples."""
    d = driver()
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
        d = driver()
        with torch.cuda.device(device), relaxed_capture():
            self.address = int(check("cuMemAddressReserve", d.cuMemAddressReserve(nbytes, 0, 0, 0)))
        self.nbytes, self.device = nbytes, device
        self._pages: dict[int, tuple[Any, int, Location]] = {}  # by offset: handle, bytes, where
        weakref.finalize(self, _free, self.address, nbytes, self._pages, device)

    def tensor(self) -> torch.Tensor:
        """The whole range as uint8; every page must have been given.  Keeps the range alive."""
        return view(self.address, self.nbytes, self.device, self)

    def bytes_at(self, where: Location) -> int:
        """Bytes that are there."""
        return sum(nbytes for _, nbytes, at in self._pages.values() if at is where)

    def give(self, offset: int, nbytes: int, where: Location) -> None:
        """Back a page that has no memory yet.

        Raises:
            CudaError: there is none (``CUDA_ERROR_OUT_OF_MEMORY``); the page has no memory then.
        """
        with torch.cuda.device(self.device), relaxed_capture():
            handle = self._create(nbytes, where)
            try:
                self._map(self.address + offset, nbytes, handle)
            except Exception:
                driver().cuMemRelease(handle)
                raise
        self._pages[offset] = (handle, nbytes, where)

    def move(self, offset: int, where: Location, stream: int) -> None:
        """Bring a page to ``where`` at the same address, with what is in it.  Waits for ``stream``.

        No kernel may be using the page.

        Raises:
            CudaError: there is no memory; the page is where it was.
        """
        old, nbytes, at = self._pages[offset]
        if at is where:
            return
        d, address = driver(), self.address + offset
        with torch.cuda.device(self.device), relaxed_capture():
            new = self._create(nbytes, where)
            try:
                self._copy_into(new, address, nbytes, stream)
                check("cuMemUnmap", d.cuMemUnmap(address, nbytes))
            except Exception:
                d.cuMemRelease(new)
                raise
            try:
                self._map(address, nbytes, new)
            except Exception:
                self._map(address, nbytes, old)
                d.cuMemRelease(new)
                raise
            self._pages[offset] = (new, nbytes, where)
            check("cuMemRelease", d.cuMemRelease(old))

    def _create(self, nbytes: int, where: Location) -> Any:
        return check("cuMemCreate", driver().cuMemCreate(nbytes, _properties(where, self.device), 0))

    def _map(self, address: int, nbytes: int, handle: Any) -> None:
        d = driver()
        check("cuMemMap", d.cuMemMap(address, nbytes, 0, handle, 0))
        try:
            check("cuMemSetAccess", d.cuMemSetAccess(address, nbytes, [_access(self.device)], 1))
        except Exception:
            d.cuMemUnmap(address, nbytes)
            raise

    def _copy_into(self, handle: Any, source: int, nbytes: int, stream: int) -> None:
        """Fill new memory through an address of its own."""
        d = driver()
        target = int(check("cuMemAddressReserve", d.cuMemAddressReserve(nbytes, 0, 0, 0)))
        try:
            self._map(target, nbytes, handle)
            try:
                check("cuMemcpyAsync", d.cuMemcpyAsync(target, source, nbytes, stream))
                check("cuStreamSynchronize", d.cuStreamSynchronize(stream))
            finally:
                check("cuMemUnmap", d.cuMemUnmap(target, nbytes))
        finally:
            check("cuMemAddressFree", d.cuMemAddressFree(target, nbytes))


def _free(address: int, nbytes: int, pages: dict[int, tuple[Any, int, Location]], device: int) -> None:
    # At exit the context may be gone already, and its memory with it.
    with contextlib.suppress(Exception), torch.cuda.device(device), relaxed_capture():
        d = driver()
        d.cuCtxSynchronize()  # a kernel may still be reading it, and unmapping does not wait
        for offset, (handle, page, _) in pages.items():
            d.cuMemUnmap(address + offset, page)
            d.cuMemRelease(handle)
        d.cuMemAddressFree(address, nbytes)
