"""``Sweep``: a rule over lists of tensors, in one launch over one pointer table."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..formats.floating import FLOAT32, NUMBERS, of_dtype
from ..formats.format import Column, Format
from ..kernels import cpu, cuda
from ..kernels.source import arithmetic, width
from ..paging.visits import WHOLE, Action, Mover, Span, Update, passes
from ..rules.rule import Rule, check_rule
from ..system import internals
from ..tables.layout import Geometry
from ..tables.pointers import PointerTable, Rows, TensorList
from ..tables.storage import words_of
from ..transports.choose import TRANSPORTS, TransportOption, check_transport, create, shared
from ..transports.transport import Transport
from .on_device import Factor

Scalars = Mapping[str, float]
#: For each set of hyperparameters, its ``rule.uniforms``.
Sets = Sequence[Sequence[float]] | npt.NDArray[np.float64]
#: Launches by the ids of their arguments, which they keep alive.
LaunchesOfSpans = dict[int, Callable[[], None]]


class Sweep:
    """A rule bound to lists of tensors, prepared once and run many times.  It keeps the tensors alive.

    Args:
        rule: what happens to one element.
        lists: for each of the rule's inputs, the tensors (on one device, one dtype per list).  ``None`` entries are
            absent tensors, whose row is skipped.  With ``formats``: for each column of each input; of the first input,
            columns behind its first one come last.
        formats: how each of the rule's inputs is stored; None, for one or for all: as plain numbers of its dtype.
        transport: how the table reaches a CUDA kernel: a name, a class (:class:`pagedopt.transports.Transport`), or an
            object of one to share.  Not used on a CPU.
        sets: how many different sets of scalars may be in use at once.
        geometry: how to cut the work; left out: chosen from the sizes.
        rows: which parts of the tensors are the rows of the table (see :class:`~pagedopt.tables.pointers.Rows`).
        blocks: at most this many thread blocks per launch; left out: one per chunk.
        numbers, firsts: for formats that round at random: of the tensors; and where each tensor's first element stands
            in its parameter.  Left out: their indices; at 0.
        factor: by what gradients, the rule's second input, are multiplied; None: they are taken as they are.

    Raises:
        ValueError, TypeError: the lists do not fit the rule or each other (see :class:`PointerTable`).
    """

    __slots__ = (
        "__weakref__", "_kernel", "_on_cpu", "arithmetic", "begun", "blocks", "device", "factor", "formats", "launches",
        "rule", "stored", "table", "transport",
    )  # fmt: skip

    def __init__(
        self,
        rule: Rule,
        lists: Sequence[TensorList],
        *,
        formats: Sequence[Format | None] | None = None,
        transport: TransportOption | Transport = "managed",
        sets: int = 1,
        geometry: Geometry | None = None,
        rows: Rows | None = None,
        blocks: int | None = None,
        numbers: Sequence[int] | None = None,
        firsts: Sequence[int] | None = None,
        factor: Factor | None = None,
    ) -> None:
        check_rule(rule)
        if not isinstance(transport, Transport):
            check_transport(transport)
        self.rule, self.factor = rule, factor
        self.stored = stored_of(rule, None if formats is None else tuple(formats))
        keys = self.stored.keys
        if len(lists) != len(keys):
            raise ValueError(f"rule {rule.name!r} takes {len(keys)} lists {keys}, got {len(lists)}")
        self.table = PointerTable(
            lists,
            writes=self.stored.writes,
            names=keys,
            uniforms=rule.uniform_count + (factor is not None) + self.stored.by_position,
            sets=sets,
            geometry=geometry,
            itemsize=_widest(lists),
            over_link=(TRANSPORTS[transport] if isinstance(transport, str) else transport).over_link,
            rows=rows,
            per=self.stored.per,
            places=self.stored.by_position,
            numbers=numbers,
            firsts=firsts,
            per_thread=self.stored.per_thread,
        )
        self.stored.check_geometry(self.table.host.geometry)
        self.blocks = blocks
        #: Whether the last run has launched anything; a run that failed before has changed nothing.
        self.begun = False
        #: Number of launches of all runs together.
        self.launches = 0
        self.device = self.table.device
        self._on_cpu = self.device.type == "cpu"
        self._take_formats()
        if self.device.type == "cuda":
            index = self.device.index
            self.transport = transport if isinstance(transport, Transport) else create(transport, index)
            if self.transport.device != index:
                raise ValueError(f"the transport belongs to cuda:{self.transport.device}, the tensors to {self.device}")
        elif self.device.type != "cpu":
            raise ValueError(f"tensors are on {self.device}; supported are cpu and cuda")

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Copies load a kernel of their own; a loaded one cannot be copied."""
        values: dict[str, Any] = object.__getstate__(self)[1]  # type: ignore[index]
        return None, {**values, "_kernel": (None, None)}

    def refresh(self, lists: Sequence[TensorList | None]) -> bool:
        """Take other tensors, or new addresses of the same tensors; see :meth:`PointerTable.refresh`."""
        changed = self.table.refresh(lists)
        if changed:
            self._take_formats()
        return changed

    def _take_formats(self) -> None:
        """Set the formats, on which the kernel depends.  A list of absent tensors has no dtype before the first one."""
        self.formats = self.stored.formats(self.table.dtypes)
        #: The dtype in which the kernel computes.
        self.arithmetic = arithmetic(self.formats)
        self._kernel: tuple[object, Any] = (None, None)  # (what else it depends on, kernel): see ready()

    def run(self, scalars: Scalars | Sequence[Sequence[float]], steps: Sequence[Action] = WHOLE, seed: int = 0) -> None:
        """Update every tensor once at its current address, on the current stream, without waiting for it.

        Args:
            scalars: the rule's hyperparameters; or, prepared, one list of ``rule.uniforms(…)`` per set.
            steps: the launches, if not one launch over everything.
            seed: for formats that round at random; give another one in each step.

        Raises:
            ValueError, TypeError: a tensor can no longer be used (another size, dtype or device; no memory); nothing
                has been launched then.
            RuleError: the rule does what no kernel can.
        """
        if isinstance(scalars, Mapping):
            scalars = [self.rule.uniforms(scalars)]
        if self.table.follow():
            self._take_formats()
        self.launch(scalars, steps, seeds=seed)

    def launch(
        self,
        sets: Sets | None,
        steps: Sequence[Action] = WHOLE,
        mover: Mover | None = None,
        seeds: float | Sequence[float] = 0,
        ready: Any = None,
    ) -> None:
        """:meth:`run` without checks: the caller has refreshed the table and prepared the scalars.

        Args:
            sets: see ``scalars`` of :meth:`run`; None: those of :meth:`set_scalars`.
            steps: the actions, if not one launch over everything (see :mod:`pagedopt.paging.visits`).
            mover: carries out the actions that move pages; None: there are none.
            seeds: one for all sets or one for each (see :meth:`run`), whole numbers below 2**53.
            ready: the result of :meth:`ready` for these steps; None: call it now.
        """
        self.begun = False
        if sets is not None:
            self.set_scalars(sets, seeds)
        if ready is None:
            ready = self.ready(steps)
        if steps is WHOLE and self._on_cpu:  # as in most steps: without generators
            self._walk({None: ready}, None)
        else:
            for _ in self.passes(steps, mover, ready):
                pass

    def passes(self, steps: Sequence[Action], mover: Mover | None, ready: Any) -> Iterator[None]:
        """:meth:`launch` with scalars that are set: yields behind each launch.

        On CUDA the caller uses it up at once: the current device may be another one until it ends.
        """
        if self._on_cpu:
            return passes(steps, functools.partial(self._walk, {None: ready} if steps is WHOLE else ready), mover)
        return self._passes_on_cuda(steps, mover, ready)

    def _passes_on_cuda(self, steps: Sequence[Action], mover: Mover | None, kernel: cuda.CudaKernel) -> Iterator[None]:
        index = self.device.index
        with contextlib.nullcontext() if internals.current_device() == index else torch.cuda.device(index):
            handle = internals.current_stream(index)
            stream = cuda.Stream(handle)
            with self.transport.lend(self.table.host, handle) as lent:

                def launch(span: Span | None) -> None:
                    for argument, chunks in lent.parts(span):
                        self.begun = True  # set here: from now on only the launch itself can fail
                        kernel(argument, chunks, stream)
                        self.launches += 1

                yield from passes(steps, launch, mover)

    def set_scalars(self, sets: Sets, seeds: float | Sequence[float] = 0) -> None:
        """Write hyperparameters, and seeds if a format needs them, for the launches that follow."""
        if self.factor is not None:
            sets = _beside(sets, self.factor.word)
        if self.stored.by_position:
            sets = _beside(sets, seeds)
        self.table.host.set_scalars(sets)

    def _walk(self, walks: Any, span: Span | None) -> None:
        """Update a span."""
        walk, team = walks[span]
        self.begun = True  # set here: from now on only the update itself can fail
        walk()
        self.launches += 1
        if team is not None and team.words[4]:  # tested here: check() would cost a call for each page
            team.check()

    def launch_of_spans(self, ready: Any, stream: int, known: LaunchesOfSpans) -> Callable[[Span | None], None]:
        """Return the function that launches a span on a stream, with rows as they are then.

        On CUDA the table goes by value: its transport is a :class:`~pagedopt.transports.by_value.StructTransport`.

        Args:
            ready: see :meth:`ready`.
            known: kept by the caller while table, kernel and stream stay; filled here.
        """
        if self._on_cpu:
            return functools.partial(self._walk, ready)
        lent = self.transport.lend(self.table.host, stream)

        def launch(span: Span | None) -> None:
            for argument, chunks in lent.parts(span):
                if (prepared := known.get(id(argument))) is None:
                    prepared = known[id(argument)] = ready.prepared(argument, chunks, stream)
                self.begun = True  # set here: from now on only the launch itself can fail
                prepared()
                self.launches += 1

        return launch

    @property
    def kernel(self) -> Any:
        """The compiled kernel that :meth:`ready` has cached; None: there is none."""
        return self._kernel[1]

    def prepare(self) -> None:
        """Compile (or load) the kernel and allocate a table, so that the next :meth:`run` may be captured."""
        if self.device.type == "cuda":
            self.transport.prepare(self.table.host)
        self.compile()

    def compile(self) -> None:
        """Compile (or load) the kernel now and not in the next :meth:`run`.

        Raises:
            CompileError: it cannot be compiled.
            RuleError: the rule does what no kernel can.
        """
        self.ready()

    def ready(self, steps: Sequence[Action] = WHOLE) -> Any:
        """Return the compiled kernel, for :meth:`launch`; on a CPU (walk, team), or a dict by span.

        The kernel is cached until formats change.  On a CPU a team of threads has another kernel than one thread.
        Raises CompileError if it cannot be compiled.
        """
        if self._on_cpu:
            threads = torch.get_num_threads()
            by, kernel = self._kernel
            if by is not (threads > 1):
                kernel = cpu.kernel(self.rule, self.formats, self.factor is not None)
                self._kernel = threads > 1, kernel
            if steps is WHOLE:
                return cpu.walks(kernel, self.table.host, threads)[None]
            spans = []
            for action in steps:
                if type(action) is Update:
                    spans.append(action.span)
            return cpu.walks(kernel, self.table.host, threads, spans)
        kind = self.transport.kind(self.table.host)
        by, kernel = self._kernel
        if by != kind:
            per_chunk, index = self.table.host.geometry.threads, self.device.index
            scaled = self.factor is not None
            kernel = cuda.multi_tensor_kernel(self.rule, self.formats, per_chunk, kind, index, self.blocks, scaled)
            self._kernel = kind, kernel
        return kernel


