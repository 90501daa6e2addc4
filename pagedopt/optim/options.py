"""Keyword options of all optimizers: where state lives, in which format, and how a step reaches it."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any, TypedDict

from ..common.similar_names import near
from ..formats.floating import StateFormat, check_format
from ..paging.budget import Given
from ..placements.choose import HostAccess, Placement
from ..transports.choose import Kind, check_transport
from .foreign_options import OPTIONS, hint


class Options(TypedDict, total=False):
    """Keywords that every optimizer takes.

    Attributes:
        state_format: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"float64"``, or short ``"fp32"``,
            ``"bf16"``, ``"fp16"``, ``"fp64"``; a torch dtype; a :class:`~pagedopt.formats.Format` of your own; or one
            of these per state name.  None: the parameter's dtype, as torch.
        placement: where state lives: ``"device"``; ``"mapped"`` (a range of device pages and page-locked host pages),
            ``"managed"`` (managed memory, each part advised to stay on its side; at most a quarter of free device
            memory), ``"managed-driver"`` (managed memory that the driver evicts and a step prefetches), ``"host"``
            (all page-locked on the host); for parameters on a CPU ``"host"`` or ``"file"`` (a file mapped into memory);
            or a subclass of :class:`pagedopt.placements.Arena`.  None: ``"device"``; with a budget ``"mapped"``, for
            parameters on a CPU ``"file"``.  With neither placement nor budget, state begins in torch's own tensors, and
            ``spill()``, ``set_device_budget()`` or ``run_with_room()`` moves it into ``"mapped"`` pages when needed, on
            a GPU that supports them.
        device_budget: how much of the state stays on each device of parameters (for those on a CPU: in RAM); the rest
            is on the host (in the file).  Bytes, as a number or a text (``"2GiB"``); a share (``"50%"`` or 0.5), which
            applies to each arena, later ones too; a time (``"20 ms"``): spill as much as adds at most 20 ms of transfer
            per step, by rates measured when state is first made (two seconds) or, with ``"20 ms by FILE"``, by those of
            ``pagedopt doctor --json > FILE``; None or ``"all"``: everything; ``"auto"``: what the device can spare
            beside model and activations, measured again during training.
        host_access: how a step reaches state that is away: ``"staged"`` (through a ring of slots on the device, by copy
            engines) or ``"in_place"`` (the kernel reads and writes over the link).  None: the placement's faster one.
        blocks: most thread blocks of a launch; None: no limit.  A few (8) nearly fill the link: an update in place on a
            stream of its own then leaves the multiprocessors to a backward pass that runs at the same time.
        transport: how the pointer table reaches the kernel (see :func:`pagedopt.multi_tensor_apply`), a name or a class
            (each device gets its own object of it).
    """

    state_format: StateFormat
    placement: Placement | None
    device_budget: Given
    host_access: HostAccess | None
    blocks: int | None
    transport: Kind


DEFAULTS: Options = {
    "state_format": None,
    "placement": None,
    "device_budget": None,
    "host_access": None,
    "blocks": None,
    "transport": "managed",
}


def check_hyperparameters(**given: Any) -> None:
    """Raise TypeError for hyperparameters that are texts, and for ``betas`` that are no pair."""
    for name, value in given.items():
        if isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, a text; write the number, as {name}={value or 0}")
        if name == "betas" and (not isinstance(value, tuple | list) or any(isinstance(beta, str) for beta in value)):
            raise TypeError(f"betas is {value!r}; give two numbers, as betas=(0.9, 0.999)")


def complete(options: Options, kind: type, states: Collection[str] | None) -> Options:
    """Return ``options`` of class ``kind``, completed with defaults.  The store checks placement, budget and access.

    Args:
        states: names of state that ``state_format`` may name; None: any.

    Raises:
        TypeError: there is no such option.
        ValueError, TypeError: an option has a bad value.
    """
    for unknown in options.keys() - DEFAULTS.keys():
        meant = hint(OPTIONS, unknown) or near(unknown, [*DEFAULTS, *inspect.signature(kind.__init__).parameters])  # type: ignore[misc]
        raise TypeError(f"{kind.__name__}.__init__() got an unexpected keyword argument {unknown!r}{meant}")
    chosen: Options = {**DEFAULTS, **options}
    check_format(chosen["state_format"], states)
    check_transport(chosen["transport"])
    blocks = chosen["blocks"]
    if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1):
        raise ValueError(f"blocks is {blocks!r}; it must be a number of thread blocks from 1 on, or None")
    return chosen
