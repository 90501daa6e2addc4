"""CUDA 12: what its bindings do not name is asked by number, and a stand-in without room gives way to the next."""

from __future__ import annotations

import contextlib
import enum
import functools
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from children import python

from pagedopt.paging.budget import Budget
from pagedopt.placements import choose
from pagedopt.system import driver, warn

CUDA = torch.device("cuda:0")
HOST_PAGES = 145

#: The attributes that the bindings of CUDA 12 name, and what those of 13 add.
KNOWN = {
    "CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY": 19,
    "CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY": 83,
    "CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS": 89,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
}
NEW = {"CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": HOST_PAGES}


class Result(enum.IntEnum):
    """What a driver call returns first."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_UNKNOWN = 999


class FakeDriver:
    """The part of ``cuda.bindings.driver`` that finds out what a device can do, and allocates.

    Args:
        bindings: "12.8" has no enum member 145 and takes ``attribute.value``, "12.9" takes ``int(attribute)``, "13"
            has the member.
        answer: to the attribute with number 145; an error, or 0 or 1.
    """

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self, bindings: str, answer: Result | int) -> None:
        names = KNOWN | NEW if bindings == "13" else KNOWN
        self.CUdevice_attribute = enum.IntEnum("CUdevice_attribute", names)
        self._number = int if bindings == "12.9" else (lambda attribute: attribute.value)
        self._answer = answer

    def cuDeviceGet(self, index: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetAttribute(self, attribute: Any, handle: int) -> tuple[Result, int | None]:
        answer = self._answer if self._number(attribute) == HOST_PAGES else 1
        return (answer, None) if isinstance(answer, Result) else (Result.CUDA_SUCCESS, answer)

    def cuGetErrorString(self, code: int) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"as asked for"

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, mode


def install(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver, "capabilities", functools.cache(driver.capabilities.__wrapped__))


@pytest.mark.parametrize(("answer", "can"), [(1, True), (0, False), (Result.CUDA_ERROR_INVALID_VALUE, False)])
@pytest.mark.parametrize("bindings", ["12.8", "12.9", "13"])
def test_host_pages_are_what_the_driver_says(
    bindings: str, answer: Result | int, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeDriver(bindings, answer), monkeypatch)
    assert driver.capabilities(0) == driver.Capabilities(True, True, True, host_pages=can)


@pytest.mark.parametrize("bindings", ["12.8", "12.9", "13"])
def test_another_error_of_the_driver_is_an_error(bindings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeDriver(bindings, Result.CUDA_ERROR_UNKNOWN), monkeypatch)
    with pytest.raises(driver.CudaError, match=r"cuDeviceGetAttribute failed with CUDA_ERROR_UNKNOWN: as asked for"):
        driver.capabilities(0)


# ---- the bindings that are installed, over a library in the driver's place ----

LIBRARY = r"""
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
extern "C" {
int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
    Dl_info self;
    dladdr((void*)cuGetProcAddress_v2, &self);
    *function = dlsym(dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW), name);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    const char* answer = getenv("ANSWER");
    if (attribute == 145 && strcmp(answer, "0") && strcmp(answer, "1")) return !strcmp(answer, "invalid") ? 1 : 999;
    *value = attribute == 145 ? atoi(answer) : 1;
    return 0;
}
int cuGetErrorString(int, const char** text) { *text = "as asked for"; return 0; }
}
"""
ASK = """
import os
from pagedopt.system import driver
for device, answer in enumerate(("1", "0", "invalid", "unknown")):
    os.environ["ANSWER"] = answer
    try:
        print(answer, driver.capabilities(device).host_pages)
    except driver.CudaError as error:
        print(answer, error.code)
"""
SAID = ["1 True", "0 False", "invalid False", "unknown CUDA_ERROR_UNKNOWN"]


def test_the_installed_bindings_pass_the_number_on(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ is not installed")
    (tmp_path / "cuda.cpp").write_text(LIBRARY)
    command = [compiler, "-shared", "-fPIC", "cuda.cpp", "-o", "libcuda.so.1", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert python("-c", ASK, fresh=True, LD_LIBRARY_PATH=str(tmp_path)).splitlines() == SAID


# ---- stand-ins ----


class Host:
    """Memory of the host in the place of page-locked memory."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.host = np.full(nbytes, 0xAD, np.uint8)


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with 1 MB free, so with a quarter of that for managed memory, and an older driver."""
    install(FakeDriver("12.8", Result.CUDA_ERROR_INVALID_VALUE), monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1_000_000, 2_000_000))
    monkeypatch.setattr(driver, "allocate_mapped", Host)
    monkeypatch.setattr(driver, "as_tensor", lambda buffer: torch.from_numpy(buffer.host))
    monkeypatch.setattr(warn, "_said", set())


def test_a_stand_in_without_room_gives_way_to_the_next(small_card: None) -> None:
    with pytest.warns(RuntimeWarning, match=r"cannot map host pages.*driver of CUDA 13.*placement 'host'"):
        arena = choose.create([100_000], [4, 4], CUDA, "mapped", Budget(0))
    assert arena is not None
    assert (arena.name, bool(arena.tensor.any())) == ("host", False)


def test_a_placement_asked_for_by_name_keeps_its_refusal(small_card: None) -> None:
    with pytest.raises(MemoryError, match=r"bytes of managed memory asked for.*the limit is 25% of that"):
        choose.create([100_000], [4, 4], CUDA, "managed", Budget(0))
