"""The options of every optimizer: where state lives, in which format, and how a step reaches it."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TypedDict

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
            (all page-locked on the host); for parameters on a CPU ``"host"`` or ``"file"`` (a file mapped into memory).
            None: ``"device"``, or with a budget ``"mapped"``, for parameters on a CPU ``"file"``.  State for which
            neither was asked goes from torch's own tensors into ``"mapped"`` pages when ``spill()``,
            ``set_device_budget()`` or ``run_with_room()`` would have it away, on a GPU that has such.  Or a class of
            your own, a subclass of :class:`pagedopt.placements.Arena`.
        device_budget: what of the state stays on each device of parameters (for those on a CPU: in RAM); the rest is
            kept on the host (in the file).  Bytes, as a number or a text as ``"2GiB"``; a share of it, as ``"50%"`` or
            0.5, which every arena of state keeps of its own pages, whatever is made later; a time as ``"20 ms"``: as
            little as lets a step take so much longer at most, for its bytes alone, by rates that are measured when
            state is first made (two seconds) or, as ``"20 ms by FILE"``, of ``pagedopt doctor --json > FILE``; None or
            ``"all"``: all of it; ``"auto"``: what the device can spare beside model and activations, looked up again as
            training goes.
        host_access: how a step reaches what is away: ``"staged"`` (through a ring of device buffers, on copy engines)
            or ``"in_place"`` (by the kernel, over the link).  None: the faster one of the placement.
        blocks: most thread blocks of a launch.  A few (8) nearly fill the link, so that an update in place on a stream
            of its own leaves the multiprocessors to a backward beside it.
        transport: how the pointer table reaches the kernel (see :func:`pagedopt.multi_tensor_apply`), by name or by
            class: each device gets one of its own.
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


def complete(options: Options, kind: type, states: Collection[str] | None) -> Options:
    """``options`` with the defaults of those that are left out.

    Args:
        kind: the class that was given them.
        states: names of state that ``state_format`` may speak of; None: any.

    Raises:
        TypeError: there is no such option.
        ValueError, TypeError: one has an unknown value.  (Placement, budget and access are checked by the store.)
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
