"""What the rooms behind an optimizer know of it: members, launches, loading."""

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
    """A ``torch.optim.Optimizer`` whose update is a rule: all that members, launches and loading see of it.

    :class:`~pagedopt.PagedOptimizer` is the one class of this kind; it sets the attributes that have no value here.
    """

    rule: ClassVar[Rule]
    #: Every rule that :meth:`rule_of` may choose; left out: ``rule``.  Numbers of parameters are those of these rules.
    rules: ClassVar[tuple[Rule, ...]] = ()
    #: Names of state that may be numbers, step counts among them, and no tensors in the shape of their parameters.
    numbers: frozenset[str] = frozenset({"step"})
    #: Whether state holds the number of steps under the key "step", as torch's Adam does.
    has_step: ClassVar[bool] = True
    #: What state starts with, by name, where that is not zero: a number, or the name of the group's that holds it.
    initial: ClassVar[Mapping[str, float | str]] = {}
    #: Names of state that must have the dtype it was made in or the gradient's, as torch's operations on it ask for.
    fixed_dtypes: ClassVar[tuple[str, ...]] = ()
    #: Names of a rule's hyperparameters that torch's kernel for CUDA takes in float32, where it computes in that.
    rounded_on_cuda: ClassVar[tuple[str, ...]] = ()
    #: What has left state that belongs to no step, in words; "" if nothing has.
    damaged: str = ""
    #: Where state is, and what says how much of it may be away when a budget is a time.
    store: Store
    affordable: Affordable
    #: Options, as :class:`~pagedopt.optim.options.Options` has them.
    state_format: StateFormat
    blocks: int | None
    transport: Kind

    def rule_of(self, group: Group) -> Rule:
        """The rule for a parameter group; override it where a group's flags choose among :attr:`rules`.

        It is asked in every step, so that a flag that has changed is followed; what it raises, ``step`` raises.
        """
        return self.rule

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors of a parameter in ``group``, in the order in which its rule takes them."""
        return self.rule_of(group).inputs[2:]

    def format_of(self, name: str, p: torch.Tensor) -> Format:
        """How state ``name`` of a parameter is stored.

        Raises:
            ValueError: ``state_format`` asks for one that has no complex numbers, and the parameter is complex.
            TypeError: no kernel takes parameters of such a dtype.
        """
        return format_of(self.state_format, name, p.dtype)


def places(optimizer: RuleOptimizer) -> Iterator[tuple[int, Group, torch.Tensor]]:
    """Every place in which a parameter stands: (number of the group, the group, the parameter)."""
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield number, group, p
