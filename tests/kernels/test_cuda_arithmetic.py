"""What a kernel for CUDA computes for Adam's family, played by g++ with the branch that is for CUDA.

torch's fused kernel for CUDA is written out beside it, operation by operation, as fused_adam_utils.cuh of torch 2.13
has it (torch comes with that header; beside 2.11 on a card all bits of the first moment were the same,
notes/raw/contract-gpu.txt); float64 is the measure of both.
"""

from __future__ import annotations

import ctypes
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from host_build import _library, kernel_text

from pagedopt import PagedAdamW
from pagedopt.optim.step.hyperparameters import uniforms_of
from pagedopt.rules import RULES

STEPS, NUMEL = 1000, 4096
F, D = np.float32, np.float64
HYPER = [
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2},
]
ENTRY = """
extern "C" void play(float** lists, const double* uniforms, long long numel) {
    float u[RULE::uniforms], in[RULE::lists], out[RULE::outputs];
    for (int i = 0; i < RULE::uniforms; ++i) u[i] = float(uniforms[i]);
    for (long long at = 0; at < numel; ++at) {
        for (int i = 0; i < RULE::lists; ++i) in[i] = lists[i][at];
        RULE::apply<float>(in, u, out);
        for (int i = 0; i < RULE::lists; ++i)
            if (RULE::output_of(i) >= 0) lists[i][at] = out[RULE::output_of(i)];
    }
}
"""


def fma(a: Any, b: Any, c: Any) -> Any:
    return (D(a) * D(b) + D(c)).astype(F)


def torchs(p: Any, g: Any, m: Any, v: Any, step: int, group: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Parameter and moments after a step of torch's kernel."""
    b1, b2 = map(F, group["betas"])
    p = fma(-F(group["lr"] * group["weight_decay"]), p, p)
    m = fma(b1, m, fma(-b1, g, g))
    v = fma(b2, v, fma(-b2, g * g, g * g))
    corrected = [1 - D(b) ** step for b in (b1, b2)]
    denominator = np.sqrt(v) / F(corrected[1] ** 0.5) + F(group["eps"])
    return p - F(group["lr"] / corrected[0]) * m / denominator, m, v


def exact(p: Any, g: Any, m: Any, v: Any, step: int, group: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The same in float64."""
    b1, b2 = group["betas"]
    m, v = b1 * m + (1 - b1) * D(g), b2 * v + (1 - b2) * D(g) ** 2
    denominator = np.sqrt(v) / (1 - b2**step) ** 0.5 + group["eps"]
    return p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] / (1 - b1**step) * m / denominator, m, v


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("hyper", HYPER, ids=["default", "other"])
def test_adamw_is_as_close_to_float64_as_torchs_kernel_for_cuda(hyper: dict[str, Any]) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ is not installed")
    rule = RULES["adamw"]
    text = [kernel_text(), rule.cuda_source(), f"#define RULE {rule.functor}", ENTRY]
    play = _library(compiler, "\n".join(["#define __CUDA_ARCH__ 900", *text])).play
    optimizer = PagedAdamW([torch.nn.Parameter(torch.zeros(1))], **hyper)
    (group,) = optimizer.param_groups
    generator = np.random.default_rng(0)
    start = generator.standard_normal(NUMEL).astype(F)
    ours = [start.copy(), np.empty(NUMEL, F), np.zeros(NUMEL, F), np.zeros(NUMEL, F)]
    pointers = (ctypes.c_void_p * 4)(*(a.ctypes.data for a in ours))
    theirs = (start, np.zeros(NUMEL, F), np.zeros(NUMEL, F))
    true = (D(start), np.zeros(NUMEL), np.zeros(NUMEL))
    for step in range(1, STEPS + 1):
        ours[1][:] = g = generator.standard_normal(NUMEL).astype(F)
        own = {"step": np.array([step], D)}
        sets = uniforms_of(rule, optimizer, [(0, 0)], own, rounded=optimizer.rounded_on_cuda)
        play(pointers, np.array(sets[0], D).ctypes.data_as(ctypes.c_void_p), ctypes.c_longlong(NUMEL))
        theirs, true = torchs(theirs[0], g, *theirs[1:], step, group), exact(true[0], g, *true[1:], step, group)
    for mine, of_torch, of_float64 in zip((ours[0], *ours[2:]), theirs, true, strict=True):
        assert rms(mine - of_float64) <= 1.05 * rms(of_torch - of_float64)
        assert np.abs(D(mine) - of_torch).max() <= 4 * np.finfo(F).eps * np.abs(of_torch).max()
    for mine, of_torch in zip(ours[2:], theirs[1:], strict=True):
        assert np.array_equal(mine, of_torch), "the moments have the bits of that form"
