"""The CUDA text of a kernel, with its headers and rule included, and the C++ names of its instances."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..tables.storage import StorageFormat

#: Kernels that read or write the factor of gradients.
_WITH_FACTOR = ("prologue.cu", "sums.cu")
#: Threads of a warp, and the elements a thread takes at a time if no format has blocks: 16 bytes of float32.
WARP, WIDTH = 32, 4


@functools.cache
def _file(name: str) -> str:
    body = importlib.resources.files(__package__).joinpath(name).read_text()
    return f'#line 1 "{name}"\n{body}'


def text(
    rule: KernelRule | None,
    formats: Sequence[StorageFormat] = (),
    kernel: str = "multi_tensor_apply.cu",
    scaled: bool = False,
) -> str:
    """Return all CUDA text of ``kernel``, headers included, so that a cache keyed by the text notices every change.

    Args:
        rule, formats: what it is made for.
        kernel: its file.
        scaled: whether its instances may multiply gradients by a factor.
    """
    files = ["device.cuh", "numbers.cuh", "table.cuh"]
    files += [kernel] if kernel not in _WITH_FACTOR else ["factor.cuh", kernel]
    files += [] if all(f.plain for f in formats) else ["philox.cuh", "blocks.cu"]
    parts = [_file(name) for name in (files if not scaled else [*files, "factor.cuh", "factor.cu"])]
    own = {f.cuda_text: f for f in formats if f.cuda_text}
    parts += [f'#line 1 "format {f.name}"\n{body}' for body, f in own.items()]
    if rule is not None:
        parts.append(f'#line 1 "rule {rule.name}"\n{rule.cuda_source()}')
    return "\n".join(parts)


def prologue_text(rule: KernelRule) -> str:
    """Return all CUDA text of the kernel that computes a rule's uniforms."""
    own = f'#line 1 "prologue of rule {rule.name}"\n{rule.prologue_source()}'
    return "\n".join([text(None, kernel="prologue.cu"), own])


def conversions(name: str, cuda_type: str, cuda_text: str, number: str) -> str:
    """Return the text of a kernel ``convert`` that loads an element of a format as ``number`` and stores it."""
    body = f"*x = store_as<element, {number}>(load_as<{number}, element>(*x));"
    kernel = f"using element = {cuda_type};\n__global__ void convert(element* x) {{ {body} }}"
    own = f'#line 1 "format {name}"\n{cuda_text}\n{kernel}'
    return "\n".join([_file("device.cuh"), _file("numbers.cuh"), own])


def arithmetic(formats: Sequence[StorageFormat]) -> torch.dtype:
    """Return the dtype a kernel computes in: float64 if any list asks for it, else float32."""
    return torch.float64 if torch.float64 in [f.arithmetic for f in formats] else torch.float32


def _number(dtype: torch.dtype) -> str:
    """Return the C++ type of float32 or float64."""
    return "double" if dtype is torch.float64 else "float"


def width(formats: Sequence[StorageFormat]) -> int:
    """Return how many elements a thread takes at a time: a warp then covers whole blocks, and a thread part of one.

    Beyond WIDTH, a thread's elements do not follow each other, and lie in one block only if that is all a warp covers.

    Raises:
        ValueError: there is no such number for these blocks.
    """
    blocks = {f.block: f.name for f in formats if f.block > 1}
    if not blocks:
        return WIDTH
    least, most = min(blocks), max(blocks)
    if most > WARP * least or (most > WARP * WIDTH and least < most):
        raise ValueError(
            f"formats {blocks[least]!r} and {blocks[most]!r} have blocks of {least} and {most} elements. In one launch "
            f"no block may have more than {WARP} times the elements of another, and blocks of more than {WARP * WIDTH} "
            "must all have the same size"
        )
    return max(most // WARP, min(WIDTH, least))


def instance(
    rule: KernelRule,
    formats: Sequence[StorageFormat],
    threads: int,
    argument_type: str,
    small_grid: bool = False,
    scaled: bool = False,
) -> str:
    """Return the C++ name of an instance of the multi-tensor kernel, whose argument is an ``argument_type``."""
    kernel = "multi_tensor_apply_small_grid" if small_grid else "multi_tensor_apply"
    number, functor = _number(arithmetic(formats)), rule.functor
    if scaled:
        functor, argument_type = f"Scaled<{functor}>", f"Factored<{argument_type}>"
    if all(f.plain for f in formats):
        types = ", ".join(f.cuda_type for f in formats)
        return f"{kernel}<{number}, {functor}, {threads}, {argument_type}, {types}>"
    types = ", ".join(f"Plain<{f.cuda_type}>" if f.plain else f.cuda_type for f in formats)
    kernel = kernel.replace("apply", "apply_blocks")
    return f"{kernel}<{number}, {functor}, {threads}, {width(formats)}, {argument_type}, {types}>"


def prologue_instance(rule: KernelRule) -> str:
    """Return the C++ name of the instance of the kernel that computes a rule's uniforms."""
    return f"prologue<{rule.prologue}>"


def sums_instance(order: int, form: StorageFormat, threads: int, argument_type: str) -> str:
    """Return the C++ name of an instance of the kernel that adds the terms of each chunk, of a plain format."""
    return f"sums<{order}, {threads}, {argument_type}, {form.cuda_type}>"


class KernelRule(Protocol):
    """A rule as kernels see it (:class:`pagedopt.rules.Rule` is one); hashable, as the key of kernel caches.

    Attributes:
        name: for people.
        functor, prologue: the names of the structs in :meth:`cuda_source` and :meth:`prologue_source`.
        uniform_count: numbers per set of hyperparameters.
        reads, writes: indices of the lists it reads, and of those it overwrites.
    """

    name: str
    functor: str
    prologue: str
    writes: tuple[int, ...]

    @property
    def uniform_count(self) -> int: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    def cuda_source(self) -> str:
        """Return a struct with ``apply(in, u, out)`` for one element, and masks of the lists it reads and writes."""

    def prologue_source(self) -> str:
        """Return a struct with ``compute(in, u)`` for one set of hyperparameters, and what ``prologue.cu`` asks for."""

    def numba_lines(
        self, load: Sequence[str], store: Sequence[str], stored: Sequence[Callable[[str], str]] = ()
    ) -> list[str]:
        """Return Python statements for one element.

        ``load[i]`` reads from list i, ``store[i]`` stores ``{}`` there, ``stored[i]`` makes the text of a number that
        of the number as list i has it.
        """

    def __hash__(self) -> int: ...
