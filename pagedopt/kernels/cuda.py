"""CUDA kernels, loaded on a device and launched there: compiled at first use, then cached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..system.driver import Calls, extension_with_driver
from ..system.graphs import Node, Nodes
from ..tables.layout import BLOCK
from ..tables.storage import StorageFormat
from . import source
from .nvrtc import cached_cubin
from .source import KernelRule

#: Threads of a block of ``prologue.cu``.
PROLOGUE_BLOCK = 128
#: ``PrologueAt`` there, the argument of :func:`prologue_kernel`; to be passed without fields.
PROLOGUE_AT = np.dtype(
    [
        ("table", np.uint64), ("inputs", np.uint64), ("rows", np.int64), ("stride", np.int64), ("seed_at", np.int64),
        ("factor", np.uint64),
    ]
)  # fmt: skip
#: The driver's ``CUlaunchConfig``: grid, block, shared memory, stream, and attributes, of which there are none.
_LAUNCH_CONFIG = np.dtype(
    [
        ("grid", np.uint32, 3), ("block", np.uint32, 3), ("shared", np.uint32), ("stream", np.uint64),
        ("attributes", np.uint64), ("count", np.uint32),
    ],
    align=True,
)  # fmt: skip
#: ``TotalAt`` of ``sums.cu``, the argument of :func:`total_kernel`; to be passed without fields.
TOTAL_AT = np.dtype([("sums", np.uint64), ("count", np.int64), ("total", np.uint64), ("factor", np.uint64)])


class CudaKernel:
    """A compiled kernel on one device: a function of CuPy with one argument, the table.

    Args:
        text: all CUDA text.
        name: the C++ name of the instance.
        device: index of the CUDA device.
        chunks_per_block: how many chunks a thread block takes.
        blocks: the most thread blocks per launch; None: no limit.
        threads: of a thread block.
    """

    def __init__(
        self,
        text: str,
        name: str,
        device: int,
        chunks_per_block: int = 1,
        blocks: int | None = None,
        threads: int = BLOCK,
    ) -> None:
        from ..system.driver import how_to_install, relaxed_capture

        try:
            import cupy
        except ImportError as error:
            raise RuntimeError(f"CUDA tensors need the package CuPy: {how_to_install()}") from error

        major, minor = torch.cuda.get_device_capability(device)
        cubin, symbol = cached_cubin(text, name, f"sm_{major}{minor}")
        module = cupy.cuda.Module()  # a RawModule takes a file, which there may be no place for
        with torch.cuda.device(device), relaxed_capture():
            module.load(cubin)
            self._kernel = module.get_function(symbol)  # keeps the module loaded
        self.chunks_per_block, self.most_blocks, self.threads = chunks_per_block, blocks, threads

    def __call__(self, argument: npt.NDArray[Any], count: int, stream: Stream) -> None:
        """Launch over ``count`` chunks; ``argument`` (an array of size one, best without fields) is passed by value."""
        self._kernel((self.grid(count),), (self.threads,), (argument,), stream=stream)

    def prepared(self, argument: npt.NDArray[Any], count: int, stream: int) -> Callable[[], None]:
        """Return the launch over ``count`` chunks, with the argument as it will be then."""
        if extension_with_driver() is None:
            return functools.partial(self, argument, count, Stream(stream))
        grid, block = (self.grid(count), 1, 1), (self.threads, 1, 1)
        config = np.array([(grid, block, 0, stream, 0, 0)], _LAUNCH_CONFIG)
        pointers = np.array([argument.ctypes.data], np.uint64)
        call = "cuLaunchKernelEx", config.ctypes.data, self.handle, pointers.ctypes.data, 0
        return Calls([call], keeps=(self, config, pointers, argument))

    def add_to(self, nodes: Nodes, argument: npt.NDArray[Any], count: int, behind: Sequence[Node]) -> Node:
        """Add the launch over ``count`` chunks to a CUDA graph, behind other nodes, and return its node."""
        return nodes.kernel(self.handle, self.grid(count), self.threads, argument, behind)

    def grid(self, count: int) -> int:
        """Return the number of thread blocks for ``count`` chunks."""
        blocks = -(-count // self.chunks_per_block)
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)

    @property
    def handle(self) -> int:
        """The driver's ``CUfunction``."""
        return int(self._kernel.ptr)


class Stream:
    """A stream for CuPy, which reads only this attribute."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


@functools.cache
def multi_tensor_kernel(
    rule: KernelRule,
    formats: tuple[StorageFormat, ...],
    threads: int,
    argument_type: str,
    device: int,
    blocks: int | None = None,
    scaled: bool = False,
) -> CudaKernel:
    """Return the kernel for ``rule``, compiled and loaded.

    Args:
        threads: per chunk (see :class:`~pagedopt.tables.layout.Geometry`).
        argument_type: the C++ type of the argument (:func:`~pagedopt.tables.layout.table_type`).
        blocks: the most thread blocks per launch; None: no limit.
        scaled: whether gradients are multiplied by a factor (``factor.cu``).

    Raises:
        CompileError: NVRTC refuses it.
    """
    name = source.instance(rule, formats, threads, argument_type, blocks is not None, scaled)
    return CudaKernel(source.text(rule, formats, scaled=scaled), name, device, BLOCK // threads, blocks)


@functools.cache
def sums_kernel(order: int, form: StorageFormat, threads: int, argument_type: str, device: int) -> CudaKernel:
    """Return the kernel that adds the terms of a norm (order 0: infinity) of each chunk of lists (tensor, sums)."""
    name = source.sums_instance(order, form, threads, argument_type)
    return CudaKernel(source.text(None, kernel="sums.cu"), name, device, BLOCK // threads)


@functools.cache
def total_kernel(device: int) -> CudaKernel:
    """Return the kernel that adds sums in one block; its argument is a :data:`TOTAL_AT`, its count 1."""
    return CudaKernel(source.text(None, kernel="sums.cu"), f"total<{BLOCK}>", device)


@functools.cache
def prologue_kernel(rule: KernelRule, device: int) -> CudaKernel:
    """Return the kernel that computes ``rule``'s uniforms from numbers in memory, compiled and loaded.

    Its argument is a :data:`PROLOGUE_AT`, its count the rows.  ``prologue.cu`` says what lies at the two addresses.

    Raises:
        CompileError: NVRTC refuses it.
    """
    text, name = source.prologue_text(rule), source.prologue_instance(rule)
    return CudaKernel(text, name, device, PROLOGUE_BLOCK, threads=PROLOGUE_BLOCK)
