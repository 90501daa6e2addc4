"""RMSprop (Tieleman & Hinton 2012; centered: Graves 2013, arXiv:1308.0850), as in torch/optim/rmsprop.py."""

from ..formats.choice import Moment
from .moments import decayed, mean, mean_of_squares
from .rule import fma, rule, sqrt

PLAIN = {"square_avg": Moment(signed=False, decay="alpha", squares=True)}
MOMENTUM = {**PLAIN, "momentum_buffer": Moment(decay="momentum")}
EXACT = "its square is subtracted from 'square_avg', and a rounded difference may be negative"
CENTERED = {"grad_avg": Moment(decay="alpha", exact=EXACT)}


@rule(moments=PLAIN)
def rmsprop(param, grad, square_avg, *, lr, alpha, eps, weight_decay=0.0, maximize=False):
    """RMSprop: the gradient over the root of its mean square."""
    grad = decayed(-grad if maximize else grad, param, weight_decay)
    square_avg = mean_of_squares(grad, square_avg, alpha)
    param = fma(-lr, grad / (sqrt(square_avg) + eps), param)
    return param, square_avg


@rule(moments=MOMENTUM)
def rmsprop_momentum(
    param, grad, square_avg, momentum_buffer, *, lr, alpha, eps, momentum, weight_decay=0.0, maximize=False
):
    """RMSprop with a momentum of its updates."""
    grad = decayed(-grad if maximize else grad, param, weight_decay)
    square_avg = mean_of_squares(grad, square_avg, alpha)
    momentum_buffer = momentum * momentum_buffer + grad / (sqrt(square_avg) + eps)
    param = fma(-lr, momentum_buffer, param)
    return param, square_avg, momentum_buffer


@rule(moments={**PLAIN, **CENTERED})
def rmsprop_centered(param, grad, square_avg, grad_avg, *, lr, alpha, eps, weight_decay=0.0, maximize=False):
    """RMSprop with the variance in place of the mean square."""
    grad = decayed(-grad if maximize else grad, param, weight_decay)
    square_avg, grad_avg = mean_of_squares(grad, square_avg, alpha), mean(grad, grad_avg, alpha)
    param = fma(-lr, grad / (sqrt(square_avg - grad_avg * grad_avg) + eps), param)
    return param, square_avg, grad_avg


@rule(moments={**MOMENTUM, **CENTERED})
def rmsprop_centered_momentum(
    param, grad, square_avg, momentum_buffer, grad_avg, *,
    lr, alpha, eps, momentum, weight_decay=0.0, maximize=False,
):  # fmt: skip
    """The same with a momentum of its updates."""
    grad = decayed(-grad if maximize else grad, param, weight_decay)
    square_avg, grad_avg = mean_of_squares(grad, square_avg, alpha), mean(grad, grad_avg, alpha)
    momentum_buffer = momentum * momentum_buffer + grad / (sqrt(square_avg - grad_avg * grad_avg) + eps)
    param = fma(-lr, momentum_buffer, param)
    return param, square_avg, momentum_buffer, grad_avg
