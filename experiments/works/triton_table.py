"""AdamW as a Triton kernel over our table of pointers: addresses are loaded as integers and become pointers in it.

Triton has no list of pointers as an argument, and a program does not know a thread's number; what it can do is load an
address and cast it.  Which part of which tensor a program updates stands in a list of chunks, made once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from pagedopt import DeviceTable
from pagedopt.tables.layout import chunks

#: Elements of a program, and of one of its loads.
CHUNK, BLOCK = 8192, 2048
WORDS = 6  # of a row: four addresses, how many elements, and one that is not used here


@triton.jit
def update(param, grad, first, second, at, live, shrink, beta1, beta2, rate, root, eps):
    p = tl.load(param + at, live)
    g = tl.load(grad + at, live)
    m = tl.load(first + at, live)
    v = tl.load(second + at, live)
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p = p * shrink - rate * m / (tl.sqrt(v) / root + eps)
    tl.store(param + at, p, live)
    tl.store(first + at, m, live)
    tl.store(second + at, v, live)


@triton.jit(do_not_specialize=["table"])
def adamw_over_a_table(
    table, work, shrink, beta1, beta2, rate, root, eps,
    WORDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    row = tl.load(work + 2 * tl.program_id(0))
    start = tl.multiple_of(tl.load(work + 2 * tl.program_id(0) + 1), 16)
    words = table.to(tl.pointer_type(tl.int64)) + row * WORDS
    param = tl.load(words + 0).to(tl.pointer_type(tl.float32))
    grad = tl.load(words + 1).to(tl.pointer_type(tl.float32))
    first = tl.load(words + 2).to(tl.pointer_type(tl.float32))
    second = tl.load(words + 3).to(tl.pointer_type(tl.float32))
    numel = tl.load(words + 4)
    if ALIGNED:
        param = tl.multiple_of(param, 16)
        grad = tl.multiple_of(grad, 16)
        first = tl.multiple_of(first, 16)
        second = tl.multiple_of(second, 16)
    if start + CHUNK <= numel:  # no mask: loads of 16 bytes
        for inner in range(0, CHUNK, BLOCK):
            at = start + inner + tl.arange(0, BLOCK)
            update(param, grad, first, second, at, None, shrink, beta1, beta2, rate, root, eps)
    else:
        for inner in range(0, CHUNK, BLOCK):
            at = start + inner + tl.arange(0, BLOCK)
            update(param, grad, first, second, at, at < numel, shrink, beta1, beta2, rate, root, eps)


class TableAdamW:
    """AdamW over float32 parameters whose gradients stay where they are."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        values = [p.detach() for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        moments = [[torch.zeros_like(value) for value in values] for _ in range(2)]
        lists: list[Any] = [values, grads, *moments]
        self.table = DeviceTable(lists, writes=[0, 2, 3])
        plan = chunks([value.numel() for value in values], CHUNK).view(np.int64).reshape(-1, 2)
        self.work = torch.from_numpy(plan.copy()).to(values[0].device)
        self.aligned = all(t.data_ptr() % 16 == 0 for tensors in lists for t in tensors)
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """One launch on the current stream."""
        self.count += 1
        (beta1, beta2), t = self.betas, self.count
        rate, root = self.lr / (1 - beta1**t), (1 - beta2**t) ** 0.5
        with self.table.rows_on_device() as rows:
            adamw_over_a_table[(len(self.work),)](
                rows, self.work, 1 - self.lr * self.weight_decay, beta1, beta2, rate, root, self.eps,
                WORDS=WORDS, CHUNK=CHUNK, BLOCK=BLOCK, ALIGNED=self.aligned, num_warps=8,
            )  # fmt: skip
