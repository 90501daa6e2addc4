"""Choice of a placement: names, the default, checks of options, and stand-ins where one is not available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch

from ..paging.budget import ALL, NOTHING, Budget
from ..paging.pages import Layout, Width, lay_out
from ..system import driver
from ..system.warn import warn_once
from .arena import Arena, divide
from .arena import total as total
from .file import FileArena
from .managed import DriverManagedArena, ManagedArena
from .mapped import MappedArena
from .plain import DeviceArena, HostArena, PinnedArena

#: Names of the placements that ship with the package.
PlacementName = Literal["mapped", "managed", "host", "managed-driver", "file", "device"]
#: A name, or any subclass of :class:`Arena`.
Placement = PlacementName | type[Arena]
#: How a step may reach pages that are away.
HostAccess = Literal["in_place", "staged"]

_SHIPPED = (MappedArena, ManagedArena, PinnedArena, DriverManagedArena, FileArena, HostArena, DeviceArena)
#: Placements by device type of the parameters, then by name; the first of a device is the default with a budget.
ARENAS: dict[str, dict[str, type[Arena]]] = {
    device: {kind.name: kind for kind in _SHIPPED if device in kind.devices} for device in ("cuda", "cpu")
}
PLACEMENTS = tuple(dict.fromkeys(name for arenas in ARENAS.values() for name in arenas))
HOST_ACCESS = get_args(HostAccess)
#: How many evenly spaced bytes of a user's own arena are checked to be zero.
_SAMPLES = 18


def check_placement(placement: Any, budget: Budget, host_access: str | None) -> None:
    """Raise ValueError for options that do not go together, TypeError for what is no placement."""
    if placement is not None:
        _check_kind(placement)
    if host_access is not None and host_access not in HOST_ACCESS:
        raise ValueError(f"host_access is {host_access!r}; there are {', '.join(HOST_ACCESS)}")
    if placement is None:
        return
    kinds = [arenas[placement] for arenas in ARENAS.values() if placement in arenas] or [placement]
    refusals = [_refusal_of(kind, budget) for kind in kinds]
    if all(refusals):
        raise ValueError(
            f"device_budget is {budget.said!r} with placement={shown(placement)}, where {refusals[0]}; use 'mapped' "
            "(on a CPU 'file')"
        )
    ways = {way for kind in kinds for way in kind.ways}
    if host_access is not None and host_access not in ways:
        raise ValueError(
            f"host_access is {host_access!r} with placement={shown(placement)}, which has {', '.join(sorted(ways))}"
        )


def _check_kind(placement: Any) -> None:
    known = ", ".join(PLACEMENTS)
    if isinstance(placement, str):
        if placement not in PLACEMENTS:
            raise ValueError(
                f"placement is {placement!r}; there are {known}, or a subclass of pagedopt.placements.Arena"
            )
        return
    if isinstance(placement, Arena):
        name = type(placement).__name__
        raise TypeError(
            f"placement is an object of {name}; give the class, placement={name}: arenas are made when state is"
        )
    if not isinstance(placement, type) or not issubclass(placement, Arena):
        raise TypeError(f"placement is {placement!r}; give a subclass of pagedopt.placements.Arena, or one of {known}")
    if placement is Arena or (placement.plain and placement not in _SHIPPED):
        raise TypeError(
            f"placement is {placement.__name__}, of which no arena can be made; give a subclass of Arena that makes "
            "its tensor and is not plain"
        )
    if placement.paged and placement.granule < 1:
        raise TypeError(
            f"placement {placement.__name__} is paged, and its granule is {placement.granule}; give the class the "
            "bytes of which page boundaries are multiples, e.g. granule = 1 << 16"
        )
    if placement.paged and placement.move is Arena.move:
        raise TypeError(f"placement {placement.__name__} is paged, and its pages cannot move; define move(resident)")


def _refusal_of(kind: type[Arena], budget: Budget) -> str:
    """Return why a placement cannot keep to a budget; "" if it can."""
    if budget.everything or (kind.paged and kind.keeps_budget):
        return ""
    if kind.paged:
        return "the driver decides what stays"
    if kind.away is None:
        return "all state stays on the device"
    return "" if budget.nothing else "no state stays on the device"


def shown(placement: Placement) -> str:
    """Return a placement as users write it, for messages."""
    return repr(placement) if isinstance(placement, str) else placement.__name__


def name_of(placement: Placement | None) -> str:
    """Return a placement as reports name it; "none" if there is none."""
    if placement is None:
        return "none"
    return placement if isinstance(placement, str) else placement.name


def default_placement(device: torch.device, budget: Budget) -> PlacementName:
    """Return ``device`` without a budget, else the placement that spills best."""
    first = "device" if budget.everything else next(iter(ARENAS.get(device.type, ARENAS["cpu"])))
    return cast(PlacementName, first)


def moves_on_demand(device: torch.device) -> bool:
    """Return whether state in torch's own tensors, without placement or budget, can be spilled into pages later.

    That needs a placement with pages that move: beside a CPU there is ``file``, not every GPU has one.
    """
    kinds = candidates(None, device, NOTHING)
    return any(kind.paged and kind.keeps_budget and not kind.refusal(device) for kind in kinds)


def check_device(device: torch.device, placement: Placement | None) -> None:
    """Raise ValueError for devices without kernels.  Other device types may be known to a class of one's own."""
    rocm = device.type == "cuda" and torch.version.hip is not None
    if rocm or (device.type not in ARENAS and not isinstance(placement, type)):
        raise ValueError(
            f"parameters are on {device}{' of ROCm' if rocm else ''}; supported are {' and '.join(sorted(ARENAS))} "
            "(NVIDIA). Move them there before the optimizer is made, or use torch.optim for them"
        )


