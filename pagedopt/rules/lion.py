"""Lion (Chen et al. 2023, arXiv:2302.06675): the sign of an interpolated momentum, with decoupled weight decay."""

from ..formats.choice import Moment
from .moments import decoupled
from .rule import rule, sign


@rule(moments={"exp_avg": Moment(decay="beta2")})
def lion(param, grad, exp_avg, *, lr, beta1, beta2, weight_decay=0.0, maximize=False):
    """Lion update: every element moves by the learning rate, apart from decay."""
    grad = -grad if maximize else grad
    update = sign(beta1 * exp_avg + (1 - beta1) * grad)
    param = decoupled(param, lr * update, lr, weight_decay)
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad
    return param, exp_avg
