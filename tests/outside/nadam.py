"""torch's NAdam: an optimizer with a number of each parameter's own, the product of its momenta, beside its step."""

from __future__ import annotations

from typing import Any, ClassVar

from pagedopt import Moment, PagedOptimizer, rule
from pagedopt.rules import sqrt


def momenta(beta1, decay, step):
    """The momentum of this step and that of the next."""
    return beta1 * (1 - 0.5 * 0.96 ** (step * decay)), beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * decay))


@rule(moments={"exp_avg": Moment(decay="beta1"), "exp_avg_sq": Moment(signed=False, decay="beta2", squares=True)})
def nadam(param, grad, exp_avg, exp_avg_sq, *, lr, beta1, beta2, eps, weight_decay, momentum_decay, step, mu_product):
    grad = grad + weight_decay * param
    mu, ahead = momenta(beta1, momentum_decay, step)
    mu_product = mu_product * mu
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    update = (1 - mu) / (1 - mu_product) * grad + ahead / (1 - mu_product * ahead) * exp_avg
    param = param - lr * update / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps)
    return param, exp_avg, exp_avg_sq, mu_product


class NAdam(PagedOptimizer):
    rule = nadam
    initial: ClassVar = {"mu_product": 1.0}

    def __init__(
        self, params: Any, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, momentum_decay=4e-3, **options: Any
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
        super().__init__(params, numbers, **options)
