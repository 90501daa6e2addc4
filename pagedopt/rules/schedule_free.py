"""Schedule-Free AdamW (Defazio et al. 2024, arXiv:2405.15682); the parameter is y, where gradients are taken."""

from ..formats.choice import Moment
from .moments import mean_of_squares
from .rule import fma, rule, sqrt


@rule(moments={"z": Moment(weights=True), "exp_avg_sq": Moment(signed=False, decay="beta2", squares=True)})
def schedule_free_adamw(
    param, grad, z, exp_avg_sq, *,
    lr, beta1, beta2, eps, step, weight_sum, weight_decay=0.0, warmup_steps=0, maximize=False,
):  # fmt: skip
    """Update number ``step``, counted from 1; ``weight_sum`` is the sum of all squared learning rates so far."""
    grad = -grad if maximize else grad
    rate = lr * min(step / warmup_steps, 1) if warmup_steps > 0 else lr
    weight_sum = weight_sum + rate * rate
    share = rate * rate / weight_sum if weight_sum > 0 else 0
    z = param if step == 1 else z
    exp_avg_sq = mean_of_squares(grad, exp_avg_sq, beta2)
    change = grad / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps) + weight_decay * param
    param = fma(-rate * (1 - beta1 * (1 - share)), change, fma(share, z - param, param))
    z = fma(-rate, change, z)
    return param, z, exp_avg_sq, weight_sum


@rule
def to_average(param, z, *, beta1):
    """From y to x, the average."""
    param = param + (1 - 1 / beta1) * (z - param)
    return param


@rule
def to_gradients(param, z, *, beta1):
    """From x back to y."""
    param = param + (1 - beta1) * (z - param)
    return param
