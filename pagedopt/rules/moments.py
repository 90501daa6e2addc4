"""What the rules of Adam's family share: a decay, two running means, and a step along their quotient.

Operations are rounded where torch's fused kernels round them, that for the CPU (FusedAdamKernel.cpp) in one place,
that for CUDA (fused_adam_utils.cuh, as compiled) in another; but for one: the root is multiplied by a reciprocal, where
torch divides once more.
"""

from .rule import cpu_or_cuda, fma, sqrt


def decoupled(param, lr, weight_decay):
    """``param`` less a share of itself.  CUDA's is the better: 1 - 1e-5 in float32 takes 0.14 % more than 1e-5."""
    return cpu_or_cuda(param * (1 - lr * weight_decay), fma(-lr * weight_decay, param, param))


def moments(grad, exp_avg, exp_avg_sq, beta1, beta2):
    """The running means of the gradient and of its square; on a CPU the first from the nearer end, as torch's lerp."""
    near = beta1 > 0.5
    exp_avg = cpu_or_cuda(
        fma(1 - beta1 if near else -beta1, grad - exp_avg, exp_avg if near else grad),
        fma(beta1, exp_avg, fma(-beta1, grad, grad)),
    )
    exp_avg_sq = cpu_or_cuda(
        fma((1 - beta2) * grad, grad, beta2 * exp_avg_sq),
        fma(beta2, exp_avg_sq, fma(-beta2, grad * grad, grad * grad)),
    )
    return exp_avg, exp_avg_sq


def descended(param, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, step):
    """``param`` after a step along the means, of which each has started at zero and is corrected for it."""
    bias_correction1 = 1 - beta1**step
    root = (1 - beta2**step) ** 0.5
    # By zero torch divides tensors, which gives infinity; 1 over the smallest number is that, too.
    bias_correction2_sqrt = root if root != 0 else 5e-324
    denominator = sqrt(exp_avg_sq) * (1 / bias_correction2_sqrt) + eps
    return param - (lr / bias_correction1) * exp_avg / denominator


def decayed(grad, param, weight_decay):
    """``grad`` with the decay of SGD and Adam, which is that of a penalty on the parameter's square."""
    return fma(weight_decay, param, grad) if weight_decay != 0 else grad
