"""Memory of a system in the place of a CUDA driver's: addresses, handles and mappings that behave as CUDA's do."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import mmap
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedopt.placements import MappedArena
from pagedopt.system.cuda import driver, virtual
from pagedopt.system.files import libc

GRANULE = 4096

_handles = itertools.count(1)


class Result(enum.IntEnum):
    """What a driver call returns first."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakePages:
    """The part of ``cuda.bindings.driver`` that maps pages; a handle is a file in memory.

    What CUDA refuses is refused: mapping where something is mapped, unmapping where nothing is, copying where there is
    no access, freeing an address range in which something is mapped, releasing a handle twice.

    Attributes:
        calls: names of the calls so far.
        before: called with the name of each call, may return an error in its stead, or raise.
        handles: those that live, with their bytes.
        mapped: by address: handle, bytes.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.before: Callable[[str], Result | None] = lambda name: None
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.ranges: dict[int, int] = {}
        self._files: dict[int, int] = {}

    def close(self) -> None:
        """Give back the memory of all handles."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return lambda *arguments: self._call(name, *arguments)
        return _Anything()  # structures and enumerations, which nobody looks into

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        if name in ("cuGetErrorString", "cuThreadExchangeStreamCaptureMode"):
            return Result.CUDA_SUCCESS, b"as asked for"
        self.calls.append(name)
        if (error := self.before(name)) is not None:
            return error, None
        try:
            return Result.CUDA_SUCCESS, getattr(self, f"_{name}")(*arguments)
        except (AssertionError, KeyError):
            return Result.CUDA_ERROR_INVALID_VALUE, None

    def _cuMemAddressReserve(self, nbytes: int, *_: object) -> int:
        address = libc._call("mmap", None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.ranges[address] = nbytes
        return address

    def _cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert self.ranges[address] == nbytes
        assert not any(address <= at < address + nbytes for at in self.mapped)
        del self.ranges[address]
        libc.unmap(address, nbytes)

    def _cuMemCreate(self, nbytes: int, *_: object) -> int:
        file = os.memfd_create("page")
        os.ftruncate(file, nbytes)
        handle = next(_handles)
        self.handles[handle] = nbytes
        self._files[handle] = file
        return handle

    def _cuMemRelease(self, handle: int) -> None:
        del self.handles[handle]  # what is mapped stays until it is unmapped, as in CUDA

    def _cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        assert self.handles[handle] == nbytes
        assert address not in self.mapped
        self.mapped[address] = (handle, nbytes)

    def _cuMemSetAccess(self, address: int, nbytes: int, *_: object) -> None:
        handle, size = self.mapped[address]
        assert size == nbytes
        libc.map_file_at(address, nbytes, self._files[handle], 0)
        self.accessible.add(address)

    def _cuMemUnmap(self, address: int, nbytes: int) -> None:
        assert self.mapped.pop(address)[1] == nbytes
        self.accessible.discard(address)
        libc._call("mmap", address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc._MAP_FIXED, -1, 0)

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        assert {target, source} <= self.accessible
        ctypes.memmove(target, source, nbytes)

    def _cuStreamSynchronize(self, stream: int) -> None:
        pass

    def _cuCtxSynchronize(self) -> None:
        pass

    def fail(self, at: int, error: Result | BaseException = Result.CUDA_ERROR_OUT_OF_MEMORY) -> None:
        """Let the ``at``-th call from now on fail, or raise."""
        number = itertools.count()

        def before(name: str) -> Result | None:
            if next(number) != at:
                return None
            if isinstance(error, BaseException):
                raise error
            return error

        self.before = before


class Card(MappedArena):
    """Mapped pages of a card that is memory of this system, for parameters on a CPU; updated in place."""

    devices = ("cpu",)
    granule = GRANULE
    ways = ("in_place",)

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        return ""


class _Anything(SimpleNamespace):
    """A structure, an enumeration, or what makes one."""

    def __call__(self, *_: object) -> _Anything:
        return _Anything()

    def __getattr__(self, name: str) -> Any:
        return _Anything()

    def __int__(self) -> int:
        return 0


def install(monkeypatch: pytest.MonkeyPatch) -> FakePages:
    """Put it in the place of the driver, as of a device that is there."""
    fake = FakePages()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(virtual, "bindings", lambda: fake)
    monkeypatch.setattr(virtual, "_properties", lambda where, device: where)
    monkeypatch.setattr(virtual, "_access", lambda device: None)
    monkeypatch.setattr(virtual, "view", lambda address, nbytes, device, owner: _view(address, nbytes, owner))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    return fake


def _view(address: int, nbytes: int, owner: object) -> torch.Tensor:
    raw: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    raw.owner = owner
    return torch.frombuffer(raw, dtype=torch.uint8)
