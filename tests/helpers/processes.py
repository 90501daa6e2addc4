"""Functions that several processes of one group call together: gloo on CPUs, NCCL where each has a GPU of its own.

The processes are forks of the server (``children.py``), so each is new and starts at once.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from children import server
from often import MARKS

#: Seconds until a process that waits for others gives up, and until all are ended.
WAIT, LIMIT = 60, 100


def on_devices(world: int, often: bool = True) -> pytest.MarkDecorator:
    """``device``: the CPU, and a GPU for each of ``world`` processes, skipped with the reason where there are fewer;
    ``often``: on the CPU it is no long test."""
    there = torch.cuda.device_count()
    lacking = pytest.mark.skipif(there < world, reason=f"needs {world} GPUs for NCCL, there are {there}")
    cuda = pytest.param("cuda", marks=[pytest.mark.gpu, lacking])
    return pytest.mark.parametrize("device", [pytest.param("cpu", marks=MARKS[often]), cuda])


def together(function: str, world: int, device: str, *arguments: Any) -> list[Any]:
    """Call ``function(device, *arguments)`` in ``world`` new processes of one group.

    Args:
        function: ``"module.name"``: only they load what it needs.
        world: how many.
        device: ``cpu`` or ``cuda``.
        arguments: what can be pickled.

    Returns:
        what each returned, by rank, tensors on the CPU.

    Raises:
        AssertionError: one of them failed, with what it said; or they were not done in time.
    """
    context = server()
    with tempfile.TemporaryDirectory(prefix="pagedopt-group-") as name:
        folder = Path(name)
        group = [
            context.Process(target=_member, args=(function, rank, world, device, folder, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in group:
            process.start()
        end = time.monotonic() + LIMIT
        for process in group:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(group) if process.is_alive()]
        for process in group:
            process.kill()
            process.join()
        said = [file.read_text() for file in sorted(folder.glob("failed*"))]
        assert not said, "\n".join(said)
        assert not late, f"processes {late} of {world} were not done after {LIMIT} s"
        ends = [process.exitcode for process in group]
        assert not any(ends), f"the processes ended with {ends}"
        return [torch.load(folder / f"result{rank}", weights_only=False, map_location="cpu") for rank in range(world)]


def _member(function: str, rank: int, world: int, device: str, folder: Path, arguments: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch.distributed, about itself
    code = 1
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method=f"file://{folder}/group", rank=rank, world_size=world, timeout=timedelta(seconds=WAIT),
        )  # fmt: skip
        module, name = function.rsplit(".", 1)
        result = getattr(importlib.import_module(module), name)(device, *arguments)
        torch.save(result, folder / f"result{rank}")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"failed{rank}").write_text(f"process {rank} of {world}:\n{traceback.format_exc()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process whose group is broken may not end by itself
