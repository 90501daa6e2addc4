"""AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137): AdamW with a second mean of gradients, which forgets slowly."""

import math

from ..formats.choice import Moment
from .moments import MOMENTS, decoupled, moments
from .rule import exp, fma, log, rule, sqrt


def grown(share, begin, end):
    """The decay rate on its way from ``begin`` to ``end``, along which the half-life grows evenly."""
    return min(exp(log(begin) * log(end) / ((1 - share) * log(end) + share * log(begin))), end)


@rule(moments={**MOMENTS, "exp_avg_slow": Moment(decay="beta3")})
def ademamix(
    param, grad, exp_avg, exp_avg_slow, exp_avg_sq, *,
    lr, beta1, beta2, beta3, eps, alpha, step, weight_decay=0.0, alpha_warmup=math.nan, beta3_warmup=math.nan,
    maximize=False,
):  # fmt: skip
    """AdEMAMix update number ``step``, counted from 1."""
    grad = -grad if maximize else grad
    slow = grown(min(step / beta3_warmup, 1), beta1, beta3) if beta3_warmup > 0 else beta3
    weight = alpha * min(step / alpha_warmup, 1) if alpha_warmup > 0 else alpha
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    exp_avg_slow = fma(1 - slow, grad, slow * exp_avg_slow)
    change = exp_avg / (1 - beta1**step) + weight * exp_avg_slow
    change = lr * change / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps)
    param = decoupled(param, change, lr, weight_decay)
    return param, exp_avg, exp_avg_slow, exp_avg_sq
