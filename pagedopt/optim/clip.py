"""By what a step multiplies gradients: the coefficient of clipping, divided by the scale of a ``GradScaler``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..launch.on_device import Factor, factor_on
from ..launch.sums import DeviceSquares, Squares, SquaresList, finish
from ..system.internals import in_backward
from ..tables.tensors import is_sharded, local
from .gather import Member
from .launch import Launch, Work
from .numbers import HostNumbers
from .rule_optimizer import RuleOptimizer, occurrences


class Mesh(NamedTuple):
    """A mesh of processes, over which sums of shards are added.

    Attributes:
        mesh: torch's ``DeviceMesh``.
        dims: its dimensions along which a parameter is sharded.
    """

    mesh: Any
    dims: tuple[int, ...]

    def counts(self, p: torch.Tensor) -> bool:
        """Return whether this process's part of a DTensor counts: of replicas only the first does."""
        whole: Any = p
        replicated = [dim for dim in self.dims if whole.placements[dim].is_replicate()]
        coordinate = self.mesh.get_coordinate()
        return coordinate is not None and all(coordinate[dim] == 0 for dim in replicated)

    def reduce(self, sums: torch.Tensor) -> None:
        """Add sums of all processes, in place: a collective call for each dimension along which there are shards."""
        import torch.distributed as dist

        for dim in self.dims:
            dist.all_reduce(sums, group=self.mesh.get_group(dim))


def meshes_of(params: Iterable[torch.Tensor]) -> dict[Any, Mesh]:
    """Return the meshes of parameters that are DTensors, by torch's, in the same order in all processes."""
    dims: dict[Any, set[int]] = {}
    for p in params:
        if is_sharded(p):
            # Not is_shard(): torch's _StridedShard, of FSDP2 over tensor parallel, answers False.
            sharded = (dim for dim, placement in enumerate(p.placements) if not placement.is_replicate())
            dims.setdefault(p.device_mesh, set()).update(sharded)
    return {mesh: Mesh(mesh, tuple(sorted(found))) for mesh, found in dims.items()}


#: What ``GradScaler`` sets while it calls ``step()``, as torch's fused optimizers take it.
SCALING = ("grad_scale", "found_inf")
Factors = dict[torch.device, Factor]


class Scaling(NamedTuple):
    """The scale of the loss in one step, and whether a gradient is infinite; None: 1, and none is."""

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    @classmethod
    def of(cls, optimizer: RuleOptimizer) -> Scaling:
        """Return what is set in an optimizer now.

        Raises:
            TypeError: one is neither None nor a tensor of one number (``found_inf`` may be the number 0).
            AssertionError: a group is not ``fused`` (as torch).
        """
        if vars(optimizer).keys().isdisjoint(SCALING):
            return cls()
        found = cls(*[_checked(name, vars(optimizer).get(name)) for name in SCALING])
        if found.given and not all(group.get("fused") for group in optimizer.param_groups):
            raise AssertionError(
                "grad_scale or found_inf is set, and a group is not fused=True: only such groups take them"
            )
        return found

    @property
    def given(self) -> bool:
        """Whether anything is set."""
        return self.grad_scale is not None or self.found_inf is not None


def _checked(name: str, value: Any) -> torch.Tensor | None:
    if value is None or (name == "found_inf" and isinstance(value, int | float) and not value):
        return None  # GradScaler gives a 0 where no parameter has a gradient
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(f"{name} is {value!r}; it must be a tensor of one number, or None")
    return local(value)


def note_scaling(optimizer: RuleOptimizer) -> None:
    """Note the first step that is scaled: from then on steps have other kernels, and count on the device.

    Where none of :data:`SCALING` is set there is nothing to note.

    Raises:
        TypeError, AssertionError: see :meth:`Scaling.of`.
    """
    if Scaling.of(optimizer).given and not optimizer.scaled:
        optimizer.scaled, optimizer._plan = True, None


def factor_of(optimizer: RuleOptimizer, owned: bool = False) -> StepFactor | None:
    """Return a new factor for a plan of steps; None: they take gradients as they are.

    Args:
        owned: whether a graph will own it.
    """
    if not optimizer.multiplies_gradients:
        return None
    known: Factors = {} if owned else optimizer.factors
    if owned and optimizer.skip_nonfinite:
        optimizer.factors_of_graphs.append(known)
    return StepFactor(optimizer, known, owned)


