"""Adamax (Kingma & Ba 2015, arXiv:1412.6980, algorithm 2), in the order of operations of torch/optim/adamax.py."""

from ..formats.choice import Moment
from .moments import decayed, mean
from .rule import rule

CLIMBS = "a maximum that decays stays at its code if it is rounded to the nearest, and climbs if at random"
MOMENTS = {"exp_avg": Moment(decay="beta1"), "exp_inf": Moment(signed=False, squares=False, exact=CLIMBS)}


@rule(moments=MOMENTS)
def adamax(param, grad, exp_avg, exp_inf, *, lr, beta1, beta2, eps, weight_decay, step, maximize=False):
    """Adamax update number ``step``, counted from 1: the mean gradient over a maximum that decays."""
    grad = decayed(-grad if maximize else grad, param, weight_decay)
    exp_avg = mean(grad, exp_avg, beta1)
    exp_inf = max(beta2 * exp_inf, abs(grad) + eps)
    param = param - (lr / (1 - beta1**step)) * exp_avg / exp_inf
    return param, exp_avg, exp_inf
