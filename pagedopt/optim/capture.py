"""A step captured into a CUDA graph: what the graph owns, what has changed since, and how its list is rewritten."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch

from ..placements.arena import Arena
from ..system import graphs, internals, virtual
from ..system.interrupts import Uninterrupted
from ..system.warn import outside
from ..tables.tensors import Tensors, is_sharded, same_layout
from .clip import factor_of
from .gather import Member, Members, members
from .launch import Launch
from .numbers import DeviceNumbers
from .plan import Plan, Step, put_state
from .rule_optimizer import RuleOptimizer, occurrences

#: Transports whose tables are kernel arguments.
BY_VALUE = ("struct", "hybrid")


class CapturedStep:
    """The launches of a captured step.  The graph keeps it alive, and with it all memory that its replays touch.

    Args:
        step: what is captured.
        members: whose step it is.
        slots: what its pages pass through.
    """

    def __init__(self, step: Step, members: Members, slots: object = None) -> None:
        optimizer, by_index = step.optimizer, {m.index: m for m in members.found}
        self._seen, self._slots, self._factor = step.plan.seen, slots, step.plan.factor
        launches = [work.launch for work in step.work]
        self._launches = tuple([(launch, tuple([by_index[i] for i in launch.positions])) for launch in launches])
        self._numbers = tuple([cast(DeviceNumbers, launch.numbers) for launch in launches])
        updated = [m for _, of in self._launches for m in of]
        #: State that kernels write: whose it is, its name, the tensor, and where it lay.
        self._state = [(m, name, value, value.data_ptr()) for m in updated for name, value in m.entry.items()]
        self._groups, self._known = _groups(optimizer), {id(m.param) for m in updated}
        #: Parameters and gradients that the captured lists name.
        self._read: tuple[Tensors, ...] = tuple([update.tensors for update in step.work])
        self._transport = optimizer.transport

    def void(self, optimizer: RuleOptimizer) -> list[str]:
        """Return the changes that no refresh can follow, in words: replaced state, moved parameters, other groups."""
        if (self._factor is None) is optimizer.multiplies_gradients:
            return ["gradients are clipped or scaled now, and were not, or the other way around"]
        found, as_captured = [], self._seen.compare(optimizer) is not None
        if not as_captured and (_groups(optimizer) != self._groups or not self._seen.same_rules(optimizer)):
            return ["groups, their parameters, their rules or formats are others"]
        for m, name, value, at in () if as_captured else self._state:
            if optimizer.state.get(m.param, {}).get(name) is not value:
                found.append(f"state {name!r} of parameter {m.index} was replaced")
            elif value.data_ptr() != at:
                found.append(f"state {name!r} of parameter {m.index} has moved")
        for launch, of in self._launches:
            moved = launch.sweep.table.moved([[m.param for m in of]])
            found += [f"parameter {of[i].index} has moved" for _, i in moved]
        for index, (_, _, p) in enumerate(occurrences(optimizer)):
            if id(p) not in self._known and p.grad is not None:
                found.append(f"parameter {index} has a gradient, and had no state")
        return found

    def changes(self, optimizer: RuleOptimizer) -> list[str]:
        """Return all changes since the captured step was told of any, in words."""
        found = self.void(optimizer)
        for (launch, of), numbers in () if found else zip(self._launches, self._numbers, strict=True):
            moved = launch.sweep.table.moved([(), [m.param.grad for m in of]])
            found += [f"the gradient of parameter {of[i].index} has moved" for _, i in moved]
            found += [f"{each} has changed" for each in numbers.differences(optimizer)]
            if not numbers.is_told:
                found.append("a refresh was broken off")
        return found + ([] if found or self._factor is None else self._factor.differences(optimizer))

    def refresh(self, optimizer: RuleOptimizer) -> None:
        """Queue a copy of today's gradients and numbers into the captured list, on the current stream.

        Raises:
            RuntimeError: the capture is void; tables are passed by value.
            ValueError, TypeError: a gradient does not fit its parameter.
        """
        if self._transport in BY_VALUE:
            raise RuntimeError(
                f"transport={self._transport!r} passes its table by value, and a captured step keeps the list that it "
                "was captured with; use 'managed', 'mapped' or 'memcpy' where gradients move"
            )
        if void := self.void(optimizer):
            raise RuntimeError(f"this captured step is void: {'; '.join(void)}. Capture again")
        for launch, of in self._launches:
            _check_gradients(launch, of)
        now = [launch.tensors_of(of) for launch, of in self._launches]
        before, self._read = self._read, (*self._read, *now)  # both, until the list has been rewritten
        for (launch, _), numbers, tensors in zip(self._launches, self._numbers, now, strict=True):
            launch.follow(tensors)
            numbers.tell(optimizer, None)
        for (launch, _), numbers in zip(self._launches, self._numbers, strict=True):
            index = launch.sweep.device.index
            with torch.cuda.device(index):
                numbers.publish(internals.current_stream(index))
        if self._factor is not None:
            self._factor.tell(optimizer)
        _leave_to_stream(before, now)
        self._read = tuple(now)


def _groups(optimizer: RuleOptimizer) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in optimizer.param_groups]


def _check_gradients(launch: Launch, of: Sequence[Member]) -> None:
    """Raise an error if a captured kernel cannot read a gradient: TypeError for its dtype, else ValueError."""
    captured = launch.sweep.table.dtypes[1]
    for m in of:
        if (grad := m.param.grad) is None:
            continue
        what = f"the gradient of parameter {m.index}"
        if grad.dtype is not captured:
            raise TypeError(f"{what} is {grad.dtype}, the captured one reads {captured}: capture again")
        if grad.shape != m.param.shape or not same_layout(grad.shape, m.param.stride(), grad.stride()):
            raise ValueError(
                f"{what} has shape {tuple(grad.shape)} and strides {grad.stride()}; a captured step reads one that is "
                f"laid out as its parameter, {tuple(m.param.shape)} with strides {m.param.stride()}"
            )


def _leave_to_stream(before: Sequence[Tensors], now: Sequence[Tensors]) -> None:
    """Let go of old gradients: their memory is not used again before the work queued on this stream has run."""
    in_use = {id(t) for tensors in now for t in tensors}
    stream_of = functools.cache(torch.cuda.current_stream)
    for tensors in before:
        for t in tensors:
            if t is not None and id(t) not in in_use and t.is_cuda:
                t.record_stream(stream_of(t.get_device()))


def capture(optimizer: RuleOptimizer) -> CapturedStep:
    """Capture a step of ``optimizer`` into the graph that the current stream is being captured into.

    Raises:
        RuntimeError: state or tables would have to be made now, or move pages in each step; numbers lie on the host;
            a parameter is complex, has gaps, is a DTensor, or is on another device than the stream.
    """
    everyone = _members(optimizer)
    with optimizer.store.slots_apart() as slots:
        on_device = functools.partial(_on_device, optimizer)
        plan, found, ready = Plan.of(optimizer, everyone, on_device, factor_of(optimizer, owned=True))
        for launch in plan.launches:
            _check_launch(launch, ready.arenas)
        step = plan.prepare(optimizer, found, ready)
        captured = CapturedStep(step, everyone, slots)
        with Uninterrupted(gives_way=True):
            graphs.keep_with_graph(internals.current_stream(torch.cuda.current_device()), captured)
            step.carry_out()
            put_state(optimizer, plan.fresh)
    return captured


def _members(optimizer: RuleOptimizer) -> Members:
    """Return the parameters that can be updated, if a graph can do it."""
    name = type(optimizer).__name__
    if optimizer.store.limits.budget.auto:
        raise RuntimeError(
            f"{name}.step() cannot be captured with device_budget='auto', which moves pages between steps; give a "
            "budget in bytes or as a share"
        )
    if any(is_sharded(p) for _, _, p in occurrences(optimizer)):
        raise RuntimeError(f"{name}.step() cannot be captured: a parameter is a DTensor")
    found = members(optimizer)
    for member in found.found:
        if member.param.device != torch.device("cuda", torch.cuda.current_device()):
            raise RuntimeError(
                f"{name}.step() cannot be captured: parameter {member.index} is on {member.param.device}, the "
                f"stream on cuda:{torch.cuda.current_device()}"
            )
        _check_made(optimizer, member)
    return found


def _check_made(optimizer: RuleOptimizer, member: Member) -> None:
    made = optimizer.preallocated.get(member.param, {})
    late = [name for name in (*member.missing, *member.moved) if name not in made]
    if late or not optimizer.warm:
        what = f"state {late[0]!r} of parameter {member.index}" if late else "its kernel"
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() is being captured into a CUDA graph, and {what} is not made yet: step "
            "once before the capture, or give preallocate=True"
        )


def _on_device(optimizer: RuleOptimizer, member: Member, shared: set[int]) -> bool:
    """Return True, or raise RuntimeError if a member's numbers are where no graph can count them."""
    names = member.numbers
    if not DeviceNumbers.takes(member, names, shared):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() cannot be captured: {' and '.join(names)} of parameter {member.index} "
            "must each be a tensor of its own, float32 or float64, on the parameter's device; give capturable=True"
        )
    return True


