"""A paged optimizer as steps, loads and planning see it: its rule, formats and state, and whether that is whole."""

from __future__ import annotations

import math
import numbers
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, TypeVar

import torch

from ..formats.choice import Choice, Rounding, State
from ..formats.floating import StateFormat, check_squares, chosen_format, default_format, format_of
from ..formats.format import Format
from ..formats.names import ParamFormat, ParamRounding
from ..formats.sixteen import ParameterFormat, of_parameter
from ..launch.on_device import Factor
from ..placements.store import Store
from ..rules import Rule
from ..tables.tensors import local
from ..transports.choose import TransportOption
from .average import Ema
from .scalars import Group, scalar_of

#: As many elements as no parameter has.
LARGE = 1 << 60


Method = TypeVar("Method", bound=Callable[..., Any])


def of_items_alone(rule_of: Method) -> Method:
    """Decorate a ``rule_of`` whose answer changes only with the objects in the group: then no step need ask again."""
    rule_of.of_items_alone = True  # type: ignore[attr-defined]
    return rule_of


class RuleOptimizer(torch.optim.Optimizer):
    """An optimizer whose update is a rule.  Attributes without a value are set by :class:`~pagedopt.PagedOptimizer`."""

    rule: ClassVar[Rule]
    #: Every rule that :meth:`rule_of` may return; empty: ``rule`` alone.  :attr:`numbers` follows from them.
    rules: ClassVar[tuple[Rule, ...]] = ()
    #: Names of state that is a number (the step count, too) and not a tensor in the shape of its parameter.
    numbers: frozenset[str] = frozenset({"step"})
    #: Whether state has a step count under the key "step", as torch's Adam does.
    has_step: ClassVar[bool] = True
    #: First values of state that does not begin at zero, by its name: a number, or the key of the group that has it.
    initial: ClassVar[Mapping[str, float | str]] = {}
    #: Keys that the class has among its defaults though no rule takes them: other code reads them.
    extra_defaults: ClassVar[tuple[str, ...]] = ()
    #: Names of state whose dtype must be the one it was made in or the gradient's, as torch's update requires.
    fixed_dtypes: ClassVar[tuple[str, ...]] = ()
    #: Why state is damaged (part of it belongs to another step than the rest), for an error message; "" if it is not.
    damaged: str = ""
    #: Whether it has taken a step, or was made with ``preallocate=True``: then its kernels are compiled.
    warm: bool = False
    #: State that ``preallocate=True`` has made, by parameter, until the first step puts it into ``state``.
    preallocated: dict[torch.Tensor, dict[str, Any]]
    #: Version counters of parameters behind the last step, where others that write them are told of it, once.
    versions: list[int] | None = None
    told_of_writes: bool = False
    #: By number of a parameter: when it is first used in a forward, which is the order in which pages are updated.
    first_use: Mapping[int, int] = MappingProxyType({})
    #: Where state lives.
    store: Store
    #: Averages that are in the places of parameters; None: none are.
    shown: Any = None
    #: See :class:`~pagedopt.optim.options.Options`.
    after: Ema | None = None
    state_format: StateFormat
    rounding: Rounding
    seed: int
    blocks: int | None
    transport: TransportOption
    preallocate: bool
    _max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    #: Whether a ``GradScaler`` has scaled a step: from then on what is counted in steps is counted on the device.
    scaled: bool = False
    #: By what gradients are multiplied on each device; of captured steps their graphs own others.
    factors: dict[torch.device, Factor]
    #: Those of graphs, if they leave out steps and count them.
    factors_of_graphs: list[dict[torch.device, Factor]]
    #: Those of the last step that has clipped, or was captured.
    clipped_by: dict[torch.device, Factor]
    #: How parameters are stored, and how they are rounded: for good.
    _of_params: tuple[ParamFormat, ParamRounding] = (None, "nearest")
    #: Whether parameters may have lost something that is kept.
    _has_masters: bool = False
    #: Why gradients cannot be clipped, for an error message; "" if they can.
    unclippable: str = ""
    _warned_capturable_if_run_uncaptured = False  # torch's name
    #: The record of the last step; None: the next one is prepared anew.
    _plan: Any = None

    @of_items_alone
    def rule_of(self, group: Group) -> Rule:
        """Return the rule for a parameter group.  Override it where flags of the group choose among :attr:`rules`.

        Every step calls it, so flags may change between steps.  ``step`` passes on its exceptions.
        """
        return self.rule

    def update_of(self, group: Group) -> Rule:
        """Return what a step does to a parameter of the group: :meth:`rule_of`, and what comes ``after`` it."""
        return self._and_after(self.rule_of(group))

    def _and_after(self, rule: Rule) -> Rule:
        return rule if self.after is None else self.after.behind(rule, self.param_rounding == "stochastic")

    @property
    def param_format(self) -> ParamFormat:
        """How parameters are stored, as the constructor was told; see notes/options.md."""
        return self._of_params[0]

    @property
    def param_rounding(self) -> ParamRounding:
        """How parameters are rounded, as the constructor was told; see notes/options.md."""
        return self._of_params[1]

    @property
    def counts_steps(self) -> bool:
        """Whether state has a step count: that of :attr:`has_step`, or one for formats or averages of parameters."""
        needed = self.after is not None or self.param_format is not None or self.param_rounding == "stochastic"
        return self.has_step or needed

    def form_of(self, p: torch.Tensor) -> ParameterFormat | None:
        """Return the format of a parameter; None: it is plain numbers.

        Raises:
            ValueError: the format that ``param_format`` asks for is not for its dtype.
        """
        return of_parameter(*self._of_params, p.dtype)

    def chooses(self) -> bool:
        """Return whether the rule depends on the group: then it is known only in a step."""
        return type(self).rule_of is not RuleOptimizer.rule_of

    def known_rules(self) -> tuple[Any, ...]:
        """Return all rules of the class; none if it chooses and leaves :attr:`rules` empty: then each step checks."""
        rules = self.rules or (() if self.chooses() else (getattr(self, "rule", None),))
        return tuple(rules if self.after is None else map(self._and_after, rules))  # type: ignore[arg-type]

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state tensors of a parameter in ``group``, in the order of the rule's inputs."""
        return self.update_of(group).inputs[2:]

    def state_format_of(self, group: Group) -> StateFormat:
        """Return the ``state_format`` of a group: its own, or the optimizer's."""
        found: StateFormat = group.get("state_format", self.state_format)
        return found

    def format_of(self, name: str, p: torch.Tensor, group: Group) -> Format:
        """Return the format in which state ``name`` of a parameter in ``group`` is stored.

        Raises:
            ValueError: the parameter is complex, and the format that ``state_format`` asks for is not; that format
                cannot store the state.
            TypeError: no kernel takes parameters of this dtype.
        """
        chosen, form = chosen_format(self.state_format_of(group), name), self.form_of(p)
        dtype = p.dtype if form is None else form.stands_for(p.dtype)
        if chosen is None:
            moment = next((r.moments[name] for r in self.known_rules() if name in r.moments), None)
            return default_format(name, dtype, moment)
        state = self._state(name, p.numel(), group) if isinstance(chosen, Choice) else State(name, p.numel())
        return format_of({name: chosen}, state, dtype)

    def check_squares(self, names: Container[str], p: torch.Tensor, group: Group, refuse: bool = True) -> None:
        """Check the format of squares among the states ``names`` of a parameter in ``group``.

        Raises ValueError, or warns, as :func:`pagedopt.formats.floating.check_squares`.
        """
        if (said := self.state_format_of(group)) is None:
            return
        states: dict[str, State] = {}
        for rule in self.known_rules() or (self.update_of(group),):
            for name in rule.inputs[2:]:
                states.setdefault(name, State(name, p.numel(), rule.name, rule.moments.get(name)))
        for name, state in states.items():
            if name in names:
                check_squares(said, state, p.dtype, refuse)

    def check_decays(self, p: torch.Tensor, group: Group) -> None:
        """Raise ValueError if a decay, which is read even from a device, is too slow for the format of its state."""
        said = self.state_format_of(group)
        for name in self.state_names(group):
            if isinstance(one := chosen_format(said, name), Choice):
                one.of(self._state(name, p.numel(), group, read=True))

    def _state(self, name: str, numel: int, group: Group, read: bool = False) -> State:
        rule = self.update_of(group)
        moment = next((r.moments[name] for r in (rule, *self.rules) if name in r.moments), None)
        decay = None if moment is None or moment.decay is None else scalar_of(rule, moment.decay, group)
        # A number on a device is not read in each step, which would wait for it.
        unread = not read and isinstance(decay, torch.Tensor) and decay.is_cuda
        known = None if decay is None or unread else float(decay)
        rounding = group.get("rounding", self.rounding)
        # A step that only the rule knows begins anew with each load, and so would random bits: it is not counted.
        return State(name, numel, rule.name, moment, known, rounding, counted=self.counts_steps)

    def formats_depend_on(self, group: Group) -> object:
        """Return the formats of a group's state, for a parameter of any size; equal if nothing has changed."""
        said = self.state_format_of(group)
        if said is None:
            return None
        found: list[object] = []
        for name in self.state_names(group):
            one = chosen_format(said, name)
            try:
                found.append(one.of(self._state(name, LARGE, group)) if isinstance(one, Choice) else one)
            except ValueError as error:  # a parameter decides, when a step is prepared: it may be a small one
                found.append(str(error))
        return found

    def check_may_step(self) -> None:
        """Raise RuntimeError if no step may begin: state is damaged, or parameters are not those that train."""
        if self.damaged or self.shown is not None:
            check_whole(self)

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which a step clips the gradients of all its parameters together; None: it does not.

        It may be set between steps.  A step computes with gradients that are multiplied as ``clip_grad_norm_`` would
        multiply them, but it does not write them.

        Raises:
            TypeError, ValueError: it is set to what is no number above 0, or None; to None with ``skip_nonfinite``.
            RuntimeError: it is set while steps are taken within backwards (``attach(model, overlap="backward")``).
        """
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        checked = checked_max_norm(value, self.skip_nonfinite)
        if checked is not None and self.unclippable:
            raise RuntimeError(f"max_grad_norm is set to {checked}: {self.unclippable}")
        self._max_grad_norm = checked

    @property
    def multiplies_gradients(self) -> bool:
        """Whether steps multiply gradients, to clip them or to undo a scale; other kernels do that."""
        return self._max_grad_norm is not None or self.scaled

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients in the last step with ``max_grad_norm``, before clipping; None: there was none.

        Where a ``GradScaler`` scales, it is that of the gradients divided by the scale.  It is a new tensor each time,
        float64 of no dimensions on the device of the first parameter, and nothing waits for it.  After a replay of a
        CUDA graph with such a step it is the replay's.  It is infinite or NaN where a gradient was; it stays as it was
        once ``max_grad_norm`` is None.

        Example:
            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), max_grad_norm=1.0)
            >>> loss.backward()
            >>> optimizer.step()
            >>> norms.append(optimizer.grad_norm)  # .item() would wait for the device
        """
        factor = next(iter(self.clipped_by.values()), None)
        return None if factor is None else factor.norm()

    @property
    def skipped(self) -> int:
        """How many steps this object has left out because of ``skip_nonfinite``.  To ask waits for the device.

        Example:
            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), fused=True, max_grad_norm=1.0, skip_nonfinite=True)
            >>> for batch in batches:
            ...     optimizer.zero_grad()
            ...     model(batch).mean().backward()
            ...     optimizer.step()
            >>> print(optimizer.skipped, "steps left out")
        """
        counts = [[factor.skipped for factor in each.values()] for each in (self.factors, *self.factors_of_graphs)]
        return sum(max(each, default=0) for each in counts)


