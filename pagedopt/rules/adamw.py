"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), in the order of operations of torch/optim/adamw.py."""

from .moments import AMSGRAD, MOMENTS, decoupled, descent, moments
from .rule import rule


@rule(moments=MOMENTS)
def adamw(param, grad, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, step, maximize=False):
    """AdamW update number ``step``, counted from 1."""
    grad = -grad if maximize else grad
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    change = descent(exp_avg, exp_avg_sq, lr, beta1, beta2, eps, step)
    param = decoupled(param, change, lr, weight_decay)
    return param, exp_avg, exp_avg_sq


@rule(moments=AMSGRAD)
def adamw_amsgrad(
    param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, step, maximize=False
):
    """AdamW with the running maximum of the second moment (Reddi et al. 2018, arXiv:1904.09237)."""
    grad = -grad if maximize else grad
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)
    change = descent(exp_avg, max_exp_avg_sq, lr, beta1, beta2, eps, step)
    param = decoupled(param, change, lr, weight_decay)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq
