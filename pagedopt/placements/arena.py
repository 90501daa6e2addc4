"""What every arena is: one address range with state in it, of which the first pages rest on the device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..paging.pages import STRETCH, Layout
from ..paging.visits import Mover
from ..system.cuda import driver
from ..system.state_lost import StateLost
from .movers import Ring, StagedMover


class Arena:
    """State of some parameters in one zeroed address range, laid out and cut as ``layout`` says.

    The range keeps its address for life and is freed when the last tensor that views it dies, be that before or after
    this object.

    Args:
        layout: made with this class's ``granule``.
        device: of the parameters.
        resident: how many of the first pages rest on the device; looked at only where ``paged`` is True.

    Attributes:
        tensor: the whole range as uint8, on ``device``; for its address, as users get tensors of their own memory.

    A subclass from outside of this package is a placement like any other: ``PagedAdamW(placement=TheClass)``.  Its
    ``__init__`` calls ``super().__init__`` and makes ``tensor``, zeroed.  The class says in the attributes below what
    it can do, and overrides :meth:`move` if it is ``paged``.  It has to be a name of its module, so that an optimizer
    with it can be pickled.

    Raises:
        MemoryError: there is no room, or it would be taken from others; the text says what to do.
        CudaError: the driver refuses.  Nothing stays allocated in either case.
    """

    #: The placement's name; left out: the class's.
    name: ClassVar[str]
    #: Types of the devices whose parameters it serves.
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    #: Where pages rest that are not on the device: ``host``, ``file``, or None if there are no such pages.
    away: ClassVar[str | None] = None
    #: Whether there is no arena: torch's allocator gives each tensor its own memory.
    plain: ClassVar[bool] = False
    #: Whether a budget may divide it between the two.
    paged: ClassVar[bool] = False
    #: Whether what a budget sent away stays there (else the driver brings it back when it is used).
    keeps_budget: ClassVar[bool] = True
    #: Page boundaries are multiples of this many bytes; 0: one page.
    granule: ClassVar[int] = 0
    #: Bytes of a full page in its widest section.
    stretch: ClassVar[int] = STRETCH
    #: How a step reaches pages that are away, the default first: ``in_place``, ``staged``.
    ways: ClassVar[tuple[str, ...]] = ("in_place",)
    #: Whether there is never room for parameters that come later.
    full: ClassVar[bool] = False

    tensor: torch.Tensor
    #: Held while pages move of which other optimizers have a part, and during launches; None: none have.
    lock: AbstractContextManager[object] | None = None
    #: The tensors of state that view it, and how many of them are alive: an arena goes with the last.
    views: tuple[weakref.ref[torch.Tensor], ...] = ()
    alive: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        self.layout, self.device, self.resident = layout, device, resident

    @classmethod
    def way(cls, access: str | None) -> str:
        """How a step reaches pages that are away, if it is to be by ``access`` where there is a choice."""
        return access if access in cls.ways else cls.ways[0]

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        """Why this placement cannot serve parameters on ``device``; "" if it can."""
        return ""

    def move(self, resident: int) -> None:
        """Make the first ``resident`` pages those on the device.  Waits for the device; no address changes.

        Signal handlers run between pages, and not while one moves.

        Raises:
            MemoryError, CudaError, OSError: there is no room, or a disk fails; every page is where it was, or on the
                side it was to go to, and ``resident`` says which.
            StateLost: a page could not even stay where it was.
        """
        if resident != self.resident:
            raise NotImplementedError(f"pages of placement {self.name!r} do not move")

    def check_owner(self) -> None:
        """Refuse what only the process may do that made the arena.

        Raises:
            RuntimeError: this process was forked from that one, and would write to its state.
        """

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this arena."""
        return 0 <= tensor.data_ptr() - self.tensor.data_ptr() < self.tensor.nbytes

    def mover(self, arenas: Sequence[Arena], ring: Callable[[torch.device], Ring]) -> Mover:
        """What carries pages that are away on their visits of one step, whose launches go to the current stream.

        Args:
            arenas: by the number that moves name; those of its moves are of this arena's device and kind.
            ring: gives the slots of a device.

        Raises:
            torch.OutOfMemoryError: there is no room for the slots.
        """
        return StagedMover(ring(self.device), arenas, torch.cuda.current_stream(self.device).cuda_stream)

    @property
    def wanted(self) -> int:
        """How many pages it was last asked to have on the device: others may keep a page away that they share."""
        return self.resident

    def prepare(self) -> None:
        """Called once in every step, before its launches; what it queues goes to the current stream.

        Raises:
            RuntimeError: as :meth:`check_owner`, which whoever overrides this has to call.
        """
        self.check_owner()

    def drop(self) -> None:
        """Send away what others have brought into memory beyond the resident pages."""

    @property
    def near(self) -> str:
        """What resident pages are said to be on: ``device``, or ``host`` for parameters on a CPU."""
        return "host" if self.device.type == "cpu" else "device"

    def planned(self) -> dict[str, int]:
        """Bytes by where they should be."""
        if self.away in (None, self.near):
            return {self.near: self.layout.nbytes}
        near, away = self.layout.divided(self.resident)
        return {self.near: near, self.away: away}

    def measured(self) -> dict[str, int]:
        """Bytes by where the driver or the operating system says they are."""
        return self.planned()

    def view(self, section: int, index: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What a section has of parameter ``index``, laid out as ``like``, with a storage of its own.

        So saving, sharing or replacing it concerns no other, and it looks like any tensor of torch.
        """
        if not like.numel():
            return torch.empty_strided(like.size(), like.stride(), dtype=dtype, device=self.device)
        storage = self._bytes(self.layout.begin(section, index), like.numel() * dtype.itemsize).untyped_storage()
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, like.size(), like.stride())

    def extend(self, numels: Sequence[int]) -> list[int] | None:
        """The indices of further parameters, whose state is zero, if there is room for all of them; else None.

        What is behind the last parameter moves with its page and is never written to: it is zero as it was made.
        """
        layout = self.layout.extended(numels)
        if layout is None:
            return None
        first, self.layout = len(self.layout.numels), layout
        return list(range(first, first + len(numels)))

    def _bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A part of the range as a tensor that is no view of another, and keeps all of it."""
        if self.tensor.is_cuda:
            return driver.view(self.tensor.data_ptr() + offset, nbytes, self.device.index, self.tensor, part=True)
        return torch.frombuffer(self.on_host, dtype=torch.uint8, count=nbytes, offset=offset)

    @functools.cached_property
    def on_host(self) -> npt.NDArray[np.uint8]:
        """The whole range of parameters on a CPU, as what all tensors in it keep alive."""
        return self.tensor.numpy()


def total(reports: Sequence[dict[str, int]]) -> dict[str, int]:
    """The sum of several :meth:`Arena.planned` or :meth:`Arena.measured`, places without bytes left out."""
    out: dict[str, int] = {}
    for report in reports:
        for place, nbytes in report.items():
            if nbytes:
                out[place] = out.get(place, 0) + nbytes
    return out


__all__ = ["Arena", "StateLost", "total"]
