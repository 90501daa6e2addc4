"""Apply a rule to lists of tensors: one launch over one pointer list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels import cuda
from ..rules import Rule
from ..tables.layout import Geometry, Span
from ..tables.pointers import PointerTable, Rows, TensorList
from ..transports.transport import Transport, create

Scalars = Mapping[str, float]


class Sweep:
    """A rule bound to lists of tensors, prepared once and run many times.  It keeps the tensors alive.

    Args:
        rule: what happens to one element.
        lists: for each of the rule's inputs, the tensors (on one device, one dtype per list).  ``None`` entries are
            absent tensors, whose row is skipped.
        transport: how the table reaches a CUDA kernel: a name, or a :class:`Transport` to share.  Not used on a CPU.
        sets: how many different sets of scalars may be in use at once.
        geometry: how to cut the work; chosen from the sizes when left out.
        rows: which parts of the tensors are the rows of the table (see :class:`~pagedopt.pointers.Rows`).
        blocks: at most this many thread blocks per launch; left out: one per chunk.

    Raises:
        ValueError, TypeError: the lists do not fit the rule or each other (see :class:`PointerTable`).
    """

    def __init__(
        self,
        rule: Rule,
        lists: Sequence[TensorList],
        *,
        transport: str | Transport = "managed",
        sets: int = 1,
        geometry: Geometry | None = None,
        rows: Rows | None = None,
        blocks: int | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(f"rule is {type(rule).__name__}; decorate a function with pagedopt.rule")
        if len(lists) != len(rule.inputs):
            raise ValueError(f"rule {rule.name!r} takes {len(rule.inputs)} lists {rule.inputs}, got {len(lists)}")
        self.rule = rule
        self.table = PointerTable(
            lists,
            writes=rule.writes,
            names=rule.inputs,
            uniforms=rule.uniform_count,
            sets=sets,
            geometry=geometry,
            rows=rows,
        )
        self.blocks = blocks
        #: Whether the last run has launched anything: what failed before that has changed nothing.
        self.begun = False
        self.device = self.table.device
        self._take_dtypes()
        if self.device.type == "cuda":
            index = self.device.index
            self.transport = create(transport, index) if isinstance(transport, str) else transport
            if self.transport.device != index:
                raise ValueError(f"the transport belongs to cuda:{self.transport.device}, the tensors to {self.device}")
        elif self.device.type != "cpu":
            raise ValueError(f"tensors are on {self.device}; supported are cpu and cuda")

    def refresh(self, lists: Sequence[TensorList | None]) -> bool:
        """Take other tensors, or new addresses of the same; see :meth:`PointerTable.refresh`."""
        changed = self.table.refresh(lists)
        if changed:
            self._take_dtypes()
        return changed

    def _take_dtypes(self) -> None:
        """The kernel is chosen by these; a list of absent tensors has none before the first tensor comes."""
        self.dtypes = tuple(d or torch.float32 for d in self.table.dtypes)
        for name, dtype in zip(self.rule.inputs, self.dtypes, strict=True):
            if dtype not in cuda.CUDA_TYPES:
                raise TypeError(f"{name} is {dtype}; supported are {', '.join(map(str, cuda.CUDA_TYPES))}")

    def run(self, scalars: Scalars | Sequence[Sequence[float]], spans: Iterable[Span] | None = None) -> None:
        """Update every tensor once where it lies now, on the current stream, without waiting for it.

        Args:
            scalars: the rule's hyperparameters; or, prepared, one list of ``rule.uniforms(…)`` per set.
            spans: chunks to launch one after the other, each when it is asked for; left out: all at once.

        Raises:
            ValueError, TypeError: a tensor can no longer be used (another size, dtype or device; no memory); nothing
                has been launched then.
        """
        sets = [self.rule.uniforms(scalars)] if isinstance(scalars, Mapping) else scalars
        if self.table.follow():
            self._take_dtypes()
        self.launch(sets, spans)

    def launch(
        self, sets: Sequence[Sequence[float]] | npt.NDArray[np.float64], spans: Iterable[Span] | None = None
    ) -> None:
        """:meth:`run` for who has just refreshed: the table is taken as it is."""
        self.begun = False
        self.table.host.set_scalars(sets)
        if self.device.type == "cpu":
            kernel = cuda.cpu_kernel(self.rule, self.dtypes)
            for span in [None] if spans is None else spans:
                self.begun = True
                kernel(self.table.host, span)
            return
        index = self.device.index
        if torch._C._cuda_getDevice() == index:
            self._launch(index, spans)
        else:
            with torch.cuda.device(index):
                self._launch(index, spans)

    def _launch(self, index: int, spans: Iterable[Span] | None) -> None:
        stream = torch._C._cuda_getCurrentRawStream(index)
        self.transport.run(self.table.host, stream, _Launcher(self, stream), spans)

    def prepare(self) -> None:
        """Compile (or load) the kernel and have a table ready, so that the next :meth:`run` may be captured."""
        if self.device.type == "cuda":
            self.transport.prepare(self.table.host)
        self.compile()

    def compile(self) -> None:
        """Compile (or load) the kernel now and not in the next :meth:`run`."""
        if self.device.type == "cuda":
            self.kernel()
        else:
            cuda.cpu_kernel(self.rule, self.dtypes)

    def kernel(self) -> cuda.CudaKernel:
        """The compiled CUDA kernel for these lists, as the table travels now."""
        threads = self.table.host.geometry.threads
        return cuda.cuda_kernel(
            self.rule, self.dtypes, threads, self.transport.argument_bytes, self.device.index, self.blocks
        )

    def capture(self, scalars: Scalars) -> CapturedSweep:
        """Capture one :meth:`run` with these scalars into a CUDA graph of its own (see :class:`CapturedSweep`).

        Raises:
            ValueError: the tensors are not on a CUDA device.
        """
        if self.device.type != "cuda":
            raise ValueError(f"a CUDA graph needs CUDA tensors; these are on {self.device}")
        return CapturedSweep(self, scalars)


class _Launcher:
    """What a transport calls; the kernel depends on how the table travels, which a hybrid decides per run."""

    def __init__(self, sweep: Sweep, stream: int) -> None:
        self.sweep, self.stream = sweep, cuda.Stream(stream)

    def __call__(self, argument: Any, count: int) -> None:
        kernel = self.sweep.kernel()
        self.sweep.begun = True  # before it is: an interrupt may come between the two
        kernel(argument, count, self.stream)


class CapturedSweep:
    """A CUDA graph with one launch.  It owns its table: nothing rewrites it, later sweeps have tables of their own."""

    def __init__(self, sweep: Sweep, scalars: Scalars) -> None:
        self._sweep = sweep
        sweep.prepare()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(sweep.device), torch.cuda.graph(self._graph):
            sweep.run(scalars)
        self._addresses = sweep.table.host.rows["address"].copy()

    def replay(self, lists: Sequence[TensorList] | None = None) -> None:
        """Run the captured launch on the current stream.

        Args:
            lists: the tensors as they are now, to be compared with those captured; left out: those of the sweep.

        Raises:
            RuntimeError: a tensor has moved since the capture, or the sweep was given other tensors.
            ValueError, TypeError: a tensor can no longer be used, e.g. has another size.
        """
        if lists is None:
            self._sweep.table.follow()
        if lists is not None and (moved := self._sweep.table.moved(lists)):
            self._refuse(*moved[0])
        now = self._sweep.table.host.rows["address"]
        if not np.array_equal(now, self._addresses):
            row, column = np.argwhere(now != self._addresses)[0]
            self._refuse(self._sweep.rule.inputs[column], int(row))
        self._graph.replay()

    @staticmethod
    def _refuse(name: str, index: int) -> None:
        raise RuntimeError(
            f"tensor {index} of {name} has moved since the graph was captured; a replay would use its old memory. "
            "Capture again, or keep gradients in place (zero_grad(set_to_none=False))"
        )


def multi_tensor_apply(
    rule: Rule,
    lists: Sequence[Sequence[torch.Tensor]],
    scalars: Scalars | None = None,
    *,
    out: Sequence[Sequence[torch.Tensor]] | None = None,
    transport: str | Transport = "managed",
) -> None:
    """Apply ``rule`` to every element of lists of tensors, in one launch on the current stream.

    Args:
        rule: a function decorated with :func:`pagedopt.rule`, or one of :mod:`pagedopt.rules`.
        lists: one list of tensors per input of the rule.  Tensor i of every list has one shape, layout and device; each
            list has one dtype of float16, bfloat16, float32, float64.  Arithmetic is in float32, or in float64 if any
            list is.  The lists in ``rule.writes`` are overwritten, and their version counters go up.
        scalars: the rule's hyperparameters by name.
        out: lists that take the results in place of ``rule.writes``.
        transport: how the table of addresses reaches a CUDA kernel (``managed``, ``mapped``, ``memcpy``, ``struct``,
            ``hybrid``), or a transport object, whose tables are then reused from call to call.

    Raises:
        ValueError, TypeError: the lists do not fit the rule or each other; nothing has been launched then.

    Example:
        >>> @pagedopt.rule
        ... def decay(weight, *, rate):
        ...     return weight * (1 - rate)
        >>> multi_tensor_apply(decay, [list(model.parameters())], {"rate": 0.1})
    """
    rule = rule if out is None else rule.out_of_place
    lists = [tuple(x) for x in (*lists, *(out or ()))]
    if lists and not lists[0]:
        return
    values = [rule.uniforms(scalars or {})]
    sweep = Sweep(rule, lists, transport=shared_transport(transport, lists))
    with torch.no_grad():
        sweep.launch(values)
        for i in rule.writes:
            torch.autograd.graph.increment_version(lists[i])


_shared: dict[tuple[str, int], Transport] = {}


def shared_transport(transport: str | Transport, lists: Sequence[TensorList]) -> str | Transport:
    """One transport per name and device for calls that prepare nothing: its ring of tables is used again."""
    first = lists[0][0] if lists and len(lists[0]) else None
    if not isinstance(transport, str) or not isinstance(first, torch.Tensor) or first.device.type != "cuda":
        return transport
    key = (transport, first.device.index)
    if key not in _shared:
        _shared[key] = create(*key)
    return _shared[key]
