"""What trains a model over several processes: how each wraps a model, makes its optimizer, saves and loads both.

A function of a module calls these in every process of a group; what they return is that process's own.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dicts
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from pagedopt import PagedAdamW

Model = torch.nn.Module
#: Nothing at its default; eps keeps updates of tiny gradients from jumping with their rounding.
HYPER: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}


class Net(torch.nn.Module):
    """Seven rows over two processes are uneven, one row leaves a process without any."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.last = torch.nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


_no_sync = operator.methodcaller("no_sync")


@contextlib.contextmanager
def _no_reduction(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _device_of(model: Model) -> torch.device:
    return next(model.parameters()).device


def _file(folder: Path, rank: int | None = None) -> Path:
    """Of this process, or of another one."""
    return folder.with_suffix(f".{dist.get_rank() if rank is None else rank}.pt")


class Setup:
    """How a model is trained over several processes; by default a checkpoint is torch.distributed.checkpoint's.

    Attributes:
        accumulates: a block around the backward of all but the last part of a batch; None: a batch is one part.
        clips: what clips gradients; None: nothing does.
    """

    accumulates: Callable[[Any], contextlib.AbstractContextManager[None]] | None = staticmethod(contextlib.nullcontext)
    clips: Callable[[Any], None] | None = staticmethod(_clip)

    def wrap(self, model: Model, device: str) -> Model:
        return model

    def finish(self, model: Model, device: str) -> Model:
        """What is to be done with a model that has its optimizer."""
        return model

    def share(self) -> tuple[int, int]:
        """Which of how many shares of a batch this process has."""
        return dist.get_rank(), dist.get_world_size()

    def make(self, kind: Any, model: Model, **options: Any) -> Any:
        return kind(model.parameters(), **HYPER, **options)

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def inner(self, optimizer: Any) -> list[torch.optim.Optimizer]:
        """Those that hold state."""
        return [optimizer]

    def both(self, model: Model, optimizer: Any) -> dict[str, Any]:
        return {
            "model": dicts.get_model_state_dict(model),
            "optimizer": dicts.get_optimizer_state_dict(model, optimizer),
        }

    def save(self, model: Model, optimizer: Any, folder: Path) -> None:
        checkpoint.save(self.both(model, optimizer), checkpoint_id=folder)

    def load(self, model: Model, optimizer: Any, folder: Path) -> None:
        both = self.both(model, optimizer)
        checkpoint.load(both, checkpoint_id=folder)
        dicts.set_model_state_dict(model, both["model"])
        dicts.set_optimizer_state_dict(model, optimizer, both["optimizer"])


class Whole(Setup):
    """Every process has all of it, or what nobody else has, and saves that by itself."""

    def states(self, model: Model, optimizer: Any) -> Any:
        return [one.state_dict() for one in self.inner(optimizer)]

    def save(self, model: Model, optimizer: Any, folder: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizers": self.states(model, optimizer)}, _file(folder))

    def load(self, model: Model, optimizer: Any, folder: Path) -> None:
        saved = torch.load(_file(folder), weights_only=True, map_location=_device_of(model))
        model.load_state_dict(saved["model"])
        for one, state in zip(self.inner(optimizer), saved["optimizers"], strict=True):
            self.load_state(model, one, state)

    def load_state(self, model: Model, optimizer: Any, state: Any) -> None:
        optimizer.load_state_dict(state)


class Ddp(Whole):
    """``options`` are those of ``DistributedDataParallel``."""

    accumulates = staticmethod(_no_sync)

    def __init__(self, **options: Any) -> None:
        self.options = options

    def wrap(self, model: Model, device: str) -> Model:
        return DistributedDataParallel(model, **self.options)


class Zero(Ddp):
    """Its ``load_state_dict`` puts tensors of its own into the state, and numbers on the CPU: ours brings them back for
    ``fused``, torch's fused step on a GPU refuses them."""

    def make(self, kind: Any, model: Model, **options: Any) -> Any:
        options["fused"] = kind is PagedAdamW
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=kind, **HYPER, **options)

    def inner(self, optimizer: Any) -> list[torch.optim.Optimizer]:
        return [optimizer.optim]

    def states(self, model: Model, optimizer: Any) -> Any:
        optimizer.consolidate_state_dict(0)
        return [optimizer.state_dict()] if dist.get_rank() == 0 else []

    def load(self, model: Model, optimizer: Any, folder: Path) -> None:
        saved = torch.load(_file(folder, 0), weights_only=True, map_location=_device_of(model))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizers"][0])
        if not isinstance(optimizer.optim, PagedAdamW):
            for group in (*optimizer.param_groups, *optimizer.optim.param_groups):
                group["fused"] = False  # that of ours came with what was saved
        elif not optimizer.optim.store.budget.everything:
            optimizer.optim.set_device_budget(optimizer.optim.store.budget.said)


class InBackward(Ddp):
    """An optimizer for each parameter, stepped as soon as there is its gradient, and in a thread of the group's own
    under DDP, where torch does that on GPUs alone."""

    accumulates = None
    clips = None

    def wrap(self, model: Model, device: str) -> Model:
        return model

    def finish(self, model: Model, device: str) -> Model:
        return DistributedDataParallel(model) if device == "cuda" else model

    def make(self, kind: Any, model: Model, **options: Any) -> Any:
        _apply_optimizer_in_backward(kind, model.parameters(), {**HYPER, **options})
        return [one for p in model.parameters() for one in p._in_backward_optimizers]

    def step(self, optimizer: Any) -> None:
        pass

    def inner(self, optimizer: Any) -> list[torch.optim.Optimizer]:
        return list(optimizer)


class Fsdp1(Whole):
    """Parameters are views of what FSDP has flattened."""

    accumulates = staticmethod(_no_sync)

    @staticmethod
    def clips(model: Any) -> None:
        model.clip_grad_norm_(0.5)

    def wrap(self, model: Model, device: str) -> Model:
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=where)

    def states(self, model: Model, optimizer: Any) -> Any:
        """On CPUs each process's own: there torch's function returns views of one buffer for all of a parameter's state
        (torch 2.13, _optim_utils.py, ``gathered_tensor``), and exp_avg is what exp_avg_sq is."""
        if _device_of(model).type == "cpu":
            return super().states(model, optimizer)
        return [FullyShardedDataParallel.optim_state_dict(model, optimizer)]

    def load_state(self, model: Model, optimizer: Any, state: Any) -> None:
        if _device_of(model).type == "cuda":
            state = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(state)


