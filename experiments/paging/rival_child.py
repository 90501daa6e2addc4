"""One package's optimizers with state on the host, measured in a process of its own; prints a JSON line per result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from experiments.bench import Case
from experiments.paging.problem import MOST_MANAGED, Run, push_out
from experiments.paging.rivals import ALONE, BACK, MARK, RIVAL, RIVAL_8BIT, SAME, WARM
from experiments.workloads import HYPER, Contender, Reference

#: bitsandbytes never frees its managed memory: four optimizers' worth, two of them of a quarter of the size.
TAKEN = 2.5


def show(name: str, times: dict[str, Any], **more: Any) -> None:
    """Print results at once: what comes next may end the process."""
    for what, wall in times.items():
        print(MARK + json.dumps({"name": name, "what": what, "wall": wall, "gpu": None, **more}), flush=True)


def error_of(run: Run, make: Callable[[list[torch.nn.Parameter]], Callable[[], object]]) -> float:
    """How far four steps are from float64, as a share of the update."""
    params = run.parameters()
    reference = Reference(params)
    return reference.error(params, Contender(make(params)))


def bitsandbytes(run: Run) -> None:
    """Paged state from the host and back to the host: a step, then its pages pushed out; and the pieces alone."""
    from bitsandbytes import functional, optim  # type: ignore[import-not-found]

    needed, most = TAKEN * run.state_bytes, min(MOST_MANAGED, torch.cuda.mem_get_info(run.device)[0] // 4)
    if needed > most:
        raise MemoryError(f"bitsandbytes would take {needed:,.0f} bytes of managed memory; {most:,} are allowed")
    for name, kind in ((RIVAL, optim.PagedAdamW32bit), (RIVAL_8BIT, optim.PagedAdamW8bit)):
        manager = functional.GlobalPageManager.get_instance()
        error = error_of(run, lambda params, kind=kind: kind(params, **HYPER).step)  # type: ignore[misc]
        manager.paged_tensors.clear()
        run.free()
        params = run.parameters()
        optimizer = kind(params, **HYPER)
        optimizer.step()
        places = [(t.data_ptr(), t.nbytes) for t in manager.paged_tensors]

        def out(places: list[tuple[int, int]] = places) -> None:
            push_out(places, run.device)

        def step_and_out(step: Callable[[], object] = optimizer.step, out: Callable[[], None] = out) -> None:
            step()
            out()

        out()
        more = {"error": error, "paged_bytes": sum(nbytes for _, nbytes in places)}
        show(name, run.wall([Case(SAME, step_and_out)], rounds=8, seconds=3.0), **more)
        show(name, run.wall([Case(ALONE, optimizer.step, before=out)], rounds=6, seconds=2.0), **more)
        # A step brings the pages back, outside of the clock.
        show(name, run.wall([Case(BACK, out, before=optimizer.step)], rounds=6, seconds=2.0), **more)
        show(name, run.wall([Case(WARM, optimizer.step)], rounds=6, seconds=1.0), **more)
        manager.paged_tensors.clear()
        del optimizer, params, places, out, step_and_out
        run.free()


def torchao(run: Run) -> None:
    """State, and the update itself, on the CPU; gradients go down during a backward that costs next to nothing."""
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    def make(params: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
        grads = [p.grad for p in params if p.grad is not None]
        optimizer = CPUOffloadOptimizer(list(params), torch.optim.AdamW, fused=True, **HYPER)

        def backward_and_step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(list(params), grads)
            optimizer.step()

        return backward_and_step

    error = error_of(run, make)
    run.free()
    step = make(run.parameters())
    times = run.wall([Case("backward and step", step)], rounds=8, seconds=3.0)
    show("torchao CPUOffloadOptimizer", times, error=error, threads=torch.get_num_threads())


def main(arguments: Sequence[str]) -> int:
    """``rival_child PACKAGE DEVICE QUICK``"""
    package, device, quick = arguments
    torch.cuda.set_device(torch.device(device))
    run = Run(torch.device(device), bool(int(quick)), Console(stderr=True))
    {"bitsandbytes": bitsandbytes, "torchao": torchao}[package](run)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
