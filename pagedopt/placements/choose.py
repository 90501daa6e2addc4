"""Placements by name, the default, and what stands in where one cannot be had."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..paging import policy
from ..paging.pages import Indices, Width, lay_out
from ..system import driver
from ..system.warn import warn_once
from .arena import Arena, StateLost, total
from .file import FileArena
from .managed import DriverManagedArena, ManagedArena
from .mapped import MappedArena
from .plain import DeviceArena, HostArena, PinnedArena

#: Placements by the type of the parameters' device and name.  One that spills by default stands before its stand-ins.
ARENAS: dict[str, dict[str, type[Arena]]] = {
    "cuda": {a.name: a for a in (MappedArena, ManagedArena, PinnedArena, DriverManagedArena, DeviceArena)},
    "cpu": {a.name: a for a in (FileArena, HostArena, DeviceArena)},
}
PLACEMENTS = tuple(dict.fromkeys(name for arenas in ARENAS.values() for name in arenas))
#: How a step may reach pages that are away.
HOST_ACCESS = ("in_place", "staged")


def check_placement(placement: str | None, budget: policy.Budget, host_access: str | None) -> None:
    """Refuse options that do not go together.

    Raises:
        ValueError: a name is unknown, or the placement does not go with the budget or with the host access.
    """
    if placement is not None and placement not in PLACEMENTS:
        raise ValueError(f"placement is {placement!r}; there are {', '.join(PLACEMENTS)}")
    if host_access is not None and host_access not in HOST_ACCESS:
        raise ValueError(f"host_access is {host_access!r}; there are {', '.join(HOST_ACCESS)}")
    budget = policy.check_budget(budget)
    if placement in ("device", "managed-driver") and budget is not None:
        why = "all state stays on the device" if placement == "device" else "the driver decides what stays"
        raise ValueError(
            f"device_budget is {budget!r} with placement={placement!r}, where {why}; use 'mapped' (on a CPU 'file')"
        )
    if placement == "host" and budget not in (None, 0):
        raise ValueError(f"device_budget is {budget!r} with placement='host'; use 'mapped' (on a CPU 'file')")
    if host_access is not None and placement is not None:
        ways = {way for arenas in ARENAS.values() if placement in arenas for way in arenas[placement].ways}
        if host_access not in ways:
            raise ValueError(
                f"host_access is {host_access!r} with placement={placement!r}, which has {', '.join(sorted(ways))}"
            )


def default_placement(device: torch.device, budget: policy.Budget) -> str:
    """``device`` unless there is a budget; then what spills best."""
    return "device" if budget is None else next(iter(ARENAS.get(device.type, ARENAS["cpu"])))


def stand_ins(placement: str, device: torch.device, budget: policy.Budget) -> list[type[Arena]]:
    """The placement, and what to try in its stead, in order.

    Raises:
        ValueError: it is not made for such a device and nothing can stand in.
    """
    known = ARENAS.get(device.type)
    if known is None:
        return [DeviceArena]
    if placement not in known:
        if device.type == "cuda":
            raise ValueError(f"placement={placement!r} is for parameters on a CPU; these are on {device}")
        return [DeviceArena if budget is None else FileArena]
    names = [placement]
    if placement not in ("device", "host", "file"):
        names += ["device"] if budget is None else ["mapped", "managed", "host"]
    elif placement == "host" and device.type == "cuda":
        names += ["mapped", "managed"]
    return [known[name] for name in dict.fromkeys(names)]


def create(
    numels: Sequence[int],
    itemsizes: Sequence[Width],
    device: torch.device,
    placement: str,
    budget: int | None,
    wanted: policy.Budget = None,
    spare: int = 0,
    before: Sequence[Indices] = (),
    block: int = 1,
) -> Arena | None:
    """An arena of zeros with a section per entry of ``itemsizes``, for parameters of ``numels`` elements.

    Where ``placement`` cannot be had, the nearest that can, with one warning; results are the same.  None stands for
    plain memory of the parameters' own device, where torch gives each tensor its own.

    Args:
        budget: bytes that may stay on the device, those of arenas made before included; None: all.
        wanted: what the user asked for: ``budget``, ``"auto"`` or None.
        spare: bytes of room for parameters that come later.
        before: bytes of each page, by arena, of those made before on this device, which keep their part of the budget.
        block: elements that are stored together.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is no room; nothing stays allocated.
        CudaError: no placement can be had.
    """
    candidates = stand_ins(placement, device, wanted)
    reason = "" if candidates[0].name == placement else "there is no GPU behind these parameters"
    for i, kind in enumerate(candidates):
        refusal = kind.refusal(device) if device.type == "cuda" else ""
        if not refusal:
            try:
                arena = _make(kind, numels, itemsizes, device, budget, spare, before, block)
            except (driver.CudaError, MemoryError) as error:
                # What was asked for by name and has no room says so; a stand-in that has none lets the next one try.
                if i + 1 == len(candidates) or (isinstance(error, MemoryError) and kind.name == placement):
                    raise
                refusal = str(error)
            else:
                if reason:
                    _warn_of_stand_in(device, placement, kind, reason)
                return arena
        reason = reason or refusal
    raise ValueError(f"placement={placement!r} on {device}: {reason}")


def _make(
    kind: type[Arena], numels: Sequence[int], itemsizes: Sequence[Width], device: torch.device, budget: int | None,
    spare: int, before: Sequence[Indices], block: int,
) -> Arena | None:  # fmt: skip
    if kind.plain:
        return None
    layout = lay_out(numels, itemsizes, kind.granule, kind.stretch, spare, block)
    return kind(layout, device, policy.place([*before, layout.page_bytes()], budget)[-1])


def is_plain(device: torch.device, placement: str, budget: policy.Budget) -> bool:
    """Whether state of a placement is in tensors of torch's own, as far as can be said without trying."""
    return stand_ins(placement, device, budget)[0].plain


def _warn_of_stand_in(device: torch.device, placement: str, kind: type[Arena], reason: str) -> None:
    place = "ordinary memory" if kind.plain and device.type == "cpu" else f"placement {kind.name!r}"
    warn_once(
        ("placement", str(device), placement, kind.name),
        f"placement={placement!r} on {device}: {reason}. State is kept in {place}; results are the same",
        stacklevel=4,
    )


__all__ = [
    "ARENAS",
    "PLACEMENTS",
    "Arena",
    "StateLost",
    "check_placement",
    "create",
    "default_placement",
    "is_plain",
    "total",
]
