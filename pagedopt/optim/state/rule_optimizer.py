"""The interface of a paged optimizer that steps, loading and planning use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from ...formats.floating import StateFormat, format_of
from ...formats.format import Format
from ...placements.store import Store
from ...planning.affordable import Affordable
from ...rules import Rule
from ...transports.choose import Kind

Group = dict[str, Any]


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
    #: Names of state whose dtype must be the one it was made in or the gradient's, as torch's update requires.
    fixed_dtypes: ClassVar[tuple[str, ...]] = ()
    #: Why state is damaged (part of it belongs to another step than the rest), for an error message; "" if it is not.
    damaged: str = ""
    #: Whether it has taken a step, or was made with ``preallocate=True``: then its kernels are compiled.
    warm: bool = False
    #: State that ``preallocate=True`` has made, by parameter, until the first step puts it into ``state``.
    preallocated: dict[torch.Tensor, dict[str, Any]]
    #: Where state lives; and what turns a budget given as a time into bytes that may be away.
    store: Store
    affordable: Affordable
    #: See :class:`~pagedopt.optim.options.Options`.
    state_format: StateFormat
    blocks: int | None
    transport: Kind
    preallocate: bool

    def rule_of(self, group: Group) -> Rule:
        """Return the rule for a parameter group.  Override it where flags of the group choose among :attr:`rules`.

        Every step calls it, so flags may change between steps.  ``step`` passes on its exceptions.
        """
        return self.rule

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Return the names of the state tensors of a parameter in ``group``, in the order of the rule's inputs."""
        return self.rule_of(group).inputs[2:]

    def format_of(self, name: str, p: torch.Tensor) -> Format:
        """Return the format in which state ``name`` of a parameter is stored.

        Raises:
            ValueError: the parameter is complex, and the format that ``state_format`` asks for is not.
            TypeError: no kernel takes parameters of this dtype.
        """
        return format_of(self.state_format, name, p.dtype)


def occurrences(optimizer: RuleOptimizer) -> Iterator[tuple[int, Group, torch.Tensor]]:
    """Yield (index of the group, group, parameter) for each entry of each group, repeated parameters too."""
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield index, group, p