def occurrences(optimizer: RuleOptimizer) -> Iterator[tuple[int, Group, torch.Tensor]]:
    """Yield (index of the group, group, parameter) for each entry of each group, repeated parameters too."""
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield index, group, p


def number_names(optimizer: RuleOptimizer, rule: Rule) -> tuple[str, ...]:
    """Return the names of the numbers that a parameter has in its state, in torch's order."""
    return ("step", *rule.carried) if optimizer.counts_steps else (*rule.carried,)


def state_tensors(optimizer: RuleOptimizer) -> list[torch.Tensor]:
    """Return all state tensors except numbers, each once, used or not, preallocated too; of DTensors local shards.

    Sparse tensors of others, which have no address, are left out.
    """
    found = {
        id(value): local(value)
        for entry in (*optimizer.state.values(), *optimizer.preallocated.values())
        if isinstance(entry, Mapping)
        for name, value in entry.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and name not in optimizer.numbers
    }
    return list(found.values())


def checked_max_norm(value: Any, skips: bool = False) -> float | None:
    """Return a norm to clip to as a float, or None.

    Raises:
        TypeError: it is no number.
        ValueError: it is not above 0; it is None, and ``skips`` says that steps are left out by their norm.
    """
    if value is None and skips:
        raise ValueError(
            "max_grad_norm is None, and skip_nonfinite=True leaves out steps by their norm; give max_grad_norm a "
            "number, or float('inf'), which clips nothing"
        )
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"max_grad_norm is {value!r}; it must be a number above 0, or None: gradients are not clipped")
    if math.isnan(value) or value <= 0:
        raise ValueError(f"max_grad_norm is {value!r}; it must be above 0; None: gradients are not clipped")
    return float(value)


