"""One launch of a step, and what it does in one step, as a value."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..launch.on_device import Factor
from ..launch.sweep import Sweep
from ..paging.visits import WHOLE, Action
from ..placements.arena import Arena
from ..tables.tensors import LayoutError, Tensors, first_element, has_memory, is_dense, local, same_layout
from ..transports.by_value import StructTransport
from ..transports.choose import TransportOption, create
from .gather import Grads, Member
from .numbers import Count, DeviceNumbers, HostNumbers, Uniforms
from .pages import Route, StagedGraph, route
from .rule_optimizer import RuleOptimizer
from .scalars import Ahead, NumberTensors, UnsavedStepCounts
from .seen import Found, Seen

_T = TypeVar("_T")


class Launch:
    """The parameters of one launch: their pointer table, and all else that stays the same from step to step.

    It keeps no parameter, gradient or state alive: :meth:`prepare` is given the tensors.

    Args:
        members: the parameters. All have one rule, and in each list one format.
        compared: where their state is found in later steps.
        at: see :meth:`Seen.take`.
        shared: addresses of numbers that several parameters share (see :class:`ScalarState`).
        shards: local gradients of DTensors.
        on_device: whether numbers stay on the device.
        factor: by what gradients are multiplied; None: they are taken as they are.
        turns: when gradients are expected, by the number of their parameter, if they come one by one: the table skips
            every row until somebody writes it, and goes by value; None: all are there in each step.

    Attributes:
        keys: names of the state columns, in the rule's order.
        positions: of the members among all parameters of the optimizer.
        numbers: where hyperparameters and step counts come from.
    """

    def __init__(
        self,
        optimizer: RuleOptimizer,
        members: Sequence[Member],
        compared: Seen,
        at: Mapping[int, int],
        shared: set[int],
        shards: Grads,
        on_device: bool,
        factor: Factor | None = None,
        turns: Mapping[int, int] | None = None,
    ) -> None:
        self.rule, self.count = members[0].rule, len(members)
        self._comes, self._turn = turns is not None, members[0].turn
        self.positions = tuple([m.index for m in members])
        self.keys, names = tuple(members[0].columns), members[0].numbers
        self._picks, self._formats = compared.picks(members, self.keys, names, at), members[0].formats
        # A table whose numbers stay on the device lies there, too: its chunks are cut as those of a copied one.
        transport: TransportOption = "memcpy" if on_device else optimizer.transport
        order, last = (optimizer.first_use, False) if turns is None else (turns, True)
        if turns is not None and not on_device:
            transport = StructTransport
        self.lists = KernelViews(members, self.keys)
        tensors, formats = self.tensors_of(members), (members[0].form, None, *self._formats[2:])
        firsts = [first_element(m.param) or 0 for m in members] if members[0].draws else None
        own = [local(m.entry[key]) for key in self.keys for m in members]
        state = self._cut(self.lists.state_as_seen(own))

        def bind() -> tuple[Route | None, Sweep, Tensors]:
            lists = self._cut(seen := self.lists.as_seen(tensors, shards))
            use = [order.get(m.index, -1) for m in members] if order else None
            pages, device = route(optimizer.store, lists[0], state, use, last), lists[0][0].device
            rows, geometry = (pages.rows, pages.geometry) if pages else (None, None)
            sweep = Sweep(
                self.rule, [*lists, *state], formats=formats, sets=min(2 * len({m.group for m in members}), self.count),
                transport=create(transport, device.index) if device.type == "cuda" else transport,
                blocks=optimizer.blocks, rows=rows, geometry=geometry, numbers=[m.index for m in members],
                firsts=firsts, factor=factor,
            )  # fmt: skip
            return pages, sweep, seen

        self.route, self.sweep, seen = self._with_gradient_copies(bind)
        self.sweep.table.let_go()
        #: What the table was made of, until :meth:`prepare` has taken the step that this was made for.
        self._made_of: Tensors | None = None if self._comes else seen
        if self._comes:
            self.sweep.table.remember(seen)
            self.sweep.formats = self._formats  # the table has no gradient that would tell
        self.numbers = (DeviceNumbers if on_device else HostNumbers)(optimizer, members, shared, self.sweep)
        # State that does not share the store's version counters: a step raises these counters one by one.
        self._own_counters = tuple(optimizer.store.versions.raise_all(own))
        written: Any = (*seen[: self.count], *[own[i] for i in self._own_counters])
        self._inference = any(map(torch.Tensor.is_inference, written))

    @property
    def as_it_is(self) -> bool:
        """Whether kernels take all tensors as they are, and versions rise with parameters and the store's counters."""
        return self.lists.as_they_are and not self._own_counters and not self._inference

    @property
    def takes_them_one_by_one(self) -> bool:
        """Whether gradients may come one by one: nothing is copied around a launch, and its numbers do not depend on
        which gradients there will be."""
        on_host = isinstance(self.numbers, HostNumbers) and not self.numbers.takes_tensors
        return self._comes and on_host and self.lists.direct and not self._turn

    @property
    def counts_anew(self) -> bool:
        """Whether steps are counted here alone: a launch that takes its place begins to count."""
        numbers = self.numbers
        return isinstance(numbers, HostNumbers) and any(isinstance(s, UnsavedStepCounts) for s in numbers.states)

    def tensors_of(self, members: Sequence[Member]) -> Tensors:
        """Return ``tensors`` of :meth:`prepare` for these members: parameters, gradients, state by column."""
        state = [m.entry[key] for key in self.keys for m in members]
        grads = [None if self._comes else m.param.grad for m in members]
        return (*[m.param for m in members], *grads, *state)

    def compile(self) -> None:
        """Compile the kernel now, also if the table has no gradient yet that would tell its format."""
        self.sweep.formats = self._formats
        self.sweep.compile()
        self.numbers.compile()

    def _cut(self, tensors: Sequence[Any]) -> list[Any]:
        """Split a concatenation of lists into the lists."""
        return [tensors[i : i + self.count] for i in range(0, len(tensors), self.count)]

    def still_holds(self, found: Found) -> bool:
        """Return whether parameters and gradients are what the table was made for, and lie where it says."""
        table, rows = self.sweep.table, self._picks.rows
        stamp, tensors = table.host.stamp, (*rows(found.params), *rows(found.grads))
        return table.look(self.lists.as_seen(tensors, {})) and table.host.stamp == stamp

    def prepare(self, optimizer: RuleOptimizer, found: Found, ahead: Ahead, shards: Grads) -> Work | None:
        """Return this launch of a step, with current addresses, numbers and hyperparameters; None: no gradients.

        Args:
            found: the tensors of the step.
            ahead: see :meth:`ScalarState.read`.
            shards: local gradients of DTensors.

        Raises:
            RuntimeError: parameters were made in ``torch.inference_mode``, and this is outside of it (as torch).
            ValueError, TypeError, CompileError: see :meth:`PointerTable.refresh` and :meth:`Sweep.ready`.
            ValueError: gradients come one by one, and parameters are not as they were; make the launch anew.
        """
        if self._inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "parameters were made in torch.inference_mode, and can be updated only there; make them outside of it"
            )
        rows, state, count = self._picks
        tensors, numbers = (*rows(found.params), *rows(found.grads), *state(found.values)), count(found.values)
        if self._comes:
            return self._prepare_coming(optimizer, tensors, numbers, ahead)
        sweep, table = self.sweep, self.sweep.table
        seen, self._made_of = self._made_of, None
        if seen is None:
            seen = self.lists.as_seen(tensors, shards)
            if not table.look(seen):
                seen = self._with_gradient_copies(lambda: self._refresh(self.lists.as_seen(tensors, shards)))
        if len(absent := table.absent) == self.count:
            return None
        now = self.numbers.prepare(optimizer, numbers, ahead)
        written: NumberTensors
        if absent or self._own_counters or self._inference:
            written = (*self._written(optimizer, tensors, absent), *now.written)
        else:
            written = (*tensors[: self.count], *optimizer.store.versions.counters, *now.written)
        plan = WHOLE if self.route is None else self.route.plan(table.host, absent)
        ready = sweep.ready(plan)
        if len(now.sets):
            sweep.set_scalars(now.sets, now.seeds)
        return Work(self, ready, table.host.stamp, tensors, seen, absent[:], now.counts, now.sets, plan, written)

    def _prepare_coming(
        self, optimizer: RuleOptimizer, tensors: Tensors, numbers: NumberTensors, ahead: Ahead
    ) -> Work | None:
        """:meth:`prepare` before the gradients are there: numbers are those of a step that all of them take."""
        sweep, table, on_host = self.sweep, self.sweep.table, self.numbers
        if not self.takes_them_one_by_one or not isinstance(on_host, HostNumbers):
            return None
        tensors = (*tensors[: self.count], *[None] * self.count, *tensors[2 * self.count :])
        seen = self.lists.as_seen(tensors, {})
        if not table.look(seen):
            raise ValueError("parameters have changed since this table was made")
        now = on_host.prepare(optimizer, numbers, ahead, absent=[])
        ready = sweep.ready(())
        sweep.set_scalars(now.sets, now.seeds)
        return Work(self, ready, table.host.stamp, tensors, seen, [], now.counts, now.sets, (), ())

    def follow(self, tensors: Tensors) -> None:
        """Write today's addresses into the table of a captured launch.

        Raises ValueError or TypeError if a gradient does not fit its parameter, or has other strides.
        """
        seen = tensors[: 2 * self.count]
        if not self.sweep.table.look(seen):
            self._refresh(seen)

    def _refresh(self, seen: Tensors) -> Tensors:
        """Check every tensor and write its address into the table; return ``seen``."""
        self.sweep.refresh(self._cut(seen))
        self.sweep.table.let_go()
        return seen

    def _with_gradient_copies(self, act: Callable[[], _T]) -> _T:
        """Return ``act()``; if strides do not fit, copy gradients with other strides from now on and call it again."""
        try:
            return act()
        except LayoutError:
            if not self.lists.lay_out_gradients():
                raise
            return act()

    def _written(self, optimizer: RuleOptimizer, tensors: Any, absent: Sequence[int]) -> NumberTensors:
        """Return the tensors whose version counters a step raises."""
        away = set(absent)
        params = (p for i, p in enumerate(tensors[: self.count]) if i not in away)
        return (*(p for p in params if not p.is_inference()), *self.written_state(optimizer, tensors, absent))

    def written_state(self, optimizer: RuleOptimizer, tensors: Any, absent: Sequence[int]) -> NumberTensors:
        """Return the tensors whose version counters a step raises beside those of parameters."""
        away, first = set(absent), 2 * self.count
        written = (
            *optimizer.store.versions.counters,
            *(local(tensors[first + i]) for i in self._own_counters if i % self.count not in away),
        )
        return tuple([t for t in written if not t.is_inference()])


