"""The formats of plain floating-point numbers, by dtype and by name, and the option ``state_format``."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from ..system.warn import warn_once
from .choice import Choice, Moment, State
from .format import Column, ElementFormat, Format, complexified
from .int8 import INT8
from .names import Name, full_name
from .sixteen import REMAINDERS


def _format(dtype: torch.dtype, cuda: str, numba: str, load: str, store: str) -> ElementFormat:
    """Return the format of plain numbers of a dtype."""
    return ElementFormat(
        name=str(dtype).removeprefix("torch."),
        columns=(Column("", dtype),),
        arithmetic=torch.float64 if dtype is torch.float64 else torch.float32,
        cuda_type=cuda,
        numba_type=f"_np.{numba}",
        numba_load=f"S({load})",
        numba_store=store,
    )


FLOAT32 = _format(torch.float32, "float", "float32", "{}", "_np.float32({})")
FLOAT64 = _format(torch.float64, "double", "float64", "{}", "_np.float64({})")
FLOAT16 = _format(torch.float16, "half_bits", "uint16", "_numbers.from_half({})", "_numbers.to_half(_np.float32({}))")
BFLOAT16 = _format(
    torch.bfloat16, "bfloat16_bits", "uint16", "_numbers.from_bfloat16({})", "_numbers.to_bfloat16(_np.float32({}))"
)

#: Formats by name.
FORMATS: dict[str, Format] = {f.name: f for f in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)}
#: The formats of torch's own numbers: a list in one of them may have any of their dtypes.
NUMBERS: tuple[ElementFormat, ...] = (FLOAT32, FLOAT64, FLOAT16, BFLOAT16)
_OF_DTYPES = {f.dtype: f for f in NUMBERS}
#: NumPy's dtypes of scalars in the state, such as step counts, which are read and written in bulk.
SINGLES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}

#: Names that stand for several formats.
CHOICES: dict[str, Choice] = {INT8.name: INT8}
#: Formats of codes whose state is loaded into every format: the names of their columns say which it is.
ENCODED: tuple[Format, ...] = (*(form for choice in CHOICES.values() for form in choice.formats), *REMAINDERS)
#: A format, its name, a dtype, or None: the parameter's dtype, as in torch.  One for all state, or one per state name.
OneFormat = Name | torch.dtype | Format | Choice | None
StateFormat = OneFormat | Mapping[str, OneFormat]


def known(dtype: torch.dtype | None) -> bool:
    """Return whether kernels take lists of a dtype."""
    return dtype in _OF_DTYPES


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels see: for a complex dtype that of its parts."""
    return dtype.to_real() if dtype.is_complex else dtype


#: The state that averages parameters: float32 or wider, unless a ``state_format`` names it.
AVERAGE = "param_ema"


@functools.cache
def of_dtype(dtype: torch.dtype, what: str = "a list") -> ElementFormat:
    """Return the format of a list of plain numbers; for complex ones that of their parts.

    Raises:
        TypeError: kernels take no such numbers; the message begins with ``what``.
    """
    found = _OF_DTYPES.get(real_dtype(dtype))
    if found is None:
        raise TypeError(f"{what} is {dtype}; supported are {', '.join(map(str, _OF_DTYPES))}")
    return found


