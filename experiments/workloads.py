"""The models whose optimizer step is measured, and the optimizers that take it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedopt import PagedAdamW

Step = Callable[[], object]
Shapes = Sequence[tuple[int, ...]]
#: Different from the defaults, and the same for everyone.
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gpt2_shapes(
    vocabulary: int = 50257, context: int = 1024, width: int = 768, layers: int = 12
) -> list[tuple[int, ...]]:
    """The 148 parameters of GPT-2 124M, in the order of Hugging Face's ``GPT2LMHeadModel`` (output layer tied).

    >>> import math
    >>> len(gpt2_shapes()), sum(map(math.prod, gpt2_shapes()))
    (148, 124439808)
    """
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    layer = [
        *norm, (width, 3 * width), (3 * width,), (width, width), (width,),
        *norm, (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), (context, width), *layer * layers, *norm]


@dataclass(frozen=True)
class Work:
    """Parameters to step over.

    Attributes:
        bytes_each: what one update must move per parameter, read and written.
        tolerance: largest relative error of an update against float64 that counts as right.
    """

    name: str
    shapes: Shapes
    dtype: torch.dtype
    bytes_each: int
    tolerance: float

    @property
    def numel(self) -> int:
        """Parameters in all."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def parameters(self, device: torch.device, grads: Sequence[torch.Tensor] | None = None) -> list[torch.nn.Parameter]:
        """The same random parameters every time, with random gradients, or those given."""
        generator = torch.Generator(device=device).manual_seed(1)
        found = []
        for i, shape in enumerate(self.shapes):
            value = torch.empty(shape, device=device).normal_(0, 0.02, generator=generator).to(self.dtype)
            grad = torch.empty(shape, device=device).normal_(0, 1e-3, generator=generator).to(self.dtype)
            parameter = torch.nn.Parameter(value)
            parameter.grad = grads[i] if grads is not None else grad
            found.append(parameter)
        return found


@dataclass(frozen=True)
class Contender:
    """An optimizer bound to parameters of its own, with ``done`` steps behind it."""

    step: Step
    done: int = 0


Build = Callable[[list[torch.nn.Parameter]], Contender]


def ours(**options: Any) -> Build:
    """PagedAdamW."""
    return lambda params: Contender(PagedAdamW(params, **HYPER, **options).step)


def theirs(**options: Any) -> Build:
    """torch.optim.AdamW."""
    return lambda params: Contender(torch.optim.AdamW(params, **HYPER, **options).step)


def compiled(params: list[torch.nn.Parameter]) -> Contender:
    """torch.compile of the foreach step, as torch's tutorial on compiled optimizers does it (lr in a tensor)."""
    hyper = {**HYPER, "lr": torch.tensor(HYPER["lr"], device=params[0].device)}
    optimizer = torch.optim.AdamW(params, **hyper, foreach=True, capturable=params[0].is_cuda)

    @torch.compile(fullgraph=False)
    def step() -> None:
        optimizer.step()

    return Contender(step)


def graphed(params: list[torch.nn.Parameter]) -> Contender:
    """A CUDA graph of the capturable fused step."""
    optimizer = torch.optim.AdamW(params, **HYPER, fused=True, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    warm = 2
    with torch.cuda.stream(side):
        for _ in range(warm):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return Contender(graph.replay, warm)


def bitsandbytes(name: str) -> Build:
    """An optimizer of bitsandbytes."""

    def build(params: list[torch.nn.Parameter]) -> Contender:
        from bitsandbytes import optim  # type: ignore[import-not-found]

        return Contender(getattr(optim, name)(params, **HYPER).step)

    return build


def torchao_8bit(params: list[torch.nn.Parameter]) -> Contender:
    """AdamW8bit of torchao: less state, so fewer bytes than the others move."""
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

    return Contender(AdamW8bit(params, **HYPER).step)


def outside(left_out: list[str]) -> dict[str, Build]:
    """Rivals from other packages, as far as they are installed."""
    wanted: dict[str, tuple[str, Build]] = {
        "bitsandbytes AdamW32bit": ("bitsandbytes", bitsandbytes("AdamW32bit")),
        "bitsandbytes PagedAdamW32bit": ("bitsandbytes", bitsandbytes("PagedAdamW32bit")),
        "torchao AdamW8bit": ("torchao", torchao_8bit),
    }
    missing = sorted({package for package, _ in wanted.values() if importlib.util.find_spec(package) is None})
    left_out += [f"{package}: not installed" for package in missing]
    return {name: build for name, (package, build) in wanted.items() if package not in missing}


class Reference:
    """``torch.optim.AdamW`` in float64 over the smallest tensors and the largest, for contenders to be held to."""

    STEPS = 4
    LARGEST = 8_000_000  # parameters, without the largest tensor's

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        *order, last = sorted(range(len(params)), key=lambda i: params[i].numel())
        total = 0
        self.chosen = [last]
        for i in order:
            total += params[i].numel()
            if total > self.LARGEST:
                break
            self.chosen.append(i)
        self.before = [params[i].detach().double() for i in self.chosen]
        values = [torch.nn.Parameter(value.clone()) for value in self.before]
        for value, i in zip(values, self.chosen, strict=True):
            grad = params[i].grad
            assert grad is not None
            value.grad = grad.double()
        optimizer = torch.optim.AdamW(values, **HYPER, foreach=True)
        for _ in range(self.STEPS):
            optimizer.step()
        self.after = [v.detach() for v in values]

    def error(self, params: Sequence[torch.nn.Parameter], contender: Contender) -> float:
        """‖update - exact update‖ / ‖exact update‖ after four steps of a contender that was just built."""
        for _ in range(self.STEPS - contender.done):
            contender.step()
        wrong, exact = 0.0, 0.0
        for i, after, before in zip(self.chosen, self.after, self.before, strict=True):
            wrong += float((params[i].detach().double() - after).square().sum())
            exact += float((after - before).square().sum())
        return float((wrong / exact) ** 0.5)


@contextlib.contextmanager
def freed(device: torch.device) -> Any:
    """Give GPU memory back to the driver afterwards: managed memory is refused beyond a quarter of what is free."""
    try:
        yield
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
