"""LaProp (Ziyin et al. 2020, arXiv:2002.04839), algorithm 1."""

from .moments import MOMENTS, decoupled, mean, mean_of_squares
from .rule import rule, sqrt


@rule(moments=MOMENTS)
def laprop(param, grad, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, step, weight_decay=0.0, maximize=False):
    """LaProp update number ``step``, counted from 1: the mean is of gradients that are divided already."""
    grad = -grad if maximize else grad
    exp_avg_sq = mean_of_squares(grad, exp_avg_sq, beta2)
    exp_avg = mean(grad / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps), exp_avg, beta1)
    param = decoupled(param, lr / (1 - beta1**step) * exp_avg, lr, weight_decay)
    return param, exp_avg, exp_avg_sq
