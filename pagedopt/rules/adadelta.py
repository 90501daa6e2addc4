"""Adadelta (Zeiler 2012, arXiv:1212.5701), in the order of operations of torch/optim/adadelta.py."""

from ..formats.choice import Moment
from .moments import decayed, mean_of_squares
from .rule import fma, rule, sqrt

SQUARES = Moment(signed=False, decay="rho", squares=True)


@rule(moments={"square_avg": SQUARES, "acc_delta": SQUARES})
def adadelta(param, grad, square_avg, acc_delta, *, lr, rho, eps, weight_decay=0.0, maximize=False):
    """Adadelta: the gradient in units of earlier updates."""
    grad = decayed(-grad if maximize else grad, param, weight_decay)
    square_avg = mean_of_squares(grad, square_avg, rho)
    delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * grad
    acc_delta = mean_of_squares(delta, acc_delta, rho)
    param = fma(-lr, delta, param)
    return param, square_avg, acc_delta
