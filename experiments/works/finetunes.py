"""Ways to train all parameters of a model on one card: ours, torch's, bitsandbytes', torchao's and optimi's."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.clock import series
from experiments.pictures import BLUE, GRAY, ORANGE, PURPLE
from experiments.works.models import HYPER
from experiments.works.states import push_out
from pagedopt import PagedAdamW

#: Updates that bfloat16 does not round away, nor too large for a model that begins.
LEARNING = {**HYPER, "lr": 1e-4}
#: Managed memory is at most 8 GiB; or more, where so much of the device is free besides.
MOST_MANAGED, BESIDE = 8 << 30, 60 << 30
#: Bytes of state that bitsandbytes has in 8 bits for each parameter.
EIGHT_BITS = 2
#: What ends an iteration.
Step = Callable[[], object]
Make = Callable[[Iterable[nn.Parameter]], Any]


@dataclass(frozen=True)
class Way:
    """An optimizer, and where in an iteration it steps.

    Attributes:
        name: in tables and pictures.
        start: of a model; returns what is called behind each backward.
        needs: a package.
    """

    name: str
    start: Callable[[nn.Module], Step]
    color: str
    needs: str = ""


def behind(make: Make, overlap: str | None = None) -> Callable[[nn.Module], Step]:
    """One optimizer, which steps behind the backward, or for which the model is attached."""

    def start(model: nn.Module) -> Step:
        optimizer = make(model.parameters())
        if overlap:
            optimizer.attach(model, overlap=overlap)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    return start


def in_hooks(make: Make, after: Callable[[Any], None] | None = None) -> Callable[[nn.Module], Step]:
    """An optimizer for each parameter, which steps as soon as the gradient is there, and drops that."""

    def start(model: nn.Module) -> Step:
        optimizers: dict[Tensor, Any] = {p: make([p]) for p in model.parameters()}

        def hook(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()
            if after:
                after(optimizers[p])

        for p in optimizers:
            p.register_post_accumulate_grad_hook(hook)
        return lambda: None

    return start


def ours(params: Iterable[nn.Parameter], **options: Any) -> PagedAdamW:
    """State in 8 bits, all of it on the host."""
    return PagedAdamW(params, state_format="int8", device_budget=0, **options, **LEARNING)


def bitsandbytes(params: Iterable[nn.Parameter]) -> Any:
    """Paged state in 8 bits."""
    return importlib.import_module("bitsandbytes.optim").PagedAdamW8bit(params, **LEARNING)


def with_room(start: Callable[[nn.Module], Step]) -> Callable[[nn.Module], Step]:
    """Only where managed memory is small, or the device has room for all of it and for much besides."""

    def checked(model: nn.Module) -> Step:
        wanted = EIGHT_BITS * sum(p.numel() for p in model.parameters())
        if wanted > MOST_MANAGED and (free := torch.cuda.mem_get_info()[0]) < wanted + BESIDE:
            raise MemoryError(
                f"{wanted:,} bytes of managed memory, with {free:,} free; --layers makes the model smaller"
            )
        return start(model)

    return checked


def out(optimizer: Any) -> None:
    """Push the pages of bitsandbytes' state to the host."""
    paged = [t for state in optimizer.state.values() for t in state.values() if getattr(t, "is_paged", False)]
    if paged:
        push_out([(t.data_ptr(), t.nbytes) for t in paged], torch.device("cuda", torch.cuda.current_device()))


def torchao(params: Iterable[nn.Parameter]) -> Any:
    """Gradients go to the CPU as they come; state and the update are there."""
    offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return offload(params, torch.optim.AdamW, offload_gradients=True, fused=True, **LEARNING)


def optimi(model: nn.Module) -> Step:
    """One optimizer that steps in hooks; for bfloat16 it has a third number, which makes sums exact (Kahan's)."""
    package = importlib.import_module("optimi")
    optimizer = package.AdamW(model.parameters(), gradient_release=True, **LEARNING)
    package.prepare_for_gradient_release(model, optimizer)
    return lambda: None


