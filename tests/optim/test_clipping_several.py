"""The norm of shards is that of whole tensors, on every process, empty shards too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from processes import on_devices, together

from tests.optim import clipped_group

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def check(name: str, device: str, world: int) -> None:
    found = together("tests.optim.clipped_group.clipped", world, device, name)
    want, norms = clipped_group.oracle(name)
    for ends, its_norms in found:
        assert its_norms == pytest.approx(norms, rel=1e-14)
        assert its_norms == found[0][1], "each process has the same bits"
        for ours, theirs in zip(ends, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["1-d", "replicas alone"])
@on_devices(2)
def test_shards_of_two_processes(name: str, device: str) -> None:
    check(name, device, 2)


@pytest.mark.parametrize("name", ["2-d", "a process without a part"])
@on_devices(4)
def test_shards_of_a_mesh_of_two_dimensions(name: str, device: str) -> None:
    check(name, device, 4)


@on_devices(2)
def test_a_model_of_fsdp(device: str) -> None:
    for ours, theirs in together("tests.optim.clipped_group.of_fsdp", 2, device):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert ours > 0.01


@functools.cache
def scaled_by_torch(device: str) -> list[Any]:
    return together("tests.optim.clipped_group.scaled", 2, device, None)


@pytest.mark.parametrize("fused", [False, True])
@on_devices(2)
def test_all_processes_skip_what_is_infinite_in_one(fused: bool, device: str) -> None:
    """torch adds ``found_inf`` over the mesh before the step."""
    found = together("tests.optim.clipped_group.scaled", 2, device, fused)
    for (ends, scales, counts), (others, their_scales, their_counts) in zip(
        found, scaled_by_torch(device), strict=True
    ):
        assert (scales, counts) == (their_scales, their_counts)
        assert set(counts) == {4.0}
        for ours, theirs in zip(ends, others, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
