"""Update rules: what happens to one element.  One file per family of optimizers; ``language`` makes them run."""

import importlib
import pkgutil
from collections.abc import Iterator

from .elementwise import (  # noqa: F401 - for type checkers, which do not see what is added below
    add,
    add_scalar,
    addcdiv,
    addcmul,
    lerp,
    lerp_tensor,
    mul,
    mul_scalar,
    square_root,
)  # fmt: skip
from .language.function_syntax import RuleError
from .rule import Rule, cpu_or_cuda, fma, rule, sign, sqrt


def _shipped() -> Iterator[Rule]:
    """The rules of all files here."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Rule) and value.function.__module__ == module.name:
                yield value


#: Every rule that ships, by name; each is a name of this package, too.
RULES: dict[str, Rule] = {r.name: r for r in _shipped()}
#: Those of optimizers: their state follows a parameter and its gradient.
UPDATES = {name: r for name, r in RULES.items() if r.inputs[:2] == ("param", "grad")}
globals().update(RULES)

__all__ = ["RULES", "UPDATES", "Rule", "RuleError", "cpu_or_cuda", "fma", "rule", "sign", "sqrt", *RULES]
