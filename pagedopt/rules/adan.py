"""Adan (Xie et al. 2022, arXiv:2208.06677), algorithm 1 with decay within the proximal step."""

from ..formats.choice import Moment
from .moments import mean, mean_of_squares
from .rule import fma, rule, sqrt

MEANS = {"exp_avg": Moment(decay="beta1"), "exp_avg_diff": Moment(decay="beta2")}
LAST = Moment(exact="two gradients that are nearly equal are subtracted")


@rule(moments={**MEANS, "exp_avg_sq": Moment(signed=False, decay="beta3", squares=True), "before": LAST})
def adan(
    param, grad, exp_avg, exp_avg_diff, exp_avg_sq, before, *,
    lr, beta1, beta2, beta3, eps, step, weight_decay=0.0, maximize=False,
):  # fmt: skip
    """Adan update number ``step``, counted from 1; ``before`` is the last gradient."""
    grad = -grad if maximize else grad
    diff = grad - before if step > 1 else 0 * grad
    before = grad
    exp_avg, exp_avg_diff = mean(grad, exp_avg, beta1), mean(diff, exp_avg_diff, beta2)
    exp_avg_sq = mean_of_squares(fma(beta2, diff, grad), exp_avg_sq, beta3)
    change = lr / (1 - beta1**step) * exp_avg + lr * beta2 / (1 - beta2**step) * exp_avg_diff
    moved = param - change / (sqrt(exp_avg_sq) * (1 / (1 - beta3**step) ** 0.5) + eps)
    param = fma(-lr * weight_decay / (1 + lr * weight_decay), moved, moved)
    return param, exp_avg, exp_avg_diff, exp_avg_sq, before
