"""Adam (Kingma & Ba 2015, arXiv:1412.6980).  Weight decay is added to the gradient, as in torch/optim/adam.py."""

from .moments import AMSGRAD, MOMENTS, decayed, descent, moments
from .rule import rule


@rule(moments=MOMENTS)
def adam(param, grad, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, step, maximize=False):
    """Adam update number ``step``, counted from 1."""
    grad = -grad if maximize else grad
    grad = decayed(grad, param, weight_decay)
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    param = param - descent(exp_avg, exp_avg_sq, lr, beta1, beta2, eps, step)
    return param, exp_avg, exp_avg_sq


@rule(moments=AMSGRAD)
def adam_amsgrad(
    param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, step, maximize=False
):
    """Adam with the running maximum of the second moment (Reddi et al. 2018, arXiv:1904.09237)."""
    grad = -grad if maximize else grad
    grad = decayed(grad, param, weight_decay)
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)
    param = param - descent(exp_avg, max_exp_avg_sq, lr, beta1, beta2, eps, step)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq
