"""The examination: what is installed and free, the trials, and the notes and problems that follow from them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict
from typing import Any

import torch

from .. import __version__
from ..paging.budget import NOTHING
from ..paging.pages import lay_out
from ..placements.choose import ARENAS, Arena, candidates
from ..planning.rates import Rates
from ..system import driver, host, internals, machine
from ..system import look as build
from ..system.state_file import state_folder

#: Packages that a machine may do without, by import name, with what does not work then.
PACKAGES = {
    "numba": "no step of parameters on a CPU",
    "cupy": "no step of CUDA parameters",
    "cuda.bindings": "no step of CUDA parameters, no look at the cards",
}
#: The packages that a step needs, by type of device.
NEEDED = {"cuda": ("cupy", "cuda.bindings"), "cpu": ("numba",)}


def examine(device: torch.device, quick: bool = False) -> dict[str, Any]:
    """Return a report on this machine as JSON values; a fact that cannot be had is None.

    Args:
        device: whose rates are measured, and on which a step is tried.
        quick: do not measure rates.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    packages = {name: version(name) for name in ("torch", "numpy", "rich", *PACKAGES)}
    report: dict[str, Any] = {
        "pagedopt": __version__,
        "system": {
            "platform": platform.platform(), "python": platform.python_version(), "processor": machine.processor(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "packages": packages,
        "driver": machine.driver_version(),
        "cuda": cuda_versions(),
        "cards": [card(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)],
        "host": {"available": host.available(), "limits": [asdict(room) for room in host.rooms()]},
        "state_folder": folder(),
        "device": str(device),
        "placements": try_placements(device),
        "step": try_step(device),
        "look": look(),  # after a step, whose optimizer has begun to compile it
        "rates": None,
        "notes": notes(packages),
    }  # fmt: skip
    report["problems"] = problems(device, report)
    if not quick:
        try:
            report["rates"] = Rates.measured(device).as_dict()
        except (RuntimeError, MemoryError) as error:
            report["problems"].append(f"rates could not be measured: {error}")
    return report


def version(name: str) -> str | None:
    """Return the version of a package; None if it is missing or its import fails."""
    try:
        module = importlib.import_module(name)
        return getattr(module, "__version__", None) or importlib.metadata.version(name)
    except Exception:  # a broken installation may raise anything
        return None


def look() -> dict[str, str]:
    """Return which look finds out what has changed since the last step, ``compiled`` or ``Python``, with the reason."""
    if not build.is_wanted():
        reason = f"{build.VARIABLE}=python"
    elif build.compiled_look() is not None:
        return {"used": "compiled", "reason": "one call for a step that repeats the last one"}
    else:
        reason = build.why_none()
    return {"used": "Python", "reason": reason}


def cuda_versions() -> dict[str, str | None]:
    """Return the CUDA versions that the driver supports, that torch was built for, and that NVRTC has."""
    out: dict[str, str | None] = {"driver_supports": None, "torch": torch.version.cuda, "nvrtc": None}
    with contextlib.suppress(Exception):  # without cuda-bindings, or without libcuda
        number = int(driver.call("cuDriverGetVersion"))
        out["driver_supports"] = f"{number // 1000}.{number % 1000 // 10}" if number else None
    with contextlib.suppress(Exception):
        from cuda.bindings import nvrtc

        out["nvrtc"] = ".".join(str(n) for n in nvrtc.nvrtcVersion()[1:])
    return out


def card(index: int) -> dict[str, Any]:
    """Return facts about one CUDA device; ``can`` is empty if cuda-bindings cannot ask."""
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    can: dict[str, bool] = {}
    with contextlib.suppress(Exception):
        can = asdict(driver.capabilities(index))
    return {"index": index, "name": found.name, "compute_capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count, "memory_total": total, "memory_free": free,
            "can": can}  # fmt: skip


def folder() -> dict[str, Any]:
    """Return the folder of state files and its free bytes; ``path`` is None, with a reason, if there is none."""
    try:
        path = state_folder()
        return {"path": str(path), "free": shutil.disk_usage(path).free, "reason": ""}
    except (ValueError, OSError) as error:
        return {"path": None, "free": None, "reason": str(error)}


def notes(packages: dict[str, str | None]) -> list[str]:
    """Return remarks: worth knowing, but no failures."""
    out = [f"{name} is not installed: {PACKAGES[name]}" for name in PACKAGES if not packages[name]]
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        out.append("NUMBA_DISABLE_JIT is set: the first step of parameters on a CPU turns Numba's compiler on again")
    if internals.openmp() is None:
        out.append("steps on a CPU take one thread: this build of torch has no OpenMP with GCC's interface (libgomp)")
    if torch.cuda.is_available():
        return out
    if machine.driver_version() is None:
        return [*out, "no NVIDIA driver found: parameters on a CPU only"]
    blind = f"torch {torch.__version__} sees no GPU; is one visible?"
    built = f"torch {torch.__version__} is built without CUDA: notes/setup.md"
    return [*out, f"there is an NVIDIA driver, but {blind if torch.version.cuda else built}"]


def problems(device: torch.device, report: dict[str, Any]) -> list[str]:
    """Return failures: of things that should work here. If a package is missing, that is the problem, and no more."""
    if missing := [name for name in NEEDED[device.type] if not report["packages"][name]]:
        needed = f"which parameters on {device.type} need"
        return [f"{name} is missing, {needed}: {PACKAGES[name]}; `make setup` installs it" for name in missing]
    broken = [tried for tried in report["placements"] if tried["promised"] and not tried["works"]]
    failed = [f"a step of AdamW on {device} failed: {report['step']['reason']}"] if report["step"]["reason"] else []
    return failed + [f"placement {t['placement']!r} should work on {device}: {t['reason']}" for t in broken]


# --- trials of placements and of steps --------------------------------------------------------------------------------

#: Elements of the parameter: 16 MiB of state in four pages. Their indices, which are written, are exact in float32.
NUMEL = 1 << 21
#: Elements of a parameter that takes steps: enough for state in 8 bits.
STEPPED = 5000
#: Formats, how many steps are taken, and how far from torch's the parameters may be after them. A step moves them by
#: the learning rate, 0.1. The first step reads no state; the second reads it, in int8 within a few percent.
STEPS: list[tuple[dict[str, Any], int, float]] = [
    ({"state_format": "float32"}, 1, 1e-6),
    ({"state_format": "int8"}, 2, 5e-3),
    ({"param_format": "bfloat16+16"}, 2, 1e-6),
]


def try_placements(device: torch.device) -> list[dict[str, Any]]:
    """Return for each placement of the device's type whether it works here, and if not, why.

    ``promised`` says that it should work, as the machine supports it; ``default``, that a budget alone leads to it.
    """
    tried = {name: {"placement": name, **_try(kind, device)} for name, kind in ARENAS[device.type].items()}
    works = [kind.name for kind in candidates(None, device, NOTHING) if tried[kind.name]["works"]]
    return [{**found, "default": works[:1] == [name]} for name, found in tried.items()]


def _try(kind: type[Arena], device: torch.device) -> dict[str, Any]:
    refusal = reason = ""
    try:
        refusal = reason = kind.refusal(device)
        if not refusal and not kind.plain:  # plain state is torch's own tensors
            _allocate_and_move(kind, device)
    except Exception as error:  # any failure is a finding
        reason = _words(error)
    ways = list(kind.ways) if kind.away else []
    return {"ways": ways, "promised": not refusal, "works": not reason, "reason": reason}


def _words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _allocate_and_move(kind: type[Arena], device: torch.device) -> None:
    """Write state, evict and fetch its pages, and raise RuntimeError if it does not read back as written."""
    expected = torch.arange(NUMEL, dtype=torch.float32, device=device)
    layout = lay_out([NUMEL], [4, 4], kind.granule, kind.stretch)
    arena = kind(layout, device, layout.pages // 2 if kind.paged else layout.pages)
    sections = {sign: arena.view(section, 0, expected, torch.float32) for section, sign in enumerate((1, -1))}
    for sign, state in sections.items():
        state.copy_(sign * expected)
    for resident in (0, layout.pages, layout.pages // 2) if kind.paged else ():
        arena.move(resident)
    if not all(torch.equal(state, sign * expected) for sign, state in sections.items()):
        raise RuntimeError("state read back is not what was written")


def try_step(device: torch.device) -> dict[str, Any]:
    """Compare steps of AdamW on the device with torch's. This compiles the kernels unless they are cached."""
    from ..optim import PagedAdamW

    for given, steps, tolerance in STEPS:
        ((option, name),) = given.items()
        values, grad = (torch.linspace(*ends, STEPPED, device=device).bfloat16() for ends in ((-1, 1), (1, 2)))
        params = [values.requires_grad_() if option == "param_format" else values.float().requires_grad_()]
        params.append(values.detach().float().requires_grad_())
        for p in params:
            p.grad = grad.to(p.dtype)
        try:
            ours = PagedAdamW([params[0]], lr=0.1, **given)
            for each in (ours, torch.optim.AdamW([params[1]], lr=0.1)):
                for _ in range(steps):
                    each.step()
        except Exception as failure:  # any failure is a finding
            return {"works": False, "reason": f"{_words(failure)}, with {option}={name!r}"}
        if not (error := (ours.master(params[0]) - params[1]).abs().max().item()) <= tolerance:
            reason = f"parameters are {error:.2g} from torch's after {steps} steps with {option}={name!r}"
            return {"works": False, "reason": reason}
    return {"works": True, "reason": ""}
