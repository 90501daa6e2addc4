"""Every optimizer, once: exports, command line, documentation and tests read it here.  Nothing is imported for it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..rules.rule import Rule
    from .adamw import PagedAdamW as PagedAdamW
    from .base import PagedOptimizer
    from .lion import PagedLion as PagedLion
    from .sgd import PagedSGD as PagedSGD


@dataclass(frozen=True)
class Entry:
    """An optimizer.

    Attributes:
        name: of its class.
        module: the module of this package that has it.
        rules: names of the rules that it may choose.
    """

    name: str
    module: str
    rules: tuple[str, ...]

    @property
    def optimizer(self) -> type[PagedOptimizer]:
        """Its class."""
        found: type[PagedOptimizer] = getattr(importlib.import_module(f".{self.module}", __package__), self.name)
        return found

    @property
    def torch(self) -> type[torch.optim.Optimizer] | None:
        """The class of torch that it stands in for; None: torch has none."""
        base = next(c for c in self.optimizer.__mro__ if c.__module__.startswith("torch.optim."))
        return None if base.__name__ == "Optimizer" else base

    @property
    def states(self) -> tuple[str, ...]:
        """Names of its state tensors, with all of its options."""
        from ..rules import RULES

        rules: list[Rule] = [RULES[name] for name in self.rules]
        return tuple(dict.fromkeys(state for rule in rules for state in rule.inputs[2:]))


OPTIMIZERS = (
    Entry("PagedAdamW", "adamw", ("adamw", "adamw_amsgrad", "adam", "adam_amsgrad")),
    Entry("PagedSGD", "sgd", ("sgd", "sgd_momentum")),
    Entry("PagedLion", "lion", ("lion",)),
)
#: Names of all their rules.
RULE_NAMES = tuple(name for entry in OPTIMIZERS for name in entry.rules)
if TYPE_CHECKING:  # what `import *` brings to pagedopt, for type checkers
    __all__ = ["PagedAdamW", "PagedLion", "PagedSGD"]