class Work(NamedTuple):
    """One launch over all rows; or, if state is away, one for the rows at hand and one per page that visits the device.

    It keeps alive what it reads and writes until it is dropped.  Nothing changes before :meth:`run`.

    Attributes:
        launch: whose work it is.
        ready: the compiled kernel.
        stamp: the table's stamp when this was prepared.
        tensors: parameters, gradients (None: absent) and, if needed, state, list by list.
        seen: parameters and gradients as kernels see them; kept alive for the launch.
        absent: parameters that take no step because they have no gradient.
        counts: the numbers that change.
        sets: the numbers of each set of hyperparameters in use.
        plan: launches and visits of pages, in their order.
        written: tensors whose version counters go up.
    """

    launch: Launch
    ready: Any
    stamp: int
    tensors: Tensors
    seen: Tensors
    absent: list[int]
    counts: tuple[Count, ...]
    sets: Uniforms
    plan: Sequence[Action]
    written: NumberTensors

    def run(self, arenas: Sequence[Arena]) -> None:
        """Launch on the current stream, and count the step; a move's ``arena`` is an index in ``arenas``."""
        sweep, lists, route = self.launch.sweep, self.launch.lists, self.launch.route
        if lists.direct and route is not None:
            route.launch(sweep, self.plan, arenas, self.ready)
        elif lists.direct:
            sweep.launch(None, self.plan, ready=self.ready)
        else:
            for _ in self.passes(arenas):
                pass
        self.write_numbers()

    def passes(self, arenas: Sequence[Arena], whole: bool = False) -> Generator[None]:
        """Launch, and yield behind each launch (see :meth:`Sweep.passes`); the step is not counted.

        Args:
            arenas: see :meth:`run`.
            whole: launch as a graph does, which moves all pages.
        """
        sweep, lists, route = self.launch.sweep, self.launch.lists, self.launch.route
        if not lists.direct:
            lists.fill(self.tensors)
        mover = None if route is None else route.mover(arenas)
        plan = route.whole_plan(sweep.table.host) if whole and route is not None else self.plan
        sweep.begun = False
        yield from sweep.passes(plan, mover, self.ready)
        if not lists.direct:
            lists.bring_back(self.tensors)

    def graph(self, arenas: Sequence[Arena]) -> StagedGraph | None:
        """Return a graph that carries it out, with an event behind each launch; None: it goes call by call."""
        route = self.launch.route
        return None if route is None else route.graph(self.launch.sweep, arenas, self.ready, fenced=True)

    def check_slots(self) -> None:
        """Raise SlotsInUse if pages cannot be moved now."""
        if (route := self.launch.route) is not None:
            route.store.ring(route.device).check()

    def launch_graph(self, graph: StagedGraph) -> bool:
        """Launch it; or launch nothing, as the driver refuses, and return False."""
        assert self.launch.route is not None, "it has a graph"
        return self.launch.route.launch_graph(self.launch.sweep, graph)

    def rows_by_launch(self, whole: bool = False) -> Sequence[Sequence[int]]:
        """Return, for each launch, the indices of the parameters that it updates; some may have no gradient.

        Args:
            whole: of the launches of a graph, which moves all pages.
        """
        if self.launch.route is None:
            return [range(len(self.seen) // 2)]
        return self.launch.route.params_by_launch(whole)

    def write_numbers(self) -> None:
        """Write numbers that change, as the step count is, and raise version counters."""
        for numbers, tensors, coming in self.counts:
            numbers.write(tensors, coming, self.absent)
        torch.autograd.graph.increment_version(self.written)


class KernelViews:
    """Parameters, gradients and state of some members, as :class:`~pagedopt.launch.sweep.Sweep` takes them.

    Dense tensors with their parameter's strides are taken as they are, complex ones as pairs of real numbers (as in
    torch's optimizers), DTensors as their local shards.  A tensor with gaps or other strides gets a copy, which is
    filled before the launch and copied back after it.  Of a parameter with other strides than its blocks of state, it
    is the parameter that is copied.  Only these copies are stored; all other tensors are arguments.

    Attributes:
        direct: whether kernels take all parameters and state as they are; gradients aside.
    """

    def __init__(self, members: Sequence[Member], keys: Sequence[str]) -> None:
        self._count = len(members)
        #: Copies of parameters and state, by their indices in ``tensors`` of :meth:`as_seen`.
        self._copies: dict[int, torch.Tensor] = {}
        self._copies_gradients = False
        self._odd: tuple[int, ...] = ()
        #: Strides along which blocks of state lie (None: it has none), by index of the parameter.
        self._strides: dict[int, tuple[int, ...] | None] = {}
        if [m for m in members if not _is_simple(m, keys)]:
            self._find_copies(members, keys)
        self.direct = not self._odd and not self._copies

    def _find_copies(self, members: Sequence[Member], keys: Sequence[str]) -> None:
        likes = [m.like for m in members]
        strides = [None if like is m.shard else like.stride() for m, like in zip(members, likes, strict=True)]
        odd = [
            m.shard is not m.param or m.param.is_complex() or not _is_param_laid_out(m.param, own)
            for m, own in zip(members, strides, strict=True)
        ]
        self._odd = tuple([i for i, is_odd in enumerate(odd) if is_odd])
        self._strides = {i: strides[i] for i in self._odd}
        by_id: dict[int, torch.Tensor] = {}  # by id of the original: a tensor may be there twice
        columns = ((key, *each) for key in keys for each in zip(members, likes, strict=True))
        for i, (key, m, like) in enumerate(columns, 2 * self._count):
            state, like = local(m.entry[key]), m.columns[key].column.like(like)
            if not _is_laid_out(state, like):
                if id(state) not in by_id:
                    by_id[id(state)] = state.new_empty_strided(like.shape, like.stride())
                self._copies[i] = by_id[id(state)]

    @property
    def as_they_are(self) -> bool:
        """Whether kernels take all tensors as they are, gradients too."""
        return self.direct and not self._copies_gradients

    def as_seen(self, tensors: Tensors, shards: Grads) -> Tensors:
        """Return parameters and gradients as kernels see them; ``tensors`` begins with parameters, then gradients."""
        count = self._count
        if self.direct and not self._copies_gradients:  # as_they_are, written out: every step asks
            return tensors[: 2 * count]
        params = self._params(tensors[:count])
        return (*params, *self._grads(tensors[:count], tensors[count : 2 * count], params, shards))

    def state_as_seen(self, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return state, given column by column, as kernels see it."""
        return [as_real(self._copies.get(i, t)) for i, t in enumerate(state, 2 * self._count)]

    def lay_out_gradients(self) -> bool:
        """Copy gradients with other strides than their parameters from now on; return False if this is so already."""
        before, self._copies_gradients = self._copies_gradients, True
        return not before

    def _params(self, params: Tensors) -> list[torch.Tensor]:
        """Return the parameters as they are now: their ``.data`` may have been replaced."""
        now: list[Any] = list(params)
        for i in self._odd:
            p, strides, copy = local(now[i]).detach(), self._strides[i], self._copies.pop(i, None)
            if not _is_param_laid_out(p, strides):
                if not has_memory(p):
                    raise ValueError(f"tensor {i} of param has no memory (its storage was freed or resized to less)")
                if copy is None or copy.shape != p.shape or copy.dtype != p.dtype or copy.device != p.device:
                    copy = torch.empty_like(p) if strides is None else p.new_empty_strided(p.shape, strides)
                p = self._copies[i] = copy
            now[i] = as_real(p)
        return now

    def _grads(
        self, params: Tensors, given: Tensors, seen: Sequence[torch.Tensor], shards: Grads
    ) -> list[torch.Tensor | None]:
        grads = list(given)
        for i in self._odd:
            p: Any = params[i]
            grads[i] = shards.get(p, grads[i])
            if (g := grads[i]) is not None and (g.is_complex() or p.is_complex()):
                grads[i] = as_real(g.detach() if g.is_complex() else g.detach().to(p.dtype))
        return [_alike(g, p) for g, p in zip(grads, seen, strict=True)] if self._copies_gradients else grads

    def fill(self, tensors: Tensors) -> None:
        """Fill the copies from their originals."""
        for i, copy in self._copies.items():
            copy.copy_(_original(tensors, i))

    def bring_back(self, tensors: Tensors) -> None:
        """Write the copies back into their originals, except those of parameters without a gradient."""
        for i, copy in self._copies.items():
            if i >= 2 * self._count or tensors[self._count + i] is not None:
                _original(tensors, i).copy_(copy)


def _is_simple(member: Member, keys: Sequence[str]) -> bool:
    """Tell whether kernels take a parameter and its state as they are, for the usual reason: all are contiguous."""
    p, entry = member.param, member.entry
    if member.columns.in_blocks or member.shard is not p or p.is_complex() or p.is_neg() or not p.is_contiguous():
        return False
    for key in keys:
        state = entry[key]
        if state.is_neg() or not state.is_contiguous():
            return False
    return True


def _original(tensors: Tensors, at: int) -> torch.Tensor:
    found = tensors[at]
    assert found is not None, "only gradients may be absent"
    return local(found).detach()


def _is_laid_out(t: torch.Tensor, like: torch.Tensor) -> bool:
    """Tell whether a kernel can take state as it is: no pending conjugation or sign, and the strides of ``like``."""
    return not (t.is_conj() or t.is_neg()) and (t.numel() <= 1 or t.stride() == like.stride())


def _is_param_laid_out(p: torch.Tensor, strides: tuple[int, ...] | None) -> bool:
    """Tell whether a parameter is dense, with these strides, and with no pending conjugation or sign."""
    # Another number of dimensions is left to the table, which refuses it.
    as_asked = strides is None or len(strides) != p.dim() or same_layout(p.shape, p.stride(), strides)
    return as_asked and is_dense(p) and not (p.is_conj() or p.is_neg())


def _alike(grad: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, or a copy with its parameter's strides; the table refuses other misfits."""
    if grad is None or grad.layout is not torch.strided or grad.shape != p.shape:
        return grad
    if (grad.stride() == p.stride() and not grad.is_neg()) or not has_memory(grad):
        return grad
    return torch.empty_like(p, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one with a last dimension of two, in the same memory if possible."""
    if not tensor.is_complex() or not has_memory(tensor):  # the table refuses what has no memory
        return tensor
    return torch.view_as_real(tensor.resolve_conj().resolve_neg())
