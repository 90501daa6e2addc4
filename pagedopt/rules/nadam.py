"""NAdam (Dozat 2016): Adam with Nesterov's momentum, as in torch/optim/nadam.py."""

from .moments import MOMENTS, decayed, decoupled, moments
from .rule import rule, sqrt


def momentum(beta1, decay, step):
    """The momentum of a step, which grows to beta1."""
    return beta1 * (1 - 0.5 * 0.96 ** (step * decay))


def single(x):
    """A number rounded to float32 (Veltkamp 1968), in which torch stores and multiplies momenta."""
    wide = (2**29 + 1) * x
    return wide - (wide - x)


@rule(moments=MOMENTS)
def nadam(
    param, grad, exp_avg, exp_avg_sq, *,
    lr, beta1, beta2, eps, weight_decay, momentum_decay, step, mu_product, decoupled_weight_decay=False, maximize=False,
):  # fmt: skip
    """NAdam update number ``step``, counted from 1; ``mu_product`` is the product of all momenta so far."""
    grad = -grad if maximize else grad
    grad = decayed(grad, param, 0 if decoupled_weight_decay else weight_decay)
    mu, ahead = momentum(beta1, momentum_decay, step), momentum(beta1, momentum_decay, step + 1)
    mu_product = single(mu_product * single(mu))
    exp_avg, exp_avg_sq = moments(grad, exp_avg, exp_avg_sq, beta1, beta2)
    looked = lr * (1 - mu) / (1 - mu_product) * grad + lr * ahead / (1 - mu_product * ahead) * exp_avg
    change = looked / (sqrt(exp_avg_sq / (1 - beta2**step)) + eps)
    param = decoupled(param, change, lr, weight_decay) if decoupled_weight_decay else param - change
    return param, exp_avg, exp_avg_sq, mu_product
