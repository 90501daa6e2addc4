"""Sums over the processes that hold the shards of DTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ...tables.shards import is_sharded


class Mesh(NamedTuple):
    """A mesh of processes, over which sums of shards are added.

    Attributes:
        mesh: torch's ``DeviceMesh``.
        dims: its dimensions along which a parameter is sharded.
    """

    mesh: Any
    dims: tuple[int, ...]

    def counts(self, p: torch.Tensor) -> bool:
        """Return whether this process's part of a DTensor counts: of replicas only the first does."""
        whole: Any = p
        replicated = [dim for dim in self.dims if whole.placements[dim].is_replicate()]
        coordinate = self.mesh.get_coordinate()
        return coordinate is not None and all(coordinate[dim] == 0 for dim in replicated)

    def reduce(self, sums: torch.Tensor) -> None:
        """Add sums of all processes, in place: a collective call for each dimension along which there are shards."""
        import torch.distributed as dist

        for dim in self.dims:
            dist.all_reduce(sums, group=self.mesh.get_group(dim))


def meshes_of(params: Iterable[torch.Tensor]) -> dict[Any, Mesh]:
    """Return the meshes of parameters that are DTensors, by torch's, in the same order in all processes."""
    dims: dict[Any, set[int]] = {}
    for p in params:
        if is_sharded(p):
            # Not is_shard(): torch's _StridedShard, of FSDP2 over tensor parallel, answers False.
            sharded = (dim for dim, placement in enumerate(p.placements) if not placement.is_replicate())
            dims.setdefault(p.device_mesh, set()).update(sharded)
    return {mesh: Mesh(mesh, tuple(sorted(found))) for mesh, found in dims.items()}


__all__ = ["Mesh", "meshes_of"]
