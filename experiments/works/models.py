"""Models whose optimizer step is measured, and optimizers that are bound to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shapes = Sequence[tuple[int, ...]]
#: Names of who steps, and of what steps are held to.
OURS, FUSED, COPY = "PagedAdamW", "torch fused", "copy of its bytes"
FOREACH, LOOP, GRAPH = "torch foreach", "torch loop", "CUDA graph of torch fused"
COMPILED = "torch.compile of foreach"
#: Bytes of two moments in 8 bits, with scales that belong to 256 numbers.
BITS_8 = 2 * (1 + 4 / 256)
#: Different from the defaults, and the same for everyone.
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gpt2_shapes(vocabulary: int = 50257, context: int = 1024, width: int = 768, layers: int = 12) -> Shapes:
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


#: A layer of Llama 3.1 70B: query, output, key, value, gate, up, down, two norms; 855.7 M parameters.
LLAMA_LAYER: Shapes = (
    (8192, 8192), (8192, 8192), (1024, 8192), (1024, 8192), (28672, 8192), (28672, 8192), (8192, 28672),
    (8192,), (8192,),
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Parameters to step over; by default in float32, with two moments of AdamW in float32.

    Attributes:
        bytes_each: what one update must move per parameter, read and written.
        tolerance: largest relative error of an update against float64 that counts as right.
    """

    name: str
    shapes: Shapes
    dtype: torch.dtype = torch.float32
    bytes_each: float = 28
    tolerance: float = 5e-5

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


Step = Callable[[], object]


@dataclass(frozen=True)
class Bound:
    """An optimizer bound to parameters of its own, with ``done`` steps behind it."""

    step: Step
    done: int = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Whose method the step is; None of a graph, or of what is compiled."""
        found = getattr(self.step, "__self__", None)
        return found if isinstance(found, torch.optim.Optimizer) else None


Build = Callable[[list[torch.nn.Parameter]], Bound]
