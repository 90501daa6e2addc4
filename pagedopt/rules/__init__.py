"""Update rules: what happens to one element.  One file per family of optimizers; ``translate`` makes them run."""

from .adam import adam, adam_amsgrad
from .adamw import adamw, adamw_amsgrad
from .elementwise import add, add_scalar, addcdiv, addcmul, lerp, lerp_tensor, mul, mul_scalar, square_root
from .language.source import RuleError
from .rule import Rule, fma, rule, sign, sqrt
from .sgd import sgd, sgd_momentum

#: Every rule that ships, by name.
RULES: dict[str, Rule] = {
    r.name: r
    for r in (
        adamw, adamw_amsgrad, adam, adam_amsgrad, sgd, sgd_momentum,
        add, add_scalar, mul, mul_scalar, lerp, lerp_tensor, addcmul, addcdiv, square_root,
    )
}  # fmt: skip

__all__ = ["RULES", "Rule", "RuleError", "fma", "rule", "sign", "sqrt", *RULES]