def _beside(sets: Sets, numbers: float | Sequence[float]) -> Sets:
    """Return sets with one more number each; ``numbers`` is one for all sets or one for each."""
    each = [numbers] * len(sets) if isinstance(numbers, int | float) else numbers
    if isinstance(sets, np.ndarray):
        return np.column_stack([sets, each])
    return [[*uniforms, number] for uniforms, number in zip(sets, each, strict=True)]


def _widest(lists: Sequence[TensorList]) -> int:
    """Return the bytes of an element of the widest list; lists whose tensors are all absent so far do not count."""
    widest = 0
    for tensors in lists:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                widest = max(widest, tensor.itemsize)
                break
    return widest or 4


def apply(
    rule: Rule, lists: Sequence[Any], scalars: Scalars, transport: TransportOption | Transport = "managed"
) -> None:
    """Run ``rule`` once over lists that are not empty, and raise the version counters of what it writes."""
    values = [rule.uniforms(scalars)]
    sweep = Sweep(rule, lists, transport=shared_transport(transport, lists))
    with torch.no_grad():
        sweep.launch(values)
        for i in rule.writes:
            torch.autograd.graph.increment_version(lists[i])


def shared_transport(
    transport: TransportOption | Transport, lists: Sequence[TensorList]
) -> TransportOption | Transport:
    """Return the device's shared transport, for calls that make a :class:`Sweep` each time; on a CPU ``transport``."""
    first = lists[0][0] if lists and len(lists[0]) else None
    if not isinstance(first, torch.Tensor) or first.device.type != "cuda":
        return transport
    return shared(transport, first.device.index)