class StepFactor:
    """The factor of a plan's steps, on each device of its parameters.

    Args:
        optimizer: whose steps they are.
        known: factors by device, of which those are taken that are there, and others are made; {}: of a graph.
        owned: whether a graph owns what is made.
    """

    def __init__(self, optimizer: RuleOptimizer, known: Factors, owned: bool = False) -> None:
        self._known, self._max_norm, self._owned = known, optimizer.max_grad_norm, owned
        self._skips = optimizer.skip_nonfinite
        #: The factor on each device of the plan.
        self.factors: Factors = {}
        self._devices: list[Gradients] = []
        self._launches: tuple[Launch, ...] = ()
        self._transport = optimizer.transport
        params = [p for _, _, p in occurrences(optimizer)]
        self._home = local(params[0]).device if params else torch.device("cpu")
        self._meshes = meshes_of(params)

    def on(self, device: torch.device) -> Factor:
        """Return the factor on a device."""
        if device not in self._known:
            self._known[device] = factor_on(device, self._max_norm, self._skips)
        self.factors[device] = self._known[device]
        return self._known[device]

    def bind(self, launches: Sequence[tuple[Launch, Sequence[Member]]]) -> None:
        """Note whose gradients are clipped: those of all launches, of each parameter once, in the optimizer's order.

        Without any, their norm is 0 on the device of the first parameter.
        """
        self._launches = tuple([launch for launch, _ in launches])
        places: dict[int, tuple[Member, int, int]] = {}
        for k, (_, members) in enumerate(launches):
            for i, m in enumerate(members):
                if id(m.param) not in places or m.index < places[id(m.param)][0].index:
                    places[id(m.param)] = m, k, i
        by_device: dict[torch.device, list[_Place]] = {}
        for m, k, i in sorted(places.values(), key=lambda place: place[0].index):
            mesh = self._meshes[m.param.device_mesh] if is_sharded(m.param) else None
            if mesh is None or mesh.counts(m.param):
                by_device.setdefault(m.shard.device, []).append(_Place(k, i, mesh))
        if not by_device:  # with meshes this process takes part all the same
            by_device[self._home] = []
        if not self.factors:
            self.on(self._home)
        first = next(iter(by_device))  # is where torch.nn.utils.clip_grad_norm_ leaves the norm
        self.factors = dict(sorted(self.factors.items(), key=lambda each: each[0] != first))
        transport, meshes = None if self._owned else self._transport, [*self._meshes.values()]
        on_gpus_first = sorted(by_device.items(), key=lambda each: each[0].type == "cpu")
        self._devices = [Gradients(device, places, meshes, transport) for device, places in on_gpus_first]

    @property
    def alone(self) -> Gradients | None:
        """The gradients whose squares are added; None: those of other devices, or meshes, are added, too."""
        return self._devices[0] if len(self._devices) == 1 and not self._meshes else None

    def prepare(self, optimizer: RuleOptimizer) -> FactorUpdate:
        """Return the factor of a step whose work is prepared; nothing changes.

        Raises:
            TypeError, AssertionError: see :meth:`Scaling.of`.
            RuntimeError: gradients are clipped, and this is within a backward pass.
            CompileError, torch.OutOfMemoryError: kernels or their tables cannot be made.
        """
        scaling, max_norm = Scaling.of(optimizer), optimizer.max_grad_norm
        if max_norm is not None:
            if in_backward():
                raise RuntimeError(
                    f"max_grad_norm is {max_norm}, and step() was called within a backward pass, as by an optimizer "
                    "for each parameter: the norm of all gradients is known after it. Make one optimizer for all, and "
                    "call step() there; or set max_grad_norm to None"
                )
            for each in self._devices:
                each.prepare(self._launches)
        return FactorUpdate(self, scaling, max_norm)

    def compute(self, scaling: Scaling, max_norm: float | None) -> None:
        """Compute the factor on each device, on its current stream.  With DTensors it is a collective call."""
        for factor in self.factors.values():
            factor.clip_to(max_norm)
            factor.scale_by(*scaling)
        if max_norm is None:
            return
        if len(self._devices) == 1 and not self._meshes:
            self._devices[0].squares.add(self.factors[self._devices[0].device])
            return
        if sums := [found for each in self._devices if (found := each.squares.add(None)) is not None]:
            self._join(*sums)

    def _join(self, whole: torch.Tensor, *others: torch.Tensor) -> None:
        """Add the sums of all devices and processes, and give the total to each factor."""
        for found in others:
            whole += found.to(whole.device, non_blocking=True)
        for number, mesh in enumerate(self._meshes.values(), 1):
            mesh.reduce(whole[number : number + 1])
        for device, factor in self.factors.items():
            finish(whole.to(device, non_blocking=device.type != "cpu"), factor)

    def tell(self, optimizer: RuleOptimizer) -> None:
        """Queue what a captured step reads and has changed: the norm to clip to, and addresses of gradients."""
        for factor in self.factors.values():
            factor.clip_to(optimizer.max_grad_norm)
        if optimizer.max_grad_norm is not None:
            for each in self._devices:
                each.prepare(self._launches)
                if isinstance(each.squares, DeviceSquares):
                    each.squares.publish()

    def differences(self, optimizer: RuleOptimizer) -> list[str]:
        """Return what a captured step does not know, in words."""
        same = all(factor.max_norm == optimizer.max_grad_norm for factor in self.factors.values())
        return [] if same else ["max_grad_norm has changed"]


