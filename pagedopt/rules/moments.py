"""Parts shared by the rules of Adam's family: weight decay, two running means, and the update from their quotient.

The running means round as those of torch's default on a CPU (``foreach=False``).  Two operations differ, on purpose:
a parameter is rounded once, which is nearer to the exact number (notes/arithmetic.md), and the root is multiplied by
the reciprocal of the bias correction where torch divides by it, which is faster.
"""

from ..formats.choice import Moment
from .rule import fma, sqrt

#: Adam's means, and the maximum of the second one, which does not decay.
MOMENTS = {"exp_avg": Moment(decay="beta1"), "exp_avg_sq": Moment(signed=False, decay="beta2", squares=True)}
AMSGRAD = {**MOMENTS, "max_exp_avg_sq": Moment(signed=False, squares=True)}


def decoupled(param, change, lr, weight_decay):
    """``param`` less its decay and ``change``, rounded once: a small decay that is rounded by itself is mostly lost."""
    decay = lr * weight_decay
    return param - (fma(decay, param, change) if decay != 0 else change)


def mean(grad, exp_avg, decay):
    """A running mean of ``grad``: a lerp from the nearer end, as torch's ``lerp``."""
    near = decay > 0.5
    return fma(1 - decay if near else -decay, grad - exp_avg, exp_avg if near else grad)


def mean_of_squares(grad, exp_avg_sq, decay):
    """A running mean of ``grad**2``."""
    return fma((1 - decay) * grad, grad, decay * exp_avg_sq)


def moments(grad, exp_avg, exp_avg_sq, beta1, beta2):
    """Running means of ``grad`` and ``grad**2``."""
    return mean(grad, exp_avg, beta1), mean_of_squares(grad, exp_avg_sq, beta2)


def descent(exp_avg, exp_avg_sq, lr, beta1, beta2, eps, step):
    """How far Adam's update goes down, with bias correction of means that started at zero."""
    bias_correction1 = 1 - beta1**step
    root = (1 - beta2**step) ** 0.5
    # torch divides a tensor by zero here and gets infinity.  1 / 5e-324 is infinity, too, and Python does not raise.
    bias_correction2_sqrt = root if root != 0 else 5e-324
    denominator = sqrt(exp_avg_sq) * (1 / bias_correction2_sqrt) + eps
    return (lr / bias_correction1) * exp_avg / denominator


def decayed(grad, param, weight_decay):
    """``grad`` plus the gradient of an L2 penalty on ``param``, as SGD and Adam decay."""
    return fma(weight_decay, param, grad) if weight_decay != 0 else grad
