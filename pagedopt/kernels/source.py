"""The CUDA text of a kernel, headers and rule joined in, and the C++ names of its instances."""

from __future__ import annotations

import functools
import importlib.resources

import torch

from .rule import KernelRule

#: Names of dtypes in the CUDA text.
CUDA_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half_bits",
    torch.bfloat16: "bfloat16_bits",
}


@functools.cache
def _file(name: str) -> str:
    body = importlib.resources.files(__package__).joinpath(name).read_text()
    return f'#line 1 "{name}"\n{body}'


def text(rule: KernelRule | None, kernel: str = "multi_tensor_apply.cu") -> str:
    """The whole CUDA text of ``kernel``, headers joined in (a cache keyed by text then sees every change)."""
    parts = [_file(name) for name in ("device.cuh", "numbers.cuh", "table.cuh", kernel)]
    if rule is not None:
        parts.append(f'#line 1 "rule {rule.name}"\n{rule.cuda_source()}')
    return "\n".join(parts)


def arithmetic(dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """The dtype a kernel computes in: float64 if any list has it, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def table_type(argument_bytes: int) -> str:
    """The C++ type of a kernel's argument: a table by value in so many bytes; 0: one in memory."""
    return f"TableOf<{argument_bytes}>" if argument_bytes else "TableAt"


def instance(
    rule: KernelRule, dtypes: tuple[torch.dtype, ...], threads: int, kind: str, small_grid: bool = False
) -> str:
    """The C++ name of one variant of the multi-tensor kernel, whose argument is a ``kind`` (:func:`table_type`)."""
    kernel = "multi_tensor_apply_small_grid" if small_grid else "multi_tensor_apply"
    types = ", ".join(CUDA_TYPES[d] for d in dtypes)
    number = CUDA_TYPES[arithmetic(dtypes)]
    return f"{kernel}<{number}, {rule.functor}, {threads}, {kind}, {types}>"


def norm_instance(stage: str, order: int, dtype: torch.dtype, number: torch.dtype, threads: int, kind: str) -> str:
    """The C++ name of one variant of a stage of the norm."""
    return f"norm_{stage}<{CUDA_TYPES[number]}, {order}, {threads}, {kind}, {CUDA_TYPES[dtype]}>"