class FactorUpdate(NamedTuple):
    """The factor of one step, as a value: what it is computed from.

    Attributes:
        factor: of the plan.
        scaling: what a scaler gave.
        max_norm: to which gradients are clipped; None: they are not.
    """

    factor: StepFactor
    scaling: Scaling
    max_norm: float | None

    def compute(self, optimizer: RuleOptimizer, work: tuple[Work, ...]) -> tuple[Work, ...]:
        """Compute it on the current stream, and return the work that the host does not leave out.

        Where a gradient is infinite the device leaves out what it counts itself.  What the host counts (on a CPU; on a
        GPU step counts that are on the CPU) is left out here, which waits for the device.
        """
        self.factor.compute(self.scaling, self.max_norm)
        if self.max_norm is not None:
            optimizer.clipped_by = self.factor.factors
        counted = [isinstance(each.launch.numbers, HostNumbers) for each in work]
        if not any(counted) or not self._leaves_out(optimizer):
            return work
        return tuple([each for each, on_host in zip(work, counted, strict=True) if not on_host])

    def _leaves_out(self, optimizer: RuleOptimizer) -> bool:
        """Return whether this is a step to leave out, which the device knows."""
        if self.scaling.found_inf is not None and float(self.scaling.found_inf):
            return True
        norm = optimizer.grad_norm if optimizer.skip_nonfinite else None
        return norm is not None and not math.isfinite(norm)


class _Place(NamedTuple):
    """Where a gradient is: the number of its launch, its position there; the mesh over which its squares are added."""

    launch: int
    position: int
    mesh: Mesh | None


class Gradients:
    """All gradients on one device, of which each parameter's is there once.

    Args:
        device: it.
        places: of the gradients, in the optimizer's order.
        meshes: of the optimizer.  What no mesh adds is the first part, then comes a part for each mesh.
        transport: of the tables; None: a graph owns them.
    """

    def __init__(self, device: torch.device, places: list[_Place], meshes: list[Mesh], transport: Any) -> None:
        self.device, self._transport = device, transport
        self._parts = [[place for place in places if place.mesh == mesh] for mesh in (None, *meshes)]
        self._made_for: list[torch.dtype | None] | None = None
        self._rows: list[npt.NDArray[np.int64]] = []
        self.squares: Squares

    def prepare(self, launches: Sequence[Launch]) -> None:
        """Take the addresses that the tables of launches have."""
        tables = [launch.sweep.table for launch in launches]
        dtypes = [table.dtypes[1] or table.dtypes[0] for table in tables]
        if dtypes != self._made_for:  # where there was no gradient so far, that of its parameters was assumed
            self._make(launches, dtypes)
            self._made_for = dtypes
        found = np.concatenate([table.column(1) for table in tables]) if tables else np.zeros(0, np.uint64)
        for each, rows in zip(self.squares.lists, self._rows, strict=True):
            each.take(found[rows])

    def cells(self) -> dict[int, tuple[int, int]]:
        """Return for the rows of all launches which list of squares, of those with chunks, holds a gradient's address,
        and in which word."""
        found: dict[int, tuple[int, int]] = {}
        lists = [(x.table.row_words, rows) for x, rows in zip(self.squares.lists, self._rows, strict=True) if x.chunks]
        for i, (words, rows) in enumerate(lists):
            at, stride = words.ctypes.data, words.strides[0]
            found.update((row, (i, at + stride * k)) for k, row in enumerate(rows.tolist()))
        return found

    def _make(self, launches: Sequence[Launch], dtypes: Sequence[torch.dtype | None]) -> None:
        tables = [launch.sweep.table for launch in launches]
        first = np.cumsum([0, *map(len, tables)])
        numels = np.concatenate([np.array(table.numels, np.int64) for table in tables] or [np.zeros(0, np.int64)])
        self._rows, parts = [], []
        for places in self._parts:
            by_dtype: dict[torch.dtype, list[int]] = {}
            for place in places:
                if (dtype := dtypes[place.launch]) is not None:
                    by_dtype.setdefault(dtype, []).append(int(first[place.launch]) + place.position)
            self._rows += [np.array(rows, np.int64) for rows in by_dtype.values()]
            parts.append([SquaresList(dtype, numels[rows]) for dtype, rows in by_dtype.items()])
        on_cpu = self.device.type == "cpu"
        self.squares = Squares(parts) if on_cpu else DeviceSquares(parts, self.device, self._transport)
        self.squares.compile()
