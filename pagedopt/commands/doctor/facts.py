"""Installed packages, the look of steps, CUDA versions, GPUs, host memory and disk, as JSON values. A fact that cannot
be had is None."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import shutil
from typing import Any

import torch

from ...system.cuda import driver
from ...system.files import host
from ...system.files.state_file import state_folder
from ...system.look import parts

#: Packages by import name, with what does not work without them.
PACKAGES = {
    "torch": "nothing works",
    "numpy": "nothing works",
    "numba": "no step of parameters on a CPU",
    "rich": "no tables",
    "cupy": "no step of CUDA parameters",
    "cuda.bindings": "no step of CUDA parameters, no look at the cards",
    "matplotlib": "no plots",
}
#: The packages that a step needs, by type of device.
NEEDED = {"cuda": ("cupy", "cuda.bindings"), "cpu": ("numba",)}

#: Device attributes: the name in CUDA's runtime API, and that in the driver API.
ATTRIBUTES = {
    "managedMemory": "MANAGED_MEMORY",
    "concurrentManagedAccess": "CONCURRENT_MANAGED_ACCESS",
    "pageableMemoryAccess": "PAGEABLE_MEMORY_ACCESS",
    "pageableMemoryAccessUsesHostPageTables": "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    "directManagedMemAccessFromHost": "DIRECT_MANAGED_MEM_ACCESS_FROM_HOST",
    "canMapHostMemory": "CAN_MAP_HOST_MEMORY",
    "virtualMemoryManagement": "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "hostVirtualMemoryManagement": "HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "asyncEngineCount": "ASYNC_ENGINE_COUNT",
    "integrated": "INTEGRATED",
}


def package_versions() -> dict[str, str | None]:
    """Return the version of each package; None if it is missing or its import fails."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # matplotlib warns of folders that it cannot write
    try:
        return {name: _version(name) for name in PACKAGES}
    finally:
        logging.disable(before)


def _version(name: str) -> str | None:
    try:
        module = importlib.import_module(name)
    except Exception:  # a broken installation may raise anything
        return None
    if isinstance(known := getattr(module, "__version__", None), str):
        return known
    names = importlib.metadata.packages_distributions().get(name.partition(".")[0], [])
    wanted = [n for n in names if n.replace("_", "-") == name.replace(".", "-")] or names
    return importlib.metadata.version(wanted[0]) if wanted else "unknown"


def look() -> dict[str, str]:
    """Return which look finds out what has changed since the last step, ``compiled`` or ``Python``, with the reason."""
    if not parts.is_wanted():
        return {"used": "Python", "reason": f"{parts.VARIABLE}=python"}
    if parts.compiled_look() is not None:
        return {"used": "compiled", "reason": "its parts passed their test"}
    if parts.pending():
        return {"used": "Python", "reason": "the test of the compiled one's parts has not ended yet"}
    return {"used": "Python", "reason": "a part of torch is not as expected, or could not be tested"}


def cuda_versions() -> dict[str, str | None]:
    """Return the CUDA versions that the driver supports, that torch was built for, and that NVRTC has."""
    out: dict[str, str | None] = {"driver_supports": None, "torch": torch.version.cuda, "nvrtc": None}
    with contextlib.suppress(Exception):  # without cuda-bindings, or without libcuda
        number = int(driver.check("cuDriverGetVersion", driver.bindings().cuDriverGetVersion()))
        out["driver_supports"] = f"{number // 1000}.{number % 1000 // 10}" if number else None
    with contextlib.suppress(Exception):
        from cuda.bindings import nvrtc

        out["nvrtc"] = ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])
    return out


def cards() -> list[dict[str, Any]]:
    """Return facts about each CUDA device that torch sees."""
    return [card(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


def card(index: int) -> dict[str, Any]:
    """Return facts about one CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_total": total,
        "memory_free": free,
        "attributes": attributes(index),
    }


def attributes(index: int) -> dict[str, int | None]:
    """Return a device's abilities with memory; None for those that cuda-bindings (missing, or old) cannot ask."""
    out: dict[str, int | None] = dict.fromkeys(ATTRIBUTES)
    try:
        d = driver.bindings()
        handle = driver.check("cuDeviceGet", d.cuDeviceGet(index))
    except Exception:
        return out
    for name, attribute in ATTRIBUTES.items():
        known = getattr(d.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}", None)
        if known is not None:
            code, value = d.cuDeviceGetAttribute(known, handle)
            out[name] = int(value) if int(code) == 0 else None
    return out


def host_memory() -> dict[str, Any]:
    """Return the host memory that this process may still take, and its limits: the machine's and those of cgroups."""
    limits = [{"owner": room.owner, "free": room.free, "limit": room.limit} for room in host.rooms()]
    return {"available": host.available(), "limits": limits}


def folder() -> dict[str, Any]:
    """Return the folder of state files and its free bytes; ``path`` is None, with a reason, if there is none."""
    try:
        path = state_folder()
        return {"path": str(path), "free": shutil.disk_usage(path).free, "reason": ""}
    except (ValueError, OSError) as error:
        return {"path": None, "free": None, "reason": str(error)}
