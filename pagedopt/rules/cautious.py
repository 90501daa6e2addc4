"""Cautious AdamW and Lion (Liang et al. 2024, arXiv:2411.16085), without the division by the mean of the mask."""

from ..formats.choice import Moment
from .moments import MOMENTS, decoupled, descent, moments
from .rule import rule, sign


@rule(moments=MOMENTS)
def cautious_adamw(param, grad, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, step, weight_decay=0.0, maximize=False):
    """AdamW update number ``step``, counted from 1, where it goes down the gradient."""
    grad = -grad if maximize else grad
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    change = descent(exp_avg, exp_avg_sq, lr, beta1, beta2, eps, step) if exp_avg * grad > 0 else 0
    param = decoupled(param, change, lr, weight_decay)
    return param, exp_avg, exp_avg_sq


@rule(moments={"exp_avg": Moment(decay="beta2")})
def cautious_lion(param, grad, exp_avg, *, lr, beta1, beta2, weight_decay=0.0, maximize=False):
    """Lion update, where it goes down the gradient."""
    grad = -grad if maximize else grad
    update = sign(beta1 * exp_avg + (1 - beta1) * grad)
    param = decoupled(param, lr * update if update * grad > 0 else 0, lr, weight_decay)
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad
    return param, exp_avg
