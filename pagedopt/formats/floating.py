"""The formats of plain floating-point numbers, and which one a dtype or a name stands for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
import torch

from .format import Column, ElementFormat, Format, complexified

BFLOAT16 = ElementFormat(
    name="bfloat16",
    columns=(Column("", torch.bfloat16),),
    cuda_type="bfloat16_bits",
    numba_type="_np.uint16",
    numba_load="S(_numbers.from_bfloat16({}))",
    numba_store="_numbers.to_bfloat16(_np.float32({}))",
)
FLOAT16 = ElementFormat(
    name="float16",
    columns=(Column("", torch.float16),),
    cuda_type="half_bits",
    numba_type="_np.uint16",
    numba_load="S(_numbers.from_half({}))",
    numba_store="_numbers.to_half(_np.float32({}))",
)
FLOAT32 = ElementFormat(
    name="float32",
    columns=(Column("", torch.float32),),
    cuda_type="float",
    numba_type="_np.float32",
    numba_load="S({})",
    numba_store="_np.float32({})",
)
FLOAT64 = ElementFormat(
    name="float64",
    columns=(Column("", torch.float64),),
    arithmetic=torch.float64,
    cuda_type="double",
    numba_type="_np.float64",
    numba_load="S({})",
    numba_store="_np.float64({})",
)

#: Formats by name.
FORMATS: dict[str, Format] = {f.name: f for f in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)}
#: Those that are as torch has numbers: a list of such may have any of their dtypes.
NUMBERS: tuple[ElementFormat, ...] = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16)
_OF_DTYPES = {f.dtype: f for f in NUMBERS}
#: NumPy's types of what a parameter has as a single number, its step count among them: read and written in bulk.
SINGLES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}

#: Other words for the names above.
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64",
         "float": "float32", "double": "float64"}  # fmt: skip
_Name = Literal["float32", "bfloat16", "float16", "float64", "fp32", "bf16", "fp16", "half", "fp64", "float", "double"]
#: A format, its name, a dtype, or None for the parameter's own, as torch does; one for all state or one per state name.
OneFormat = _Name | torch.dtype | Format | None
StateFormat = OneFormat | Mapping[str, OneFormat]


def known(dtype: torch.dtype | None) -> bool:
    """Whether kernels take lists of a dtype."""
    return dtype in _OF_DTYPES


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels see of a dtype: of complex numbers those of their parts."""
    return dtype.to_real() if dtype.is_complex else dtype


def of_dtype(dtype: torch.dtype, what: str = "a list") -> ElementFormat:
    """The format of a list of plain numbers; of complex ones that of their parts.

    Raises:
        TypeError: kernels take no such numbers; the text begins with ``what``.
    """
    found = _OF_DTYPES.get(real_dtype(dtype))
    if found is None:
        raise TypeError(f"{what} is {dtype}; supported are {', '.join(map(str, _OF_DTYPES))}")
    return found


def dtype_of_name(name: str, what: str) -> torch.dtype:
    """The dtype that a text names.

    Raises:
        ValueError: there is none; the text begins with ``what``.
    """
    for found in _OF_DTYPES.values():
        if found.name == _full(name):
            return found.dtype
    raise ValueError(f"{what} is {name!r}; there are {', '.join(f.name for f in _OF_DTYPES.values())}")


def check_format(state_format: StateFormat, states: Collection[str] | None = None) -> None:
    """Refuse a format that is not known.

    Args:
        states: the names of state there may be; None: any.

    Raises:
        ValueError: a format is unknown, or does not begin at zero, or its ``encode`` and ``decode`` are not what its
            text does, or one is given for a state that there is not.
        TypeError: something is neither a format nor a name.
    """
    chosen = state_format.values() if isinstance(state_format, Mapping) else [state_format]
    for one in chosen:
        if (isinstance(one, str) and _full(one) not in FORMATS) or (
            isinstance(one, torch.dtype) and one not in _OF_DTYPES
        ):
            raise ValueError(f"state_format is {one!r}; there are {', '.join(FORMATS)}, or None (as the parameter)")
        if one is not None and not isinstance(one, str | torch.dtype | Format):
            a_class = isinstance(one, type) and issubclass(one, Format)
            raise TypeError(
                f"state_format is {one!r}; give a name ({', '.join(FORMATS)}), a dtype, a pagedopt.formats.Format"
                f"{f' (an object: {one.__name__}())' if a_class else ''}, or None"
            )
        if isinstance(one, Format):
            one.check_zeros()
            if isinstance(one, ElementFormat) and one not in NUMBERS:
                from .sample import check_sample  # Numba is loaded for those alone who bring such a format

                check_sample(one)
    if states is None or not isinstance(state_format, Mapping):
        return
    if unknown := [name for name in state_format if name not in states]:
        there = f"there are {', '.join(sorted(states))}" if states else "there is none"
        raise ValueError(f"state_format names the state {', '.join(map(repr, unknown))}; {there}")


def chosen_format(state_format: StateFormat, name: str) -> Format | None:
    """What ``state_format`` says of state ``name``; None: nothing, it is stored as its parameter."""
    one = state_format.get(name) if isinstance(state_format, Mapping) else state_format
    if isinstance(one, torch.dtype):
        return _OF_DTYPES[one]
    return FORMATS[_full(one)] if isinstance(one, str) else one


def _full(name: str) -> str:
    """A name of ``FORMATS`` for a short one."""
    return SHORT.get(name, name)


def format_of(state_format: StateFormat, name: str, param: torch.dtype) -> Format:
    """The format of state ``name`` of a parameter of dtype ``param``, as kernels see it.

    Raises:
        ValueError: the parameter is complex, and there are no complex numbers of that format.
        TypeError: kernels take no parameters of that dtype.
    """
    found = chosen_format(state_format, name)
    if found is None:
        return of_dtype(param, f"state {name!r}")
    if param.is_complex and not (isinstance(found, ElementFormat) and found.dtype.itemsize >= 4):
        raise ValueError(
            f"state_format is {found.name!r} for {name!r} of a parameter of {param}: torch has no complex numbers of "
            "that kind; give 'float32' or None (as the parameter)"
        )
    return found


def columns_of(form: Format, name: str, param: torch.dtype) -> dict[str, Column]:
    """The columns by their keys in state, as they are made for a parameter of dtype ``param``."""
    made = (complexified(column) if param.is_complex else column for column in form.columns)
    return {column.key(name): column for column in made}


__all__ = [
    "FORMATS",
    "OneFormat",
    "StateFormat",
    "check_format",
    "chosen_format",
    "columns_of",
    "dtype_of_name",
    "format_of",
    "known",
    "of_dtype",
    "real_dtype",
]
