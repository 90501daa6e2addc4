"""Is an iteration of FSDP2 over two GPUs as fast as with torch's fused AdamW?

Answer: yes: 0.97 of its time over two H200s, as the step of the shards takes half as long as torch's.

Two processes, each with a GPU of its own (on a CPU: over gloo), train three stacks of transformer layers: with
PagedAdamW, all state on the device; with PagedAdamW, all state away; with torch's fused AdamW.  They take turns,
iteration by iteration, on the same batches; an iteration is forward, backward, step and zero_grad, from a barrier until
the GPU is idle, as the first of the processes sees it.
"""

from __future__ import annotations

import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.child import Child
from experiments.clock import series
from experiments.columns import spread
from experiments.lab import Page, Row, Rows, Run
from experiments.works.models import HYPER
from experiments.works.training import Mark
from pagedopt import PagedAdamW

# --- what one of several processes does that train a model with FSDP2: iterations of two optimizers in turn

OURS, AWAY, FUSED = "PagedAdamW", "PagedAdamW, all away", "torch fused"
#: Copies up and down at once, in all processes at the same time: what pages that are away can travel at.
LINK = "link"
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    OURS: PagedAdamW,
    AWAY: functools.partial(PagedAdamW, device_budget=0),
    FUSED: lambda params, **hyper: torch.optim.AdamW(params, fused=True, **hyper),
}
#: Seconds until a process that waits for another gives up.
WAIT = 60


