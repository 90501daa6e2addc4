"""The C structs are the NumPy dtypes: size of each, width and order of its fields, checked by the compiler itself.

Not every NVRTC has ``__builtin_offsetof`` (12.9 and 13.2 do not).  Where the widths of the fields add up to the size of
the struct there is no padding, and their order says where each is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import nvrtc_support
import pytest

from pagedopt.kernels import nvrtc, source
from pagedopt.tables.layout import BLOCK, CHUNK, HEADER, row_dtype
from pagedopt.transports.by_value import ARGUMENT_BYTES, StructTransport
from pagedopt.transports.transport import TABLE_AT

STRUCTS: dict[str, np.dtype] = {
    "Header": HEADER,
    "Chunk": CHUNK,
    "TableAt": TABLE_AT,
    **{f"Row<{k}>": row_dtype(k) for k in (1, 2, 3, 5, 8)},
    **{f"TableOf<{n}>": StructTransport(0, n).dtype for n in ARGUMENT_BYTES},
}


def assertions(structs: Mapping[str, np.dtype] = STRUCTS) -> str:
    """static_asserts made from the NumPy side, of structs without padding."""
    lines = [f'static_assert(BLOCK == {BLOCK}, "BLOCK");', "template <class T> constexpr T zero{};"]
    for name, dtype in structs.items():
        lines.append(f'static_assert(sizeof({name}) == {dtype.itemsize}, "size of {name}");')
        for field, (inner, _) in dtype.fields.items():
            lines.append(f'static_assert(sizeof({name}::{field}) == {inner.itemsize}, "width of {name}::{field}");')
        for field, behind in itertools.pairwise(_by_offset(dtype)):
            places = f"(const void*)&zero<{name}>.{field} < (const void*)&zero<{name}>.{behind}"
            lines.append(f'static_assert({places}, "{name}::{field} before {behind}");')
    return "\n".join(lines)


def _by_offset(dtype: np.dtype) -> list[str]:
    return sorted(dtype.fields, key=lambda field: dtype.fields[field][1])


@pytest.mark.parametrize("dtype", STRUCTS.values(), ids=STRUCTS)
def test_no_struct_has_padding(dtype: np.dtype) -> None:
    assert_no_padding(dtype)


def assert_no_padding(dtype: np.dtype) -> None:
    """Else widths and order would not say where a field is."""
    end = 0
    for field in _by_offset(dtype):
        inner, offset = dtype.fields[field][:2]
        assert offset == end
        end = offset + inner.itemsize
    assert end == dtype.itemsize


def compile_with(extra: str, text: str | None = None) -> None:
    nvrtc_support.nvrtc()
    nvrtc.compile_cuda(f"{text or source.text(None)}\n{extra}\n", (), "sm_90")


def test_structs_are_laid_out_alike_on_both_sides() -> None:
    compile_with(assertions())


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("long long count;", "int count;"),
        ("long long rows; ", "long long pad, rows; "),
        ("long long row, offset;", "long long offset, row;"),
        ("long long row, offset;", "int row; long long offset;"),
        ("word address[LISTS];\n    long long numel;", "long long numel;\n    word address[LISTS];"),
        ("long long set;", "int set;"),
        ("const word* words;\n    Header header;", "Header header;\n    const word* words;"),
        ("word words[(BYTES - sizeof(Header)) / sizeof(word)];", "word words[BYTES / sizeof(word)];"),
        ("constexpr int BLOCK = 512;", "constexpr int BLOCK = 256;"),
    ],
)
def test_a_struct_that_differs_is_noticed(line: str, broken: str) -> None:
    text = source.text(None)
    assert line in text, "the source has changed: plant this bug anew"
    with pytest.raises(nvrtc.CompileError, match="static assertion"):
        compile_with(assertions(), text.replace(line, broken))


@pytest.mark.parametrize("nbytes", ARGUMENT_BYTES)
def test_an_argument_by_value_fits_what_cuda_takes(nbytes: int) -> None:
    assert StructTransport(0, nbytes).dtype.itemsize <= nbytes
    assert nbytes - StructTransport(0, nbytes).dtype.itemsize < 8, "a word more would fit"
