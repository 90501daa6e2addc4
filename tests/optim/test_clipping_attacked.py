"""What an adversary found in clipping: norms set at an odd moment, and shards that were taken for replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.optim import clip as meshes
from pagedopt.optim.plan import Step


def test_a_norm_that_is_set_while_a_step_runs_holds_from_the_next_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running step ends behind it, and leaves its record: that of a step which does not clip."""
    params = [torch.nn.Parameter(torch.zeros(4))]
    params[0].grad = torch.full((4,), 10.0)
    optimizer = PagedSGD(params, lr=1.0)
    run = Step.run

    def run_and_set(step: Step) -> Any:
        optimizer.max_grad_norm = 1e-3
        return run(step)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", run_and_set)
        optimizer.step()
    before = params[0].detach().clone()
    for _ in range(3):
        optimizer.step()
    assert (params[0].detach() - before).norm() <= 3.1e-3
    assert optimizer.grad_norm is not None


def test_the_last_norm_outlives_another_one_to_clip_to() -> None:
    params = [torch.nn.Parameter(torch.zeros(4))]
    params[0].grad = torch.ones(4)
    optimizer = PagedAdamW(params, fused=True, max_grad_norm=1.0)
    optimizer.step()
    optimizer.max_grad_norm = None
    optimizer.grad_scale = torch.ones(())
    optimizer.step()
    assert optimizer.grad_norm == 2.0


def test_a_tensor_sharded_twice_counts_in_each_process() -> None:
    """torch's ``_StridedShard``, of FSDP2 over tensor parallel, says that it is no shard."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    class Coordinates:
        def get_coordinate(self) -> list[int]:
            return [1, 0]

    class Sharded:
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        device_mesh = Coordinates()

    class Replicated(Sharded):
        placements = (Replicate(), Shard(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "is_sharded", lambda _: True)
        mesh = next(iter(meshes.meshes_of([Sharded()]).values()))  # type: ignore[list-item]
    assert mesh.dims == (0, 1)
    assert mesh.counts(Sharded())  # type: ignore[arg-type]
    assert not mesh.counts(Replicated())  # type: ignore[arg-type]
