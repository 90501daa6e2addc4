"""What is installed and what the cards say of themselves, as plain values.  Nothing here fails where a part is missing:
a fact that cannot be had is None."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import shutil
from typing import Any

import torch

from ...system.cuda import driver
from ...system.files import host
from ...system.files.state_file import state_folder

#: Packages by the name they are imported by, and what is not there without them.
PACKAGES = {
    "torch": "nothing works",
    "numpy": "nothing works",
    "numba": "no step of parameters on a CPU",
    "rich": "no tables",
    "cupy": "no step of CUDA parameters",
    "cuda.bindings": "no step of CUDA parameters, no look at the cards",
    "matplotlib": "no plots",
}
#: Which of them steps on a device need.
NEEDED = {"cuda": ("cupy", "cuda.bindings"), "cpu": ("numba",)}

#: Device attributes by the names CUDA's runtime has for them, and the driver's.
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
    """Versions of what can be imported; None for what cannot, be it missing or broken."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # as Matplotlib's of folders that it would draw with
    try:
        return {name: _version(name) for name in PACKAGES}
    finally:
        logging.disable(before)


def _version(name: str) -> str | None:
    try:
        module = importlib.import_module(name)
    except Exception:  # a broken installation raises anything
        return None
    if isinstance(known := getattr(module, "__version__", None), str):
        return known
    names = importlib.metadata.packages_distributions().get(name.partition(".")[0], [])
    wanted = [n for n in names if n.replace("_", "-") == name.replace(".", "-")] or names
    return importlib.metadata.version(wanted[0]) if wanted else "unknown"


def cuda_versions() -> dict[str, str | None]:
    """CUDA as the driver supports it, as torch was built for it, and as NVRTC compiles for it."""
    out: dict[str, str | None] = {"driver_supports": None, "torch": torch.version.cuda, "nvrtc": None}
    try:
        number = int(driver.check("cuDriverGetVersion", driver.bindings().cuDriverGetVersion()))
        out["driver_supports"] = f"{number // 1000}.{number % 1000 // 10}" if number else None
    except Exception:  # no cuda-bindings, or no libcuda behind it
        pass
    try:
        from cuda.bindings import nvrtc

        out["nvrtc"] = ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])
    except Exception:
        pass
    return out


def cards() -> list[dict[str, Any]]:
    """The CUDA devices torch sees."""
    return [card(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]


def card(index: int) -> dict[str, Any]:
    """One CUDA device."""
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
    """What a device can do with memory; None for what cannot be asked (no cuda-bindings, or too old for it)."""
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
    """Host memory that this process may still take, and the limits on it: the machine's, and those of its cgroups."""
    limits = [{"owner": room.owner, "free": room.free, "limit": room.limit} for room in host.rooms()]
    return {"available": host.available(), "limits": limits}


def folder() -> dict[str, Any]:
    """Where state files lie and what is free there; ``path`` is None, with the reason, if they can lie nowhere."""
    try:
        path = state_folder()
        return {"path": str(path), "free": shutil.disk_usage(path).free, "reason": ""}
    except (ValueError, OSError) as error:
        return {"path": None, "free": None, "reason": str(error)}
