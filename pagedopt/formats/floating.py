"""How optimizer state is stored: which dtype a state tensor has.  Arithmetic does not depend on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

#: State formats by name.
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: One format for all state, one per state name, or None: the parameter's dtype, as torch does.
StateFormat = str | Mapping[str, str] | None


def check_format(state_format: StateFormat, states: Collection[str] | None = None) -> None:
    """Refuse a format that is not known.

    Args:
        states: the names of state there may be; None: any.

    Raises:
        ValueError: a format is unknown, or one is given for a state that there is not.
    """
    names = state_format.values() if isinstance(state_format, Mapping) else [state_format]
    for name in names:
        if name is not None and name not in FORMATS:
            raise ValueError(f"state_format is {name!r}; there are {', '.join(FORMATS)}, or None (as the parameter)")
    if states is None or not isinstance(state_format, Mapping):
        return
    if unknown := [name for name in state_format if name not in states]:
        there = f"there are {', '.join(sorted(states))}" if states else "there is none"
        raise ValueError(f"state_format names the state {', '.join(map(repr, unknown))}; {there}")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """What kernels see of a dtype: of complex numbers those of their parts."""
    return dtype.to_real() if dtype.is_complex else dtype


def state_dtype(state_format: StateFormat, name: str, param: torch.dtype) -> torch.dtype:
    """The dtype of state ``name`` of a parameter of dtype ``param``; of a complex one a complex one.

    Raises:
        ValueError: there are no complex numbers of that format.
    """
    chosen = state_format.get(name) if isinstance(state_format, Mapping) else state_format
    if not chosen:
        return param
    kept = FORMATS[chosen]
    if not param.is_complex:
        return kept
    if kept.itemsize < 4:
        raise ValueError(
            f"state_format is {chosen!r} for {name!r} of a parameter of {param}: torch has no complex numbers of that "
            "kind; give 'float32' or None (as the parameter)"
        )
    return kept.to_complex()