def torch_fused(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """State in bfloat16, as the parameters."""
    return torch.optim.AdamW(params, fused=True, **LEARNING)


def drawn(params: Iterable[nn.Parameter]) -> PagedAdamW:
    """Parameters are rounded at random."""
    return ours(params, param_rounding="stochastic")


def plus_8(params: Iterable[nn.Parameter]) -> PagedAdamW:
    """Parameters have 8 more bits, on the host beside state."""
    return ours(params, param_format="bfloat16+8")


RESIDENT, BACKWARD, PLUS_8 = "resident", "backward", "plus_8"
WAYS: dict[str, Way] = {
    RESIDENT: Way("torch fused", behind(torch_fused), GRAY),
    "torch_hooks": Way("torch fused, one a parameter, in hooks", in_hooks(torch_fused), GRAY),
    "host": Way("PagedAdamW, 8 bits on the host", behind(ours), BLUE),
    "forward": Way('PagedAdamW, attach(overlap="forward")', behind(ours, "forward"), BLUE),
    BACKWARD: Way('PagedAdamW, attach(overlap="backward")', behind(ours, BACKWARD), BLUE),
    "stochastic": Way("the same, parameters rounded at random", behind(drawn, BACKWARD), BLUE),
    PLUS_8: Way('the same, param_format="bfloat16+8"', behind(plus_8, BACKWARD), BLUE),
    "hooks": Way("PagedAdamW, one a parameter, in hooks", in_hooks(ours), BLUE),
    "torchtune": Way("torchtune's recipe", with_room(in_hooks(bitsandbytes)), ORANGE, "bitsandbytes"),
    "torchtune_out": Way(
        "torchtune's recipe, pages pushed out", with_room(in_hooks(bitsandbytes, out)), ORANGE, "bitsandbytes"
    ),
    "bitsandbytes": Way("bitsandbytes PagedAdamW8bit", with_room(behind(bitsandbytes)), ORANGE, "bitsandbytes"),
    "torchao": Way("torchao CPUOffloadOptimizer", behind(torchao), PURPLE, "torchao"),
    "optimi": Way("optimi, gradient release", optimi, PURPLE, "optimi"),
}


@contextlib.contextmanager
def timed_hooks() -> Iterator[Callable[[], float]]:
    """Hooks behind gradients that are registered inside are timed: µs of the host in them since the last call."""
    register, taken = torch.Tensor.register_post_accumulate_grad_hook, [0.0]

    def registered(tensor: Tensor, hook: Callable[[Tensor], None]) -> Any:
        @functools.wraps(hook)
        def timed(p: Tensor) -> None:
            begin = time.perf_counter()
            try:
                hook(p)
            finally:
                taken[0] += 1e6 * (time.perf_counter() - begin)

        return register(tensor, timed)

    def since() -> float:
        found, taken[0] = taken[0], 0.0
        return found

    torch.Tensor.register_post_accumulate_grad_hook = registered  # type: ignore[method-assign]
    try:
        yield since
    finally:
        torch.Tensor.register_post_accumulate_grad_hook = register  # type: ignore[method-assign]


class Finetune:
    """A model that is trained in one way, waited for after each iteration.

    Attributes:
        losses: of all iterations so far.
    """

    def __init__(self, model: nn.Module, way: Way, data: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> None:
        with timed_hooks() as self._hooks:
            self._step = way.start(model)
        self.model, self.losses, self._data, self._device = model, list[Tensor](), data, device

    def iterate(self) -> dict[str, float]:
        """An iteration: its time, what the host spent in hooks, and in the call of ``step()`` (µs)."""
        self._hooks()
        begin = time.perf_counter()
        loss = self.model(*next(self._data))
        loss.backward()
        stepped = time.perf_counter()
        self._step()
        step = time.perf_counter() - stepped
        self.wait()
        self.losses.append(loss.detach())
        return {"time": 1e6 * (time.perf_counter() - begin), "hooks": self._hooks(), "step": 1e6 * step}

    def times(self, warmup: int, timed: tuple[int, int], seconds: float) -> dict[str, Any]:
        """Series of iterations."""
        for _ in range(warmup):
            self.iterate()
        found, begin = list[dict[str, float]](), time.perf_counter()
        while len(found) < timed[0] or (len(found) < timed[1] and time.perf_counter() - begin < seconds):
            found.append(self.iterate())
        clocks = {"time": "wall", "hooks": "host", "step": "host"}
        return {name: series([each[name] for each in found], clock) for name, clock in clocks.items()}

    def memory(self) -> dict[str, int | None]:
        """Bytes of the device at the peak: those taken by the driver's count, looked at in one more iteration behind
        each gradient and at its end, and those that torch has allocated."""
        if self._device.type != "cuda":
            return {"taken": None, "allocated": None}
        free, total = torch.cuda.mem_get_info()

        def look(_: Tensor | None = None) -> None:
            nonlocal free
            free = min(free, torch.cuda.mem_get_info()[0])

        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(look)
        self.iterate()
        look()
        return {"taken": total - free, "allocated": torch.cuda.max_memory_allocated()}

    def wait(self) -> None:
        """Until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
