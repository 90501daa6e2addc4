"""Signum (Bernstein et al. 2018, arXiv:1802.04434): the sign of a momentum, with decoupled weight decay."""

from ..formats.choice import Moment
from .moments import decoupled
from .rule import rule, sign


@rule(moments={"momentum_buffer": Moment(decay="momentum")})
def signum(param, grad, momentum_buffer, *, lr, momentum, weight_decay=0.0, maximize=False):
    """Signum update: every element moves by the learning rate, apart from decay."""
    grad = -grad if maximize else grad
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * grad
    param = decoupled(param, lr * sign(momentum_buffer), lr, weight_decay)
    return param, momentum_buffer