class Stored:
    """The columns and formats of a rule's inputs.

    Args:
        formats: one for each of its inputs; None, for one or for all: plain numbers of the tensors' dtype.

    Attributes:
        given: those formats; None for plain numbers, whose format follows from the tensors' dtype.
        keys: the names of all columns, in the order of the table (:func:`~pagedopt.tables.storage.words_of`).
        per: for each column, how many elements share an entry.
        writes: indices of the columns that are overwritten.
        by_position: whether a format needs the index of an element in its tensor.
        per_thread: elements that a thread takes at a time.

    Raises:
        ValueError: the number of formats is not that of inputs, or the formats' block sizes do not fit together.
    """

    def __init__(self, rule: Rule, formats: Sequence[Format | None] | None = None) -> None:
        given = list(formats or [None] * len(rule.inputs))
        if len(given) != len(rule.inputs):
            said = f"rule {rule.name!r} takes {len(rule.inputs)} lists {rule.inputs}"
            raise ValueError(f"{said}, got {len(given)} formats")
        self.given = tuple([None if f in NUMBERS else f for f in given])
        self._inputs = rule.inputs
        for i in rule.between:
            if (form := self.given[i]) is not None and not form.plain:
                raise ValueError(
                    f"rule {rule.name!r} is made of rules of which one takes what another has stored in "
                    f"{rule.inputs[i]!r}; format {form.name!r} stores blocks, or rounds at random: launch them one "
                    "after another"
                )
        columns = [f.columns if f else FLOAT32.columns for f in self.given]
        self._words = words_of([*map(len, columns)])
        found = {
            word: (column.key(name), column.per)
            for name, each, words in zip(rule.inputs, columns, self._words, strict=True)
            for column, word in zip(each, words, strict=True)
        }
        self.keys, self.per = zip(*[found[word] for word in range(len(found))], strict=True)
        self.writes = tuple([word for i in rule.writes for word in self._words[i]])
        self.by_position = any(f is not None and not f.plain for f in self.given)
        self.per_thread = width([f or FLOAT32 for f in self.given])
        self._of: tuple[list[torch.dtype | None], tuple[Format, ...]] | None = None

    def formats(self, dtypes: Sequence[torch.dtype | None]) -> tuple[Format, ...]:
        """Return the format of each input, by the ``dtypes`` of the columns; None: a column has no tensor so far.

        Raises:
            TypeError: kernels do not support a dtype, or a column has another dtype than its format.
        """
        known = self._of  # read once: another thread may replace it
        if known is None or known[0] != dtypes:
            found: list[Format] = []
            for name, form, words in zip(self._inputs, self.given, self._words, strict=True):
                if form is None:
                    found.append(of_dtype(dtypes[words[0]] or torch.float32, name))
                else:
                    for column, word in zip(form.columns, words, strict=True):
                        _check_dtype(form, column, self.keys[word], dtypes[word])
                    found.append(form)
            known = self._of = list(dtypes), tuple(found)
        return known[1]

    def check_geometry(self, geometry: Geometry) -> None:
        """Raise a ValueError if a chunk would end in the middle of a block of a format."""
        for form in filter(None, self.given):
            if geometry.chunk_numel % form.block:
                raise ValueError(
                    f"chunk_numel is {geometry.chunk_numel}; format {form.name!r} needs a multiple of {form.block}"
                )


