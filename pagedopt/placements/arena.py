"""The base class of placements: one address range that holds state, whose first pages are resident."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..paging import policy
from ..paging.budget import Budget
from ..paging.pages import STRETCH, Layout
from ..paging.visits import Mover
from ..system import driver
from .movers import Ring, StagedMover


class Arena:
    """One zeroed address range with the state of some parameters, divided as ``layout`` says.

    The range keeps its address for life.  It is freed when the last tensor that views it dies, before or after this
    object.

    A subclass is a placement: ``PagedAdamW(placement=TheClass)``.  Its ``__init__`` calls ``super().__init__`` and
    makes ``tensor``, zeroed.  The class attributes below say what the placement can do; one that is ``paged`` overrides
    :meth:`move`.  Define the class at the top level of its module, so that an optimizer with it can be pickled.

    Args:
        layout: made with this class's ``granule``.
        device: device of the parameters.
        resident: how many of the first pages are on the device; ignored unless ``paged`` is True.

    Attributes:
        tensor: the whole range as uint8, on ``device``.  It gives the address; users get tensors with storages of
            their own (:meth:`view`).

    Raises:
        MemoryError: there is no room, or it would be taken from others; the text says what to do.
        CudaError: the driver refuses.  Nothing stays allocated in either case.
    """

    #: Name of the placement; the default is the name of the class.
    name: ClassVar[str]
    #: Device types whose parameters it serves.
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    #: Where pages are that are not on the device: ``host`` or ``file``; None: there are no such pages.
    away: ClassVar[str | None] = None
    #: True: there is no arena, torch's allocator gives each tensor its own memory.
    plain: ClassVar[bool] = False
    #: Whether a budget may divide it into resident pages and pages that are away.
    paged: ClassVar[bool] = False
    #: Whether pages that a budget sent away stay there; False: the driver brings them back when they are used.
    keeps_budget: ClassVar[bool] = True
    #: Page boundaries are multiples of this many bytes; 0: the arena has one page.
    granule: ClassVar[int] = 0
    #: Bytes of a full page in its widest section.
    stretch: ClassVar[int] = STRETCH
    #: How a step may reach pages that are away, the default first: ``in_place``, ``staged``.
    ways: ClassVar[tuple[str, ...]] = ("in_place",)

    tensor: torch.Tensor
    #: The storages of state tensors that view it, and how many live.  A store drops the arena when the last one dies.
    views: tuple[weakref.ref[torch.UntypedStorage], ...] = ()
    alive: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self, layout: Layout, device: torch.device, resident: int) -> None:
        self.layout, self.device, self.resident = layout, device, resident

    @classmethod
    def way(cls, access: str | None) -> str:
        """Return how a step reaches pages that are away: by ``access`` if this placement can, else by its default."""
        return access if access in cls.ways else cls.ways[0]

    @classmethod
    def refusal(cls, device: torch.device) -> str:
        """Return why this placement cannot serve parameters on ``device``; "" if it can."""
        return ""

    def move(self, resident: int) -> None:
        """Make the first ``resident`` pages the resident ones.  Waits for the device; no address changes.

        Signal handlers run between pages, and not while one moves.

        Raises:
            MemoryError, CudaError, OSError: there is no room, or a disk fails.  Every page is where it was or where it
                was to go, and ``resident`` says which.
            StateLost: a page could be neither moved nor left where it was.
        """
        if resident != self.resident:
            raise NotImplementedError(f"pages of placement {self.name!r} do not move")

    def check_owner(self) -> None:
        """Refuse a forked process what only the process that made the arena may do.

        Raises:
            RuntimeError: this process was forked from that one, and would write to its state.
        """

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this arena."""
        return 0 <= tensor.data_ptr() - self.tensor.data_ptr() < self.tensor.nbytes

    def mover(self, arenas: Sequence[Arena], ring: Callable[[torch.device], Ring]) -> Mover:
        """Return a mover for the visits of pages in one step, whose launches go to the current stream.

        Args:
            arenas: indexed by ``Move.arena``; all are of this device and this class.
            ring: returns the slots of a device.

        Raises:
            torch.OutOfMemoryError: there is no room for the slots.
        """
        return StagedMover(ring(self.device), arenas, torch.cuda.current_stream(self.device).cuda_stream)

    def prepare(self) -> None:
        """Get ready for a step: called once in each, before its launches.  Work goes to the current stream.

        Raises:
            RuntimeError: as :meth:`check_owner`, which an override has to call.
        """
        self.check_owner()

    def drop(self) -> None:
        """Evict again the pages that are away but that other code has read or written, e.g. for a checkpoint."""

    @property
    def near(self) -> str:
        """Where reports say that resident pages are: ``device``, or ``host`` for parameters on a CPU."""
        return "host" if self.device.type == "cpu" else "device"

    def planned(self) -> dict[str, int]:
        """Return bytes by where they should be."""
        if self.away in (None, self.near):
            return {self.near: self.layout.nbytes}
        near, away = self.layout.divided(self.resident)
        return {self.near: near, self.away: away}

    def measured(self) -> dict[str, int]:
        """Return bytes by where the driver or the operating system says they are."""
        return self.planned()

    def view(self, section: int, index: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the state of parameter ``index`` in a section, with the shape and strides of ``like``.

        It has a storage of its own, as any tensor of torch: saving, sharing or replacing it affects no other.
        """
        if not like.numel():
            return torch.empty_strided(like.size(), like.stride(), dtype=dtype, device=self.device)
        offset, nbytes = self.layout.begin(section, index), like.numel() * dtype.itemsize
        if self.tensor.is_cuda:
            raw = driver.view(self.tensor.data_ptr() + offset, nbytes, self.device.index, self.tensor, part=True)
        else:
            raw = torch.frombuffer(self.on_host, dtype=torch.uint8, count=nbytes, offset=offset)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(raw.untyped_storage(), 0, like.size(), like.stride())

    def extend(self, numels: Sequence[int]) -> list[int] | None:
        """Add parameters, whose state is zero.  Return their indices, or None if there is no room for all of them.

        Memory behind the last parameter is still zero: it moves with its page, and nothing writes to it.
        """
        layout = self.layout.extended(numels)
        if layout is None:
            return None
        first, self.layout = len(self.layout.numels), layout
        return list(range(first, first + len(numels)))

    @functools.cached_property
    def on_host(self) -> npt.NDArray[np.uint8]:
        """The whole range as an array, for parameters on a CPU.  Every tensor made from it keeps the range alive."""
        return self.tensor.numpy()


def divide(arenas: Sequence[tuple[type[Arena], Layout]], budget: Budget) -> list[int]:
    """Return how many pages of each arena of one device are resident under a budget that ``Limits.of`` returned.

    Making arenas, moving pages and estimating all ask here; ``arenas`` are in the order in which they were made.
    """
    paged = iter(policy.resident_pages([layout.page_bytes() for kind, layout in arenas if kind.paged], budget))
    return [next(paged) if kind.paged else layout.pages if kind.away is None else 0 for kind, layout in arenas]


def total(reports: Sequence[dict[str, int]]) -> dict[str, int]:
    """Add up several :meth:`Arena.planned` or :meth:`Arena.measured`, and leave out zeros."""
    return dict(sum(map(Counter, reports), Counter[str]()))
