"""Rules of the elementwise ``torch._foreach_*``.  Each overwrites its first list; ``out_of_place`` writes a new one."""

from .rule import rule, sqrt


@rule
def add(self, other, *, alpha=1.0):
    """self + alpha * other"""
    return self + alpha * other


@rule
def add_scalar(self, *, scalar):
    """self + scalar"""
    return self + scalar


@rule
def mul(self, other):
    """self * other"""
    return self * other


@rule
def mul_scalar(self, *, scalar):
    """self * scalar"""
    return self * scalar


@rule
def lerp(self, end, *, weight):
    """self + weight * (end - self), computed from the nearer end as in torch (aten/src/ATen/native/Lerp.h)"""
    return self + weight * (end - self) if abs(weight) < 0.5 else end - (end - self) * (1 - weight)


@rule
def lerp_tensor(self, end, weight):
    """``lerp`` with a weight for each element."""
    return self + weight * (end - self) if abs(weight) < 0.5 else end - (end - self) * (1 - weight)


@rule
def addcmul(self, tensor1, tensor2, *, value=1.0):
    """self + value * tensor1 * tensor2"""
    return self + value * tensor1 * tensor2


@rule
def addcdiv(self, tensor1, tensor2, *, value=1.0):
    """self + value * (tensor1 / tensor2)"""
    return self + value * (tensor1 / tensor2)


@rule
def square_root(self):
    """sqrt(self)"""
    return sqrt(self)