def _check_launch(launch: Launch, arenas: Sequence[Arena]) -> None:
    if launch.route is not None and not launch.route.can_be_nodes(arenas):
        raise RuntimeError(
            "a step cannot be captured if a placement of your own moves its pages; use host_access='in_place', or a "
            "budget that keeps all state on the device"
        )
    if not launch.lists.as_they_are:
        raise RuntimeError(
            "a step cannot be captured if parameters, gradients or state are complex, have gaps or differ in strides: "
            "each replay would need copies"
        )


_MESSAGE = (
    "This instance was constructed with capturable=True or some of all the param_groups came with capturable=True, but "
    "step() is running without CUDA graph capture. If you never intend to graph-capture this instance, capturable=True "
    "can impair performance, and you should set capturable=False."
)
_ADVICE = "Call refresh() before the next replay, or capture again"


class Captures(list[weakref.ref[CapturedStep]]):
    """The captured steps of an optimizer, as far as their graphs may still be there."""

    def take(self, optimizer: RuleOptimizer) -> bool:
        """Capture a step if the current stream is being captured into a graph, and return whether it is.

        Else warn, where the optimizer has changed since a step was captured, and of ``capturable``, once, as torch.
        """
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            if self and (found := self.changes(optimizer)):
                text = f"since a captured step was recorded, {'; '.join(found)}. {_ADVICE}"
                warnings.warn(text, RuntimeWarning, stacklevel=outside())
            if virtual.dead:
                virtual.free_dead()
            if "capturable" in optimizer.defaults and not optimizer._warned_capturable_if_run_uncaptured:
                _warn_if_capturable(optimizer)
            return False
        if not all(group.get("capturable", True) for group in optimizer.param_groups):
            raise RuntimeError(
                f"Attempting CUDA graph capture of step() for an instance of {type(optimizer).__name__} but "
                "param_groups' capturable is False."
            )
        self.append(weakref.ref(capture(optimizer)))
        return True

    def alive(self) -> list[CapturedStep]:
        """Return the steps whose graphs are still there."""
        graphs.drop_released()
        steps = [step for each in self if (step := each()) is not None]
        self[:] = map(weakref.ref, steps)
        return steps

    def changes(self, optimizer: RuleOptimizer) -> list[str]:
        """Return what the captured steps were not told of, in words."""
        return [text for step in self.alive() for text in step.changes(optimizer)]

    def check(self, optimizer: RuleOptimizer) -> None:
        """See :meth:`PagedOptimizer.check_capture`."""
        if found := self.changes(optimizer):
            raise RuntimeError(f"since the step was captured {'; '.join(found)}. {_ADVICE}")

    def refresh(self, optimizer: RuleOptimizer) -> None:
        """See :meth:`PagedOptimizer.refresh`."""
        if not (steps := self.alive()):
            raise RuntimeError(
                f"no captured step of this {type(optimizer).__name__} is alive: there is nothing to refresh"
            )
        for step in steps:
            step.refresh(optimizer)

    def refuse_moves(self, what: str) -> None:
        """Raise RuntimeError if a captured step is alive, whose graph updates state where it lies now."""
        if self and self.alive():
            raise RuntimeError(
                f"{what} would move state that a captured step updates at its present address: delete the graph first"
            )


def _warn_if_capturable(optimizer: RuleOptimizer) -> None:
    """Warn once, as torch does, that a capturable step runs eagerly."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    if all(group.get("capturable") for group in groups) and torch.cuda.is_available():
        optimizer._warned_capturable_if_run_uncaptured = True
        warnings.warn(_MESSAGE, stacklevel=outside())
