"""ADOPT (Taniguchi et al. 2024, arXiv:2411.02853), algorithm 2, whose clip grows as step**0.25."""

from .moments import MOMENTS, decoupled, mean, mean_of_squares
from .rule import rule, sqrt


@rule(moments=MOMENTS)
def adopt(param, grad, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, step, weight_decay=0.0, maximize=False):
    """ADOPT update number ``step``, counted from 1; the first one sees the squares alone."""
    grad = -grad if maximize else grad
    most = (step - 1) ** 0.25
    divided = max(-most, min(grad / max(sqrt(exp_avg_sq), eps), most))
    exp_avg = mean(divided, exp_avg, beta1) if step > 1 else exp_avg
    param = decoupled(param, lr * exp_avg, lr, weight_decay) if step > 1 else param
    exp_avg_sq = mean_of_squares(grad, exp_avg_sq, beta2) if step > 1 else grad * grad
    return param, exp_avg, exp_avg_sq
