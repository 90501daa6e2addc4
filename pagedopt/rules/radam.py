"""RAdam (Liu et al. 2020, arXiv:1908.03265), in the order of operations of torch/optim/radam.py."""

from .moments import MOMENTS, decayed, decoupled, moments
from .rule import rule, sqrt


@rule(moments=MOMENTS)
def radam(
    param, grad, exp_avg, exp_avg_sq, *,
    lr, beta1, beta2, eps, weight_decay, step, decoupled_weight_decay=False, maximize=False,
):  # fmt: skip
    """RAdam update number ``step``, counted from 1: a step of momentum, while too few squares are known to divide."""
    grad = decayed(-grad if maximize else grad, param, 0 if decoupled_weight_decay else weight_decay)
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    known, most = 1 - beta2**step, 2 / (1 - beta2) - 1
    length = most - 2 * step * beta2**step / known
    squared = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length) if length > 5 else 1
    change = exp_avg / (1 - beta1**step) * lr
    change = change * (known**0.5 / (sqrt(exp_avg_sq) + eps)) * squared**0.5 if length > 5 else change
    param = decoupled(param, change, lr, weight_decay) if decoupled_weight_decay else param - change
    return param, exp_avg, exp_avg_sq
