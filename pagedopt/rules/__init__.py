"""Update rules: what an optimizer does to one element.  One file per optimizer family; ``language`` traces them."""

import importlib
import pkgutil
from collections.abc import Iterator

# For type checkers: they do not see the names that globals() gets below.
from .compose import compose
from .elementwise import add, add_scalar, addcdiv, addcmul, lerp, lerp_tensor, mul, mul_scalar, square_root  # noqa: F401
from .language.syntax import RuleError
from .rule import Rule, exp, fma, log, rule, sign, sqrt, tanh


def _shipped() -> Iterator[Rule]:
    """Yield the rules that the modules of this package define."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Rule) and value.function.__module__ == module.name:
                yield value


#: Every rule that ships, by name; each is a name of this package, too.
RULES: dict[str, Rule] = {r.name: r for r in _shipped()}
#: The rules of optimizers: their inputs are a parameter, its gradient, then state.
UPDATES = {name: r for name, r in RULES.items() if r.inputs[:2] == ("param", "grad")}
globals().update(RULES)

__all__ = [
    "RULES", "UPDATES", "Rule", "RuleError", "compose", "exp", "fma", "log", "rule", "sign", "sqrt", "tanh", *RULES,
]  # fmt: skip
