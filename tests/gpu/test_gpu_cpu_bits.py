"""The same bits on a CPU and on a GPU: one rule, IEEE operations in one order, nothing fused behind our back.

Adam's family excepted, where each side rounds as torch's fused kernel for that side does.
"""

import pytest
import torch
from gpu_support import NEEDED
from support import BF16, F32, F64, lists_for, scalars_for

from pagedopt import multi_tensor_apply
from pagedopt.rules import RULES

pytestmark = NEEDED


@pytest.mark.parametrize("dtypes", [(F32,) * 5, (F64,) * 5, (BF16, BF16, F32, F32, F32)], ids=["f32", "f64", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "sgd_momentum", "lion", "addcdiv", "lerp"])
def test_cpu_and_gpu_agree(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    rule = RULES[name]
    here = lists_for(rule, (1, 3, 4097, 100_003), dtypes[: len(rule.inputs)])
    there = [[t.cuda() for t in tensors if t is not None] for tensors in here]
    before = here[0][3].clone()  # type: ignore[union-attr]
    for step in (1, 2, 3):
        for lists in (here, there):
            multi_tensor_apply(rule, lists, scalars_for(rule, step))  # type: ignore[arg-type]
    for mine, other in zip(here, there, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a is not None
            bound = 8 * torch.finfo(a.dtype).eps if name.startswith("adam") else 0
            torch.testing.assert_close(b.cpu(), a, rtol=0, atol=bound * float(a.abs().max()))
    assert not torch.equal(before, here[0][3])  # type: ignore[arg-type]
