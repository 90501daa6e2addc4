"""Adagrad (Duchi et al. 2011), in the order of operations of torch/optim/adagrad.py."""

from ..formats.choice import Moment
from .moments import decayed
from .rule import fma, rule, sqrt

STALLS = "it only grows, and what is added is soon less than half a code"


@rule(moments={"sum": Moment(signed=False, squares=True, exact=STALLS)})
def adagrad(param, grad, sum, *, lr, lr_decay, eps, step, weight_decay=0.0, maximize=False):
    """Adagrad update number ``step``, counted from 1: the gradient over the root of the sum of its squares."""
    grad = decayed(-grad if maximize else grad, param, weight_decay)
    sum = fma(grad, grad, sum)
    param = param - (lr / (1 + (step - 1) * lr_decay)) * grad / (sqrt(sum) + eps)
    return param, sum
