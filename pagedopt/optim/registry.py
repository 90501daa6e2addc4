"""The list of optimizers, which exports, command line, documentation and tests read.  Does not import torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .adadelta import PagedAdadelta as PagedAdadelta
    from .adagrad import PagedAdagrad as PagedAdagrad
    from .adam import PagedAdam as PagedAdam
    from .adamax import PagedAdamax as PagedAdamax
    from .adamw import PagedAdamW as PagedAdamW
    from .adan import PagedAdan as PagedAdan
    from .ademamix import PagedAdEMAMix as PagedAdEMAMix
    from .adopt import PagedADOPT as PagedADOPT
    from .cautious_adamw import PagedCautiousAdamW as PagedCautiousAdamW
    from .cautious_lion import PagedCautiousLion as PagedCautiousLion
    from .laprop import PagedLaProp as PagedLaProp
    from .lion import PagedLion as PagedLion
    from .nadam import PagedNAdam as PagedNAdam
    from .optimizer import PagedOptimizer
    from .radam import PagedRAdam as PagedRAdam
    from .rmsprop import PagedRMSprop as PagedRMSprop
    from .schedule_free import PagedScheduleFreeAdamW as PagedScheduleFreeAdamW
    from .sgd import PagedSGD as PagedSGD
    from .signum import PagedSignum as PagedSignum


@dataclass(frozen=True)
class Entry:
    """An optimizer: its class, the module of this package that defines it, and the rules it chooses among, by name."""

    name: str
    module: str
    rules: tuple[str, ...]

    @property
    def optimizer(self) -> type[PagedOptimizer]:
        """The optimizer's class."""
        found: type[PagedOptimizer] = getattr(importlib.import_module(f".{self.module}", __package__), self.name)
        return found

    @property
    def torch(self) -> type[torch.optim.Optimizer] | None:
        """The torch class that it replaces; None if torch has none."""
        base = next(c for c in self.optimizer.__mro__ if c.__module__.startswith("torch.optim."))
        return None if base.__name__ == "Optimizer" else base

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors of all its rules."""
        from ..rules import RULES

        return tuple(dict.fromkeys(state for name in self.rules for state in RULES[name].inputs[2:]))


OPTIMIZERS = (
    Entry("PagedAdamW", "adamw", ("adamw", "adamw_amsgrad", "adam", "adam_amsgrad")),
    Entry("PagedAdam", "adam", ("adam", "adam_amsgrad", "adamw", "adamw_amsgrad")),
    Entry("PagedSGD", "sgd", ("sgd", "sgd_momentum")),
    Entry("PagedLion", "lion", ("lion",)),
    Entry(
        "PagedRMSprop",
        "rmsprop",
        ("rmsprop", "rmsprop_momentum", "rmsprop_centered", "rmsprop_centered_momentum"),
    ),
    Entry("PagedNAdam", "nadam", ("nadam",)),
    Entry("PagedRAdam", "radam", ("radam",)),
    Entry("PagedAdamax", "adamax", ("adamax",)),
    Entry("PagedAdagrad", "adagrad", ("adagrad",)),
    Entry("PagedAdadelta", "adadelta", ("adadelta",)),
    Entry("PagedAdEMAMix", "ademamix", ("ademamix",)),
    Entry("PagedScheduleFreeAdamW", "schedule_free", ("schedule_free_adamw",)),
    Entry("PagedCautiousAdamW", "cautious_adamw", ("cautious_adamw",)),
    Entry("PagedCautiousLion", "cautious_lion", ("cautious_lion",)),
    Entry("PagedAdan", "adan", ("adan",)),
    Entry("PagedADOPT", "adopt", ("adopt",)),
    Entry("PagedLaProp", "laprop", ("laprop",)),
    Entry("PagedSignum", "signum", ("signum",)),
)
RULE_NAMES = tuple(dict.fromkeys(name for entry in OPTIMIZERS for name in entry.rules))
if TYPE_CHECKING:  # what `import *` in the package's __init__ exports
    __all__ = [
        "PagedADOPT", "PagedAdEMAMix", "PagedAdadelta", "PagedAdagrad", "PagedAdam", "PagedAdamW", "PagedAdamax",
        "PagedAdan", "PagedCautiousAdamW", "PagedCautiousLion", "PagedLaProp", "PagedLion", "PagedNAdam",
        "PagedRAdam", "PagedRMSprop", "PagedSGD", "PagedScheduleFreeAdamW", "PagedSignum",
    ]  # fmt: skip
