"""How many launches torch makes of a list of tensors: its batching, with the constants of the torch that is installed.

    limits = installed()
    limits.step(numels, FOREACH_ADAMW), limits.launches(numels, depth=3)

``multi_tensor_apply`` (``ATen/native/cuda/MultiTensorApply.cuh``) passes addresses by value.  A launch takes so many
tensors, fewer the more lists there are, and so many blocks, each of a chunk of 65,536 elements: what a struct of 4 KB
holds, or one of 32 KB where torch was built so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HEADER = Path("ATen", "native", "cuda", "MultiTensorApply.cuh")
#: (lists, whether each tensor has a scalar of its own) of the kernels of a step, none of which is on the host.
Kernels = Sequence[tuple[int, bool]]
#: mul, lerp, mul, addcmul, sqrt, div, add, addcdiv.
FOREACH_ADAMW: Kernels = ((1, False), (2, False), (1, False), (3, False), (2, False), (1, True), (1, False), (3, True))
#: param -= lr * grad; with momentum: mul, add, add.
FOREACH_SGD: Kernels = ((2, False),)
FOREACH_MOMENTUM: Kernels = ((1, False), (2, False), (2, False))


@dataclass(frozen=True)
class Limits:
    """What one launch carries.

    Attributes:
        tensors: at most so many, by number of lists less one.
        blocks: at most so many chunks, likewise.
        tensors_with_scalars: as ``tensors``, where each tensor has a scalar.
        chunk: elements of a chunk.
        source: the file, and for which CUDA it was read.
    """

    tensors: tuple[int, ...]
    blocks: tuple[int, ...]
    tensors_with_scalars: tuple[int, ...]
    chunk: int
    source: str = ""

    def launches(self, numels: Iterable[int], depth: int, scalars: bool = False) -> int:
        """Launches over ``depth`` lists of tensors with so many elements.

        A launch is full when its last tensor is whole, or when it has all its blocks: a tensor that is cut there is the
        first of the next launch.
        """
        most = (self.tensors_with_scalars if scalars else self.tensors)[depth - 1]
        most_blocks = self.blocks[depth - 1]
        launches = tensors = blocks = 0
        for numel in numels:
            left = -(-numel // self.chunk)
            tensors += left > 0
            while left:
                taken = min(left, most_blocks - blocks)
                left, blocks = left - taken, blocks + taken
                if blocks == most_blocks or (tensors == most and not left):
                    launches, blocks, tensors = launches + 1, 0, int(left > 0)
        return launches + (blocks > 0)

    def step(self, numels: Sequence[int], kernels: Kernels) -> int:
        """Launches of several kernels over the same lists."""
        return sum(self.launches(numels, depth, scalars) for depth, scalars in kernels)


def parsed(text: str, cuda: int, source: str = "") -> Limits:
    """The constants in the header's text, as a compiler with this ``CUDART_VERSION`` (13000: CUDA 13.0) reads them.

    Raises:
        RuntimeError: they are not where they used to be.
    """

    def chosen(found: re.Match[str]) -> str:
        return found[2] if cuda >= int(found[1]) else found[3]

    # Without the branches for another CUDA; conditions that say nothing of it are kept.
    condition = r"#if[^\n]*CUDART_VERSION\s*>=\s*(\d+)[^\n]*\n(.*?)#else[^\n]*\n(.*?)#endif"
    text = re.sub(condition, chosen, text, flags=re.DOTALL)

    def numbers(name: str) -> tuple[int, ...]:
        found = re.search(rf"\b{name}\s*(?:\[\d*\])?\s*=\s*\{{?\s*([\d,\s]+?)\s*\}}?\s*;", text)
        if found is None:
            raise RuntimeError(f"{source or HEADER}: there is no {name} in it")
        return tuple(int(number) for number in found[1].replace(",", " ").split())

    names = ("depth_to_max_tensors", "depth_to_max_blocks", "depth_to_max_tensors_scalarlist")
    tensors, blocks, scalars = map(numbers, names)
    return Limits(tensors, blocks, scalars, numbers("kChunkSize")[0], source)


@functools.cache
def installed(cuda: int | None = None) -> Limits:
    """The limits of the installed torch, by default as it was built; a torch without CUDA counts as of CUDA 13.0.

    Raises:
        OSError: it came without its headers.
        RuntimeError: they have changed.
    """
    if cuda is None:
        major, minor = (torch.version.cuda or "13.0").split(".")[:2]
        cuda = 1000 * int(major) + 10 * int(minor)
    source = f"{HEADER.name} of torch {torch.__version__}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    return parsed((Path(torch.__file__).parent / "include" / HEADER).read_text(), cuda, source)