class whole:
    """A ``with`` block that writes state: it is carried out, or changes nothing, or leaves the optimizer damaged.

    The damage is noted first and taken back last, so an interrupt that nothing can stop leaves the note.

    Args:
        optimizer: whose state is written.
        what: the block, for the text, as "a step".
        asked: whether part of the state is new already, as :attr:`begun`; asked if the block fails.

    Attributes:
        begun: whether :meth:`begin` was called.
    """

    __slots__ = ("_asked", "_before", "_optimizer", "_what", "begun")

    def __init__(self, optimizer: RuleOptimizer, what: str, asked: Callable[[], bool] = bool) -> None:
        self._optimizer, self._what, self._asked, self.begun = optimizer, what, asked, False

    def __enter__(self) -> whole:
        self._before = self._optimizer.damaged
        self._optimizer.damaged = f"{self._what} ended in the middle"
        return self

    def begin(self) -> None:
        """Note that part of the state is new from now on."""
        self.begun = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (self.begun or self._asked()):
            self._optimizer.damaged = f"{self._what} failed in the middle ({type(error).__name__}: {error})"
        else:
            self._optimizer.damaged = self._before


def check_whole(optimizer: RuleOptimizer) -> None:
    """Raise RuntimeError if state is damaged, or averages are in the places of parameters."""
    if optimizer.shown is not None:
        raise RuntimeError(
            "within averaged() parameters are their averages, and state has the parameters: leave the block before you "
            "step, save or load the optimizer, copy it, or enter another"
        )
    if optimizer.damaged:
        raise RuntimeError(
            f"the state of this {type(optimizer).__name__} is damaged: {optimizer.damaged}. Some of it is of a "
            "different step than the rest; load_state_dict() of a checkpoint mends it (load the model's, too)"
        )


class OptimizerLock:
    """A reentrant lock: while one thread steps, loads or moves pages, another must not read half-changed state.

    A forked child gets a fresh one: the thread that held it does not exist there.

    Attributes:
        now: the lock of this process, for a ``with`` block.
    """

    def __init__(self) -> None:
        self.now = threading.RLock()
        _all.add(self)

    def __call__(self) -> threading.RLock:
        """Return :attr:`now`."""
        return self.now


_all: weakref.WeakSet[OptimizerLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock.now = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