def iterations(
    rank: int, world: int, device: str, store: str, sizes: dict[str, int], warmup: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row per contender: times (µs) of iterations and of the steps in them, the losses of the warm-up, bytes away.
    A last one of the link, on GPUs.

    Args:
        rank, world: of this process, and how many there are; each has a GPU of its own, if ``device`` is ``cuda``.
        device: ``cuda`` or ``cpu``.
        store: a file through which they find each other.
        sizes: ``width``, ``layers``, ``batch`` and ``tokens`` (in each process).
        warmup, rounds: iterations of each contender that are not timed, and that are.
    """
    here = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=timedelta(seconds=WAIT),
    )  # fmt: skip
    trainings = {name: Training(kind, here, sizes) for name, kind in KINDS.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"iterations": [], "steps": [], "losses": []} for name in KINDS}
    for number in range(warmup + rounds):
        order = list(trainings) if number % 2 else list(trainings)[::-1]
        for name in order:
            loss, whole, step = trainings[name].iteration(number)
            if number < warmup:
                found[name]["losses"].append(loss)
            else:
                found[name]["iterations"].append(whole)
                found[name]["steps"].append(step)
    count = sum(p.numel() for p in trainings[OURS].model.parameters())
    for name, times in found.items():
        yield {"case": name, "parameters": count, "away": trainings[name].away(), **times}
    if device == "cuda":
        yield {"case": LINK, **both_ways(here, warmup, rounds)}
    dist.barrier()
    dist.destroy_process_group()


def both_ways(device: torch.device, warmup: int, rounds: int) -> dict[str, Any]:
    """Times (µs) of copies of ``bytes`` up and as many down at once, while the other processes do the same."""
    from experiments.works.link import Link

    link, times = Link(device, 1 << 28), []
    for number in range(warmup + rounds):
        dist.barrier()
        torch.cuda.synchronize()
        begin = Mark(device)
        link.both()
        end = Mark(device)
        torch.cuda.synchronize()
        if number >= warmup:
            times.append(end.since(begin))
    return {"times": times, "bytes": link.nbytes}


class Training:
    """A stack of transformer layers over several processes, in bfloat16 over shards in float32, and its optimizer."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], device: torch.device, sizes: dict[str, int]) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # all of it takes a second, and lists of
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # experiments import this file

        width, self.device, self.sizes = sizes["width"], device, sizes
        how: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "device": device}
        torch.manual_seed(3)
        layer = functools.partial(torch.nn.TransformerEncoderLayer, width, max(1, width // 128), 4 * width, **how)
        self.model: Any = torch.nn.Sequential(*(layer() for _ in range(sizes["layers"])))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.model, self.model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        # At the learning rate of toys a stack so deep diverges; infinities would be quicker to multiply.
        self.optimizer = kind(self.model.parameters(), **{**HYPER, "lr": 1e-6})

    def iteration(self, number: int) -> tuple[float, float, float]:
        """The loss, and microseconds of forward, backward and step together, and of the step alone."""
        generator = torch.Generator(self.device).manual_seed(1000 * number + dist.get_rank())
        shape = self.sizes["batch"], self.sizes["tokens"], self.sizes["width"]
        x = torch.randn(shape, generator=generator, device=self.device)
        wait = torch.cuda.synchronize if self.device.type == "cuda" else (lambda: None)
        dist.barrier()
        wait()
        begin = time.perf_counter()
        loss = (self.model(x).float() - x).square().mean()
        loss.backward()
        before = Mark(self.device)
        self.optimizer.step()
        after = Mark(self.device)
        self.optimizer.zero_grad()
        wait()
        return float(loss), 1e6 * (time.perf_counter() - begin), after.since(before)

    def away(self) -> int:
        """Bytes of state in this process that a budget sent away."""
        if not isinstance(self.optimizer, PagedAdamW):
            return 0
        near = "device" if self.device.type == "cuda" else "host"
        places = self.optimizer.memory_report().by_place
        return sum(nbytes for place, nbytes in places.items() if place != near)


# --- the question

MEASURES = ("kernels", "launch", "tables", "optim", "paging", "placements")
PROCESSES = GPUS = 2
TURNS = "turns"
#: Seconds until a process is killed.
LIMIT = 120
#: 1.01 billion parameters; 2,048 tokens in each process.
FULL = {"width": 2048, "layers": 20, "batch": 4, "tokens": 512}
TOY = {"width": 16, "layers": 2, "batch": 2, "tokens": 8}
#: Losses of the warm-up may differ by so much: bfloat16 makes a rounding of a weight one of its own.
ALIKE = 2e-2


def measure(run: Run) -> Iterator[Row]:
    """Rows for iterations, and for the steps in them: times of ours and torch's (µs), ours over torch's by turns.

    Raises:
        RuntimeError: a process failed, or the contenders do not learn alike.
    """
    there = torch.cuda.device_count()
    if run.device.type == "cuda" and there < PROCESSES:
        run.leave_out(f"FSDP2 over {PROCESSES} GPUs: there is {there}")
        return
    warmup, rounds = run.size((5, 40), (2, 3))
    with tempfile.TemporaryDirectory(prefix="pagedopt-group-") as folder:
        store = str(Path(folder) / "store")
        children = [
            Child(iterations, rank, PROCESSES, run.device.type, store, run.size(FULL, TOY), warmup, rounds, limit=LIMIT)
            for rank in range(PROCESSES)
        ]
        found = [Rows(child) for child in children]
    for rank, child in enumerate(children):
        if child.ended:
            raise RuntimeError(f"process {rank} {child.ended}")
    (theirs,) = found[0].where(case=FUSED)
    for link in found[0].where(case=LINK):
        yield {"kind": LINK, "bytes": link["bytes"], "time": series(link["times"], "GPU")}
    for case in (OURS, AWAY):
        (ours,) = found[0].where(case=case)
        check_losses(ours["losses"], theirs["losses"])
        for what, clock in (("iterations", "wall"), ("steps", "GPU" if run.device.type == "cuda" else "wall")):
            ratios = [one / other for one, other in zip(ours[what], theirs[what], strict=True)]
            samples = {"ours": ours[what], "theirs": theirs[what], "ratio": ratios}
            times = {name: series(values, clock) for name, values in samples.items()}
            yield {
                "kind": TURNS,
                "what": what,
                "case": case,
                "parameters": ours["parameters"],
                "away": ours["away"],
                **times,
            }


def check_losses(ours: Sequence[float], theirs: Sequence[float]) -> None:
    """Compare the losses of both contenders.

    Raises:
        RuntimeError: they are not the same ones.
    """
    if not all(math.isclose(one, other, rel_tol=ALIKE) for one, other in zip(ours, theirs, strict=True)):
        raise RuntimeError(f"the losses of {OURS} are {ours}, those of {FUSED} {theirs}")


def derive(rows: Rows) -> Rows:
    """Steps with the floor of their bytes away: these, up and down at once, at the rate of the link."""
    link = rows.first(kind=LINK)
    pace = link["time"]["median"] / link["bytes"] if link else None
    away = [row.get("what") == "steps" and row["away"] for row in rows]
    clock = link and link["time"]["clock"]
    return Rows(
        {**row, "floor": nbytes * pace, "clock": clock} if nbytes and pace else row
        for row, nbytes in zip(rows, away, strict=True)
    )


def report(page: Page, rows: Rows) -> None:
    """Tables and what is held to a limit."""
    page.table("FSDP2 over two processes, {parameters:,} parameters", rows.where(kind=TURNS), {"what": "what",
        "ours": "case", "state away in each process, bytes": lambda row: f"{row['away']:,}",
        "ours, µs (p10 to p90)": spread("ours"), f"{FUSED}, µs": spread("theirs"),
        "ours over theirs, in turn": spread("ratio"), "turns": lambda row: f"{row['ratio']['n']}",
        "floor of the bytes away, µs": "floor"})  # fmt: skip
    page.bar("an iteration of FSDP2, all state on the devices, over that with torch fused",
        rows.where(what="iterations", case=OURS), "ratio", "≤ 1.05 x")  # fmt: skip
