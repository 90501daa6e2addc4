"""Parts shared by the rules of Adam's family: weight decay, two running means, and the update from their quotient.

Operations round where torch's fused kernels round.  The CPU kernel (FusedAdamKernel.cpp) and the CUDA kernel
(fused_adam_utils.cuh, as compiled) differ in that, so there are two variants.  One exception: torch divides the root by
the bias correction; here it is multiplied by the reciprocal.
"""

from .rule import cpu_or_cuda, fma, sqrt


def decoupled(param, lr, weight_decay):
    """``param`` after decoupled decay.  CUDA's is more exact: in float32, 1 - 1e-5 subtracts 0.14 % more than 1e-5."""
    return cpu_or_cuda(param * (1 - lr * weight_decay), fma(-lr * weight_decay, param, param))


def moments(grad, exp_avg, exp_avg_sq, beta1, beta2):
    """Running means of ``grad`` and ``grad**2``.  On the CPU the first is a lerp from the nearer end, as in torch."""
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
    """``param`` after Adam's update, with bias correction of means that started at zero."""
    bias_correction1 = 1 - beta1**step
    root = (1 - beta2**step) ** 0.5
    # torch divides a tensor by zero here and gets infinity.  1 / 5e-324 is infinity, too, and Python does not raise.
    bias_correction2_sqrt = root if root != 0 else 5e-324
    denominator = sqrt(exp_avg_sq) * (1 / bias_correction2_sqrt) + eps
    return param - (lr / bias_correction1) * exp_avg / denominator


def decayed(grad, param, weight_decay):
    """``grad`` plus the gradient of an L2 penalty on ``param``, as SGD and Adam decay."""
    return fma(weight_decay, param, grad) if weight_decay != 0 else grad
