"""AdaBelief (Zhuang et al. 2020, arXiv:2010.07468), algorithm 2, with decoupled weight decay."""

from ..formats.choice import Moment
from .moments import MOMENTS, decoupled, descent, mean, mean_of_squares
from .rule import rule


@rule(moments={"exp_avg": MOMENTS["exp_avg"], "exp_avg_var": Moment(signed=False, decay="beta2")})
def adabelief(param, grad, exp_avg, exp_avg_var, *, lr, beta1, beta2, eps, step, weight_decay=0.0, maximize=False):
    """AdaBelief update number ``step``, counted from 1: steps are short where gradients are far from their mean."""
    grad = -grad if maximize else grad
    exp_avg = mean(grad, exp_avg, beta1)
    exp_avg_var = mean_of_squares(grad - exp_avg, exp_avg_var, beta2) + eps
    param = decoupled(param, descent(exp_avg, exp_avg_var, lr, beta1, beta2, eps, step), lr, weight_decay)
    return param, exp_avg, exp_avg_var