stored_of = functools.lru_cache(maxsize=256)(Stored)


def _check_dtype(form: Format, column: Column, key: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype is not column.dtype:
        raise TypeError(f"{key} is {dtype}; format {form.name!r} has {column.dtype}")


def packed(rule: Rule, scalars: Mapping[str, float]) -> torch.Tensor:
    """Return hyperparameters as :func:`named` takes them: float64 (hyperparameters,), on the CPU.

    Raises:
        TypeError: one is missing or unknown.
    """
    missing = [name for name in rule.scalars if name not in scalars and name not in rule.defaults]
    unknown = [name for name in scalars if name not in rule.scalars]
    if missing or unknown:
        there = list(rule.scalars)
        raise TypeError(f"rule {rule.name!r} takes the scalars {there}; missing {missing}, unknown {unknown}")
    values = [scalars[name] if name in scalars else rule.defaults[name] for name in rule.scalars]
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def named(rule: Rule, scalars: torch.Tensor) -> dict[str, float]:
    """Return the hyperparameters that a tensor holds, by name.

    Raises:
        ValueError: it is no float64 tensor (hyperparameters,) on the CPU.
    """
    wanted = (len(rule.scalars),)
    if scalars.dtype is not torch.float64 or scalars.device.type != "cpu" or tuple(scalars.shape) != wanted:
        raise ValueError(
            f"rule {rule.name!r}: scalars is {scalars.dtype} {tuple(scalars.shape)} on {scalars.device}; give float64 "
            f"{wanted} on the CPU, in the order {list(rule.scalars)}"
        )
    return dict(zip(rule.scalars, scalars.tolist(), strict=True))
