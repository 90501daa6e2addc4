"""Tables in flight on a GPU: streams, memory that is refused, and kernels of one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gpu_support import launching
from support import F32, assert_updated, lists_for, on, scalars_for

from pagedopt import DeviceTable, Sweep
from pagedopt.rules import RULES
from pagedopt.system import driver
from pagedopt.transports.choose import TRANSPORTS
from pagedopt.transports.ring import RING_SIZE

pytestmark = launching()

RINGS = ("managed", "mapped", "memcpy")
ADAMW, MUL = RULES["adamw"], RULES["mul_scalar"]
FLOATS = (F32,) * 4
SIZES = (5, 0, 3000, 4097, 77)
DELAY = 400_000_000  # cycles; a fifth of a second or more, and the host needs a millisecond


@pytest.fixture(autouse=True)
def _idle() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def warmed(sweep: Sweep, scalars: dict[str, float]) -> Sweep:
    """Compiled, loaded, and every place of the ring allocated, so that what follows only launches."""
    for _ in range(RING_SIZE):
        sweep.table.host.rows_changed()
        sweep.run(scalars)
    torch.cuda.synchronize()
    return sweep


def still_busy() -> bool:
    """Whether the current stream has work left, asked without waiting."""
    return not torch.cuda.current_stream().query()


@pytest.mark.exclusive
@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_the_current_stream_is_used(name: str) -> None:
    """Gradients appear late on a side stream; a launch on any other stream would read the old ones."""
    before = lists_for(ADAMW, SIZES, FLOATS)
    after, late = on("cuda", before), on("cuda", before)[1]
    sweep = warmed(Sweep(ADAMW, on("cuda", before), transport=name), scalars_for(ADAMW))
    sweep.refresh(after)
    for grad in after[1]:
        grad.fill_(-3)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY)
        for grad, value in zip(after[1], late, strict=True):
            grad.copy_(value)
        sweep.run(scalars_for(ADAMW))
        assert still_busy(), "the host has waited, or the delay is too short to show anything"
    side.synchronize()
    assert_updated(ADAMW, before, after, scalars_for(ADAMW))


@pytest.mark.exclusive
@pytest.mark.parametrize("name", RINGS)
def test_the_host_runs_ahead_of_a_busy_device(name: str) -> None:
    """As many steps as the ring holds are launched without waiting for the first."""
    x = torch.ones(100, device="cuda")
    sweep = warmed(Sweep(MUL, [[x]], transport=name), {"scalar": 1.0})
    torch.cuda._sleep(DELAY)
    first = torch.cuda.Event()
    first.record()
    for step in range(RING_SIZE - 1):
        sweep.run({"scalar": 2.0 + step})
    assert not first.query(), "the host has waited for the device"
    torch.cuda.synchronize()
    assert (x == math.prod(2.0 + step for step in range(RING_SIZE - 1))).all()


def test_a_refused_allocation_leaves_the_device_usable() -> None:
    device = torch.cuda.current_device()
    with pytest.raises(MemoryError, match="managed memory asked for on cuda"):
        driver.allocate_managed(1 << 50, device)
    with pytest.raises(driver.CudaError) as error:
        driver.allocate_mapped(1 << 50, device)
    assert error.value.code.startswith("CUDA_ERROR_")
    assert (torch.ones(1000, device="cuda") * 2).sum().item() == 2000
    x = torch.ones(100, device="cuda")
    Sweep(MUL, [[x]]).run({"scalar": 2.0})
    assert (x == 2).all()


SCALE = r"""
extern "C" __global__ void scale(const unsigned long long* rows, float by) {
    const unsigned long long* row = rows + 4 * blockIdx.x;  // two lists: two addresses, elements, 0
    const float* from = (const float*)row[0];
    float* to = (float*)row[1];
    for (long long i = threadIdx.x; i < (long long)row[2]; i += blockDim.x) to[i] = by * from[i];
}
"""


@pytest.mark.parametrize("name", RINGS)
def test_a_kernel_of_ones_own_reads_the_addresses(name: str) -> None:
    import cupy

    kernel = cupy.RawKernel(SCALE, "scale")
    sources = [torch.randn(n, device="cuda") for n in (5, 3000, 77)]
    targets = [torch.zeros(n, device="cuda") for n in (5, 3000, 77)]
    table = DeviceTable([sources, targets], writes=[1], transport=name)

    def run(by: float) -> None:
        with table.rows_on_device() as rows:
            kernel((len(table),), (128,), (np.uint64(rows), np.float32(by)))

    fresh = [torch.zeros_like(t) for t in targets]
    torch.cuda._sleep(DELAY)
    for step in range(2 * RING_SIZE):
        table.refresh([None, (targets, fresh)[step % 2]])
        run(2.0 + step)
    torch.cuda.synchronize()
    for source, *written in zip(sources, targets, fresh, strict=True):
        assert all(torch.equal(t, (2 * RING_SIZE + i) * source) for i, t in enumerate(written))