def candidates(placement: Placement | None, device: torch.device, budget: Budget) -> list[type[Arena]]:
    """Return the placement (None: the default) and its stand-ins, in the order to try them.

    A class of one's own has no stand-ins.

    Raises:
        ValueError: the placement does not serve such a device and has no stand-in.
    """
    known = ARENAS.get(device.type)
    if known is None:
        return [DeviceArena]
    placement = placement or default_placement(device, budget)
    if not isinstance(placement, str):
        if device.type not in placement.devices:
            raise ValueError(
                f"placement={shown(placement)} is for parameters on {' or '.join(placement.devices)}; these are on "
                f"{device}"
            )
        return [placement]
    if placement not in known:
        if device.type == "cuda":
            raise ValueError(f"placement={placement!r} is for parameters on a CPU; these are on {device}")
        return [DeviceArena if budget.everything else FileArena]
    names = [placement]
    if placement not in ("device", "host", "file"):
        names += ["device"] if budget.everything else ["mapped", "managed", "host"]
    elif placement == "host" and device.type == "cuda":
        names += ["mapped", "managed"]
    return [known[name] for name in dict.fromkeys(names)]


def create(
    numels: Sequence[int],
    itemsizes: Sequence[Width],
    device: torch.device,
    placement: Placement | None,
    budget: Budget = ALL,
    spare: int = 0,
    before: Sequence[Arena] = (),
    block: int = 1,
) -> Arena | None:
    """Make a zeroed arena with a section per entry of ``itemsizes``, for parameters of ``numels`` elements.

    If ``placement`` is not available, its first available stand-in is used, with one warning; results are the same.
    None means no arena: torch allocates each tensor on the parameters' own device.

    Args:
        budget: of the device, measured; the arenas made ``before`` keep their part of it.
        spare: bytes of room for parameters that come later.
        block: elements that are stored together.

    Raises:
        MemoryError, torch.OutOfMemoryError, CudaError: there is no room; nothing stays allocated.
        TypeError, ValueError: a class of one's own has not made a zeroed tensor, or not called its base's ``__init__``.
    """
    placement = placement or default_placement(device, budget)
    kinds = candidates(placement, device, budget)
    asked = ARENAS.get(device.type, {}).get(placement) if isinstance(placement, str) else placement
    reason = "" if kinds[0] is asked else "these parameters are on no GPU"
    for i, kind in enumerate(kinds):
        refusal = kind.refusal(device)
        try:
            if not refusal:
                arena = None
                if not kind.plain:
                    layout = lay_out(numels, itemsizes, kind.granule, kind.stretch, spare, block)
                    arena = _make(kind, layout, device, budget, before)
                if reason:
                    _warn_of_stand_in(device, placement, kind, reason)
                return arena
        except (driver.CudaError, MemoryError) as error:
            # If the placement that was asked for is out of memory, the user should know; a stand-in is just skipped.
            if i + 1 == len(kinds) or (isinstance(error, MemoryError) and kind is asked):
                raise
            refusal = str(error)
        reason = reason or refusal
    raise ValueError(f"placement={shown(placement)} on {device}: {reason}")


def _make(kind: type[Arena], layout: Layout, device: torch.device, budget: Budget, before: Sequence[Arena]) -> Arena:
    resident = divide([*((type(a), a.layout) for a in before), (kind, layout)], budget)[-1]
    arena = kind(layout, device, resident)
    if kind not in _SHIPPED:
        _check_made(arena, layout.nbytes)
    return arena


def _check_made(arena: Arena, nbytes: int) -> None:
    """Check that a class of one's own has set its attributes and zeroed its tensor, of which a few bytes are read."""
    name, made = type(arena).__name__, getattr(arena, "tensor", None)
    if not all(hasattr(arena, each) for each in ("layout", "device", "resident")):
        raise TypeError(
            f"{name} has no layout, device and resident; its __init__ has to call "
            "super().__init__(layout, device, resident)"
        )
    if not isinstance(made, torch.Tensor) or made.dtype is not torch.uint8 or made.numel() != nbytes:
        raise TypeError(f"{name} made no tensor of {nbytes:,} bytes (uint8); its __init__ has to")
    count = _SAMPLES if nbytes else 0
    positions = torch.linspace(0, nbytes - 1, count, dtype=torch.float64, device="cpu").long()
    for at, byte in zip(positions.tolist(), made.view(-1)[positions.to(made.device)].tolist(), strict=True):
        if byte:
            raise ValueError(
                f"{name} made a tensor that is not zeroed: byte {at:,} of {nbytes:,} is {byte}; state begins as zeros: "
                "make it with torch.zeros, or zero it in __init__"
            )


def kind_of(placement: Placement | None, device: torch.device, budget: Budget) -> type[Arena]:
    """Return the first of :func:`candidates`: what an arena will be unless a stand-in is needed."""
    return candidates(placement, device, budget)[0]


def _warn_of_stand_in(device: torch.device, placement: Placement, kind: type[Arena], reason: str) -> None:
    stand_in = "ordinary memory" if kind.plain and device.type == "cpu" else f"placement {kind.name!r}"
    warn_once(
        ("placement", str(device), shown(placement), kind.name),
        f"placement={shown(placement)} on {device}: {reason}. State is kept in {stand_in}; results are the same",
    )
