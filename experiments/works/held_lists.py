"""A list of parameters and gradients that somebody holds from one step to the next, and subtracts one from the other.

Between building a list and using it lies what a program does to its tensors.  The ways here differ in what they hold:
numbers, the tensors themselves, or a graph that was recorded over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedopt import PagedSGD, rule

BARE, TORCH, TORCH_GRAPH = "bare addresses", "torch", "torch, graph"
OURS, OURS_GRAPH = "pagedopt", "pagedopt, graph"
#: A row is one of :class:`pagedopt.DeviceTable`: addresses of a parameter and of its gradient, elements, 0.
CUDA = r"""
struct Row { float* param; const float* grad; unsigned long long numel, none; };
__device__ void subtract(const Row& row) {
    for (unsigned long long i = threadIdx.x; i < row.numel; i += blockDim.x) row.param[i] -= row.grad[i];
}
extern "C" __global__ void listed(const Row* rows) { subtract(rows[blockIdx.x]); }
extern "C" __global__ void by_value(const Row row) { subtract(row); }
"""


@rule
def minus(param, grad):
    return param - grad


@dataclass
class User:
    """Who has a model and an optimizer, and may let go of both."""

    params: list[torch.nn.Parameter]
    optimizer: Any = None

    @classmethod
    def of(cls, count: int, numel: int, device: str | torch.device) -> User:
        """Parameter i holds i + 1 everywhere, its gradient 0."""
        params = [torch.nn.Parameter(torch.full((numel,), i + 1.0, device=device)) for i in range(count)]
        for p in params:
            p.grad = torch.zeros_like(p)
        return cls(params)


def lists(user: User) -> list[list[torch.Tensor]]:
    """Parameters and gradients, as tables take them."""
    return [[p.detach() for p in user.params], [p.grad for p in user.params if p.grad is not None]]


def addresses(params: list[torch.nn.Parameter]) -> npt.NDArray[np.int64]:
    """A row for each: numbers, which keep nothing alive."""
    return np.array([[p.data_ptr(), p.grad.data_ptr(), p.numel(), 0] for p in params if p.grad is not None], np.int64)


@functools.cache
def kernel(name: str) -> Any:
    """Loaded when first asked for, which waits for the device."""
    import cupy

    found = cupy.RawKernel(CUDA, name)
    found.compile()
    return found


def launch(name: str, blocks: int, argument: Any) -> None:
    """On the current stream."""
    from pagedopt.kernels.cuda import Stream

    kernel(name)((blocks,), (256,), (argument,), stream=Stream(torch.cuda.current_stream().cuda_stream))


@functools.cache
def on_cpu() -> Callable[[npt.NDArray[np.int64]], None]:
    """The kernel for Numba."""
    import numba

    from pagedopt import kernels

    pointer: Any = kernels.pointer

    @numba.njit
    def subtract(rows):
        for row in rows:
            param = numba.carray(pointer(row[0]), row[2], np.float32)
            grad = numba.carray(pointer(row[1]), row[2], np.float32)
            for i in range(row[2]):
                param[i] -= grad[i]

    return subtract


def follow(rows: npt.NDArray[np.int64], device: torch.device) -> Callable[[], None]:
    """Update what lies at these addresses, whatever it is."""
    if device.type == "cpu":
        on_cpu()(rows[:0])
        return functools.partial(on_cpu(), rows)
    table = torch.from_numpy(rows).to(device)
    kernel("listed")
    return lambda: launch("listed", len(rows), table.data_ptr())


def bare(user: User) -> Callable[[], None]:
    """Addresses, and nothing else."""
    return follow(addresses(user.params), user.params[0].device)


def eager(make: Callable[..., Any], user: User) -> Callable[[], None]:
    """An optimizer, which has its parameters."""
    user.optimizer = make(user.params, lr=1.0)
    user.optimizer.step()
    return user.optimizer.step


def captured(make: Callable[..., Any], user: User) -> Callable[[], None]:
    """A graph of a step; of ours, it is asked before a replay, as long as the optimizer is there."""
    eager(make, user)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        user.optimizer.step()

    def replay() -> None:
        if hasattr(user.optimizer, "check_capture"):
            user.optimizer.check_capture()
        graph.replay()

    return replay


SGD = functools.partial(torch.optim.SGD, foreach=True)
#: Of a user, what updates the parameters from then on.
WAYS: dict[str, Callable[[User], Callable[[], None]]] = {
    BARE: bare,
    TORCH: functools.partial(eager, SGD),
    TORCH_GRAPH: functools.partial(captured, SGD),
    OURS: functools.partial(eager, PagedSGD),
    OURS_GRAPH: functools.partial(captured, PagedSGD),
}