class Fsdp2(Setup):
    """``options`` are those of ``fully_shard``."""

    accumulates = staticmethod(_no_reduction)

    def __init__(self, **options: Any) -> None:
        self.options = options

    def mesh(self, device: str) -> DeviceMesh:
        return init_device_mesh(device, (dist.get_world_size(),))

    def wrap(self, model: Any, device: str) -> Model:
        return self.shard(model, self.mesh(device))

    def shard(self, model: Any, mesh: DeviceMesh) -> Model:
        for part in (model.first, model.norm, model.last, model):
            fully_shard(part, mesh=mesh, **self.options)
        return model


class Hybrid(Fsdp2):
    """A replica in each half of the processes, sharded within it."""

    def mesh(self, device: str) -> DeviceMesh:
        return init_device_mesh(device, (2, 2), mesh_dim_names=("replicas", "shards"))


def _in_parallel(model: Model, mesh: DeviceMesh) -> Model:
    plan = {
        "first": ColwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "last": RowwiseParallel(input_layouts=Shard(0)),
    }
    return parallelize_module(model, mesh, plan)


class Tensors(Setup):
    """Tensor parallel: the norm's gradients are sums that each process has a share of."""

    def share(self) -> tuple[int, int]:
        return 0, 1

    def wrap(self, model: Model, device: str) -> Model:
        return _in_parallel(model, init_device_mesh(device, (dist.get_world_size(),)))


class Both(Fsdp2):
    """FSDP2 over tensor parallel."""

    def share(self) -> tuple[int, int]:
        return dist.get_rank() // 2, 2

    def wrap(self, model: Model, device: str) -> Model:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "tensors"))
        return self.shard(_in_parallel(model, mesh["tensors"]), mesh["data"])


SETUPS: dict[str, Setup] = {
    "DDP": Ddp(),
    "DDP, gradients in buckets": Ddp(gradient_as_bucket_view=True),
    "ZeroRedundancyOptimizer": Zero(),
    "_apply_optimizer_in_backward": InBackward(),
    "FSDP1": Fsdp1(),
    "FSDP2": Fsdp2(),
    # Forward and backward in bfloat16, gradients summed in float32.
    "FSDP2 in bfloat16": Fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    # Shards, gradients and state on the CPU, whatever computes.
    "FSDP2, offloaded": Fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available())),
    "FSDP2, replicas of shards": Hybrid(),
    "tensor parallel": Tensors(),
    "FSDP2 over tensor parallel": Both(),
}
