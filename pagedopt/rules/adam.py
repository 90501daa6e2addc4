"""Adam (Kingma & Ba 2015, arXiv:1412.6980), whose decay is part of the gradient, as in torch/optim/adam.py."""

from .rule import rule, sqrt


@rule
def adam(
    param, grad, exp_avg, exp_avg_sq,
    *, lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt, maximize=False,
):  # fmt: skip
    """One update; ``bias_correction1`` is 1 - beta1**step, ``bias_correction2_sqrt`` is sqrt(1 - beta2**step)."""
    grad = -grad if maximize else grad
    grad = grad + weight_decay * param if weight_decay != 0 else grad
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denominator = sqrt(exp_avg_sq) * (1 / bias_correction2_sqrt) + eps
    param = param - (lr / bias_correction1) * (exp_avg / denominator)
    return param, exp_avg, exp_avg_sq


@rule
def adam_amsgrad(
    param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq,
    *, lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt, maximize=False,
):  # fmt: skip
    """The same with the running maximum of the second moment (Reddi et al. 2018, arXiv:1904.09237)."""
    grad = -grad if maximize else grad
    grad = grad + weight_decay * param if weight_decay != 0 else grad
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)
    denominator = sqrt(max_exp_avg_sq) * (1 / bias_correction2_sqrt) + eps
    param = param - (lr / bias_correction1) * (exp_avg / denominator)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq
