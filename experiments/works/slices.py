"""The puzzlers' work, newly written: slices of one tensor through LayerNorm and tanh, all through Linear and ReLU.

After «Fusion» on gpupuzzlers.com: 16 slices of 1,024 x 256, float32, inference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch

from experiments.lab import Run
from experiments.works.graph import captured
from experiments.works.norm_tanh import NormTanh

SPLIT, COMBINED, LIST = "split_stack", "combined", "pointer list"
HELD, LIST_GRAPH = f"{LIST}, table held", f"{LIST}, CUDA graph"
GRAPH, OVERHEAD = "split_stack, CUDA graph", "split_stack, reduce-overhead"
COMPILED, COMBO = {name: f"{name}, compiled" for name in (SPLIT, COMBINED)}, "combo kernels"
WIDE = f"{COMPILED[SPLIT]}, {COMBO} of up to 64"
SLICES, DIM = 16, 256
Way = Callable[[], torch.Tensor]


class Slices:
    """The input, in slices of ``batch`` rows, what goes over it, and the ways to do it."""

    def __init__(self, batch: int, device: torch.device, slices: int = SLICES) -> None:
        self.shape = (slices, batch, DIM)
        self.x = torch.empty(slices * batch * DIM, device=device)
        self.norm = torch.nn.LayerNorm(DIM, eps=0, elementwise_affine=False)
        self.linear = torch.nn.Linear(DIM, 1, device=device).requires_grad_(False)  # inference: no backward pass
        self._apart: list[torch.Tensor] = []
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Other input and weights, in the same memory."""
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.rand(self.x.shape, generator=generator))
        for weight in self.linear.parameters():
            weight.copy_((2 * torch.rand(weight.shape, generator=generator) - 1) * DIM**-0.5)
        for apart, part in zip(self._apart, self.x.view(self.shape), strict=False):
            apart.copy_(part)

    def split_stack(self, x: torch.Tensor) -> torch.Tensor:
        """Slice by slice, as one writes it first."""
        parts = x.view(self.shape).unbind()
        return torch.relu(self.linear(torch.stack([torch.tanh(self.norm(part)) for part in parts])))

    def combined(self, x: torch.Tensor) -> torch.Tensor:
        """All slices at once, which a view of one tensor allows."""
        return torch.relu(self.linear(torch.tanh(self.norm(x.view(self.shape)))))

    def exact(self) -> torch.Tensor:
        """In float64."""
        double = copy.copy(self)
        double.linear = copy.deepcopy(self.linear).double()
        return double.combined(self.x.double())

    def way(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Way:
        """A function of the input, as something to call."""
        return lambda: function(self.x)

    def pointer_list(self, held: bool = False) -> Way:
        """One launch over separate tensors into one, no stack; then the same Linear and ReLU."""
        self._apart = self._apart or [part.clone() for part in self.x.view(self.shape)]
        norm_tanh = NormTanh(self._apart, held)
        return lambda: torch.relu(self.linear(norm_tanh()))


def backend(run: Run) -> str:
    """Inductor; toys are traced, and do without its compiler, which takes a minute where nothing is cached."""
    return "eager" if run.quick else "inductor"


def compiled(function: Callable[..., Any], backend: str = "inductor", **how: Any) -> Callable[..., Any]:
    """Compiled for the sizes it is called with."""
    made: Callable[..., Any] = torch.compile(function, backend=backend, dynamic=False, **how)
    return made


def combo(wide: bool = False) -> dict[str, Any]:
    """Options that fuse kernels side by side.

    Raises:
        NotImplementedError: ``wide`` is asked of a torch that puts 8 into one kernel and no more.
    """
    options: dict[str, Any] = {"combo_kernels": True}
    if wide:
        from torch._inductor import config

        if not hasattr(config, "combo_kernel_max_num_nodes"):
            raise NotImplementedError(f"torch {torch.__version__} has no combo_kernel_max_num_nodes: 8 is the most")
        options["combo_kernel_max_num_nodes"] = 64
    return options


def forget() -> None:
    """Let torch.compile forget what it made: it keeps eight versions of a function, and no more."""
    torch._dynamo.reset()


def makers(work: Slices, run: Run) -> dict[str, Callable[[], Way]]:
    """Name → what makes a way; on a CPU there are no graphs, combo kernels and kernels of ours."""

    def with_compiler(name: str, **how: Any) -> Way:
        return work.way(compiled(functions[name], **how))

    functions = {SPLIT: work.split_stack, COMBINED: work.combined}
    found: dict[str, Callable[[], Way]] = {name: partial(work.way, function) for name, function in functions.items()}
    found |= {COMPILED[name]: partial(with_compiler, name, backend=backend(run)) for name in functions}
    if run.device.type == "cuda":
        found |= {LIST: work.pointer_list, HELD: partial(work.pointer_list, held=True)}
        found[GRAPH] = lambda: captured(work.way(work.split_stack))
        found[LIST_GRAPH] = lambda: captured(work.pointer_list(held=True))
    if run.device.type == "cuda" and not run.quick:
        found |= {f"{COMPILED[name]}, {COMBO}": partial(with_compiler, name, options=combo()) for name in functions}
        found[WIDE] = lambda: with_compiler(SPLIT, options=combo(wide=True))
        found[OVERHEAD] = partial(with_compiler, SPLIT, mode="reduce-overhead")
    return found


def made(work: Slices, run: Run, names: Collection[str] = ()) -> Iterator[tuple[str, Way, float]]:
    """The ways that work here, called often enough to be ready, and the largest error of each against float64."""
    exact = work.exact()
    for name, make in makers(work, run).items():
        if not names or name in names:
            with run.attempt(f"{name}, {work.shape[1]:,} rows a slice", (Exception,)):
                way = make()
                for _ in range(3):  # reduce-overhead: run, record, replay
                    found = way()
                yield name, way, float((found - exact).abs().max())