def dtype_of_name(name: str, what: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        ValueError: there is none; the message begins with ``what``.
    """
    for found in _OF_DTYPES.values():
        if found.name == full_name(name):
            return found.dtype
    raise ValueError(f"{what} is {name!r}; there are {', '.join(f.name for f in _OF_DTYPES.values())}")


def check_format(state_format: StateFormat, states: Collection[str] | None = None) -> None:
    """Check the option ``state_format``.

    Args:
        states: the names of the optimizer's state; None: any are allowed.

    Raises:
        ValueError: a name or dtype is unknown; zeros do not load as zero; ``encode`` and ``decode`` disagree with the
            format's text; a format is given for state that does not exist.
        TypeError: something is no format, name or dtype.
    """
    chosen = state_format.values() if isinstance(state_format, Mapping) else [state_format]
    for one in chosen:
        names = ", ".join([*FORMATS, *CHOICES])
        if (isinstance(one, str) and full_name(one) not in {**FORMATS, **CHOICES}) or (
            isinstance(one, torch.dtype) and one not in _OF_DTYPES
        ):
            raise ValueError(f"state_format is {one!r}; there are {names}, or None (as the parameter)")
        if one is not None and not isinstance(one, str | torch.dtype | Format | Choice):
            a_class = isinstance(one, type) and issubclass(one, Format)
            raise TypeError(
                f"state_format is {one!r}; give a name ({names}), a dtype, a pagedopt.formats.Format"
                f"{f' (an object: {one.__name__}())' if a_class else ''}, or None"
            )
        if isinstance(one, Format):
            one.check_zeros()
            if isinstance(one, ElementFormat) and one not in NUMBERS:
                from .sample import check_sample  # imports Numba: only for formats of users

                check_sample(one)
    if states is None or not isinstance(state_format, Mapping):
        return
    if unknown := [name for name in state_format if name not in states]:
        there = f"there are {', '.join(sorted(states))}" if states else "there is none"
        raise ValueError(f"state_format names the state {', '.join(map(repr, unknown))}; {there}")


def chosen_format(state_format: StateFormat, name: str) -> Format | Choice | None:
    """Return the format that ``state_format`` gives to state ``name``; None: that of :func:`default_format`."""
    one = state_format.get(name) if isinstance(state_format, Mapping) else state_format
    if name == AVERAGE and one is state_format:  # nobody has named it
        return None
    if isinstance(one, torch.dtype):
        return _OF_DTYPES[one]
    if isinstance(one, str):
        return FORMATS.get(full_name(one)) or CHOICES[full_name(one)]
    return one


def default_format(name: str, param: torch.dtype, moment: Moment | None = None) -> Format:
    """Return the format of state ``name`` that nobody asks for: the parameter's dtype, of weights at least float32.

    Raises:
        TypeError: kernels take no parameters of that dtype.
    """
    weights = name == AVERAGE or (moment is not None and moment.weights)
    dtype = torch.promote_types(param, torch.float32) if weights else param
    return of_dtype(dtype, f"state {name!r}")


def format_of(state_format: StateFormat, state: State, param: torch.dtype) -> Format:
    """Return the format, as kernels see it, of a state of a parameter of dtype ``param``.

    Raises:
        ValueError: the parameter is complex, and torch has no complex numbers for that format; a :class:`Choice`
            cannot store the state.
        TypeError: kernels take no parameters of that dtype.
    """
    found = chosen_format(state_format, state.name)
    if found is None:
        return default_format(state.name, param, state.moment)
    if param.is_complex and not (isinstance(found, ElementFormat) and found.dtype.itemsize >= 4):
        raise ValueError(
            f"state_format is {found.name!r} for {state.name!r} of a parameter of {param}: torch has no complex "
            "numbers of that kind; give 'float32' or None (as the parameter)"
        )
    if isinstance(found, Choice):
        made = found.of(state)
        return _OF_DTYPES[made] if isinstance(made, torch.dtype) else made
    return found


def check_squares(state_format: StateFormat, state: State, param: torch.dtype, refuse: bool = True) -> None:
    """Check that float16 is given for no state that holds squares, unless the parameter is float16, too.

    Warns, once, of state of which the rule does not say whether it holds squares.

    Args:
        refuse: raise an error; False: warn, once.

    Raises:
        ValueError: float16 is given for squares.
    """
    squares = None if state.moment is None else state.moment.squares
    if squares is False or chosen_format(state_format, state.name) != FLOAT16 or real_dtype(param) is torch.float16:
        return
    what = f"state_format is 'float16' for {state.name!r} of a parameter of {param}"
    if squares is None:
        text = (
            f"{what}, and rule {state.rule!r} does not say whether that state holds squares, of which float16 rounds "
            f"those below 3e-8 to zero; say so: @pagedopt.rule(moments={{{state.name!r}: pagedopt.Moment(signed=…, "
            "squares=…)})"
        )
    else:
        text = (
            f"{what}: it holds squares, and float16 rounds those below 3e-8 to zero; give 'bfloat16' or 'float32' "
            f"(state_format={{{state.name!r}: …}} gives one state alone)"
        )
        if refuse:
            raise ValueError(text)
    warn_once(text, text)


def columns_of(form: Format, name: str, param: torch.dtype) -> dict[str, Column]:
    """Return the columns of state ``name`` by key, with dtypes for a parameter of dtype ``param``."""
    return {column.key(name): complexified(column) if param.is_complex else column for column in form.columns}
