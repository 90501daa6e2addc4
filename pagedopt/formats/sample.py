"""Compare a format's text for Numba with its ``encode`` and ``decode``, on a few elements."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..kernels.cpu import sample_kernel
from .format import ElementFormat

#: Entries to try; an unsigned dtype gets those that are not negative.
_NUMBERS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, -1, -2, -5, -21, -89)
_FRACTIONS = (0.25, -0.75, 1.5)
#: Tolerances: of a loaded number, relative to it; of a stored number, relative to the largest.
_LOADED, _STORED = 1e-4, 0.02


@functools.lru_cache(maxsize=64)
def check_sample(form: ElementFormat) -> None:
    """Load and store a few elements as CPU kernels do, and compare with ``decode`` and ``encode``.

    If they disagree (ValueError), a state dict would not hold what is stored.
    """
    what = f"format {form.name!r}"
    entries, width = _entries(form.dtype), _read_as(form)
    if width.itemsize != entries.element_size():
        raise ValueError(f"{what}: numba_type {form.numba_type!r} has {width.itemsize} bytes; {form.dtype} has "
                         f"{entries.element_size()}")  # fmt: skip
    number = np.dtype(str(form.arithmetic).removeprefix("torch."))
    loaded, stored = np.zeros(len(entries), number), np.zeros(len(entries), width)
    _run(form, entries.view(torch.uint8).numpy().view(width), loaded, stored)
    values, written = torch.from_numpy(loaded), torch.from_numpy(stored.view(np.uint8)).view(form.dtype)
    decoded = form.decode(entries, numel=len(entries))
    if (at := _differ(decoded, values, _LOADED * values.double().abs())) is not None:
        raise ValueError(
            f"{what}: decode makes {float(decoded[at])!r} of an entry {entries[at].item()!r}, and numba_load "
            f"{float(values[at])!r}; define encode and decode, so that they say what the kernels do"
        )
    (encoded,) = form.encode(values)
    again, theirs = (form.decode(each, numel=len(entries)) for each in (encoded, written))
    most = values.double().abs().nan_to_num(0, 0, 0).max()
    if (at := _differ(again, theirs, _STORED * most)) is not None and not _neighbours(encoded, written):
        raise ValueError(
            f"{what}: encode makes an entry {encoded[at].item()!r} of {float(values[at])!r}, and numba_store "
            f"{written[at].item()!r}; define encode and decode, so that they say what the kernels do"
        )


def _entries(dtype: torch.dtype) -> torch.Tensor:
    """Return entries of ``dtype`` to try."""
    if dtype.is_floating_point:
        return torch.tensor([*_NUMBERS, *_FRACTIONS], device="cpu").to(dtype)
    if dtype is torch.bool:
        return torch.tensor([False, True], device="cpu")
    return torch.tensor([n for n in _NUMBERS if n >= torch.iinfo(dtype).min], device="cpu").to(dtype)


def _read_as(form: ElementFormat) -> np.dtype:
    """Return the NumPy type of an entry."""
    try:
        return np.dtype(eval(form.numba_type, {"_np": np}))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"format {form.name!r}: numba_type is {form.numba_type!r}: {error}") from None


def _run(form: ElementFormat, *arrays: np.ndarray) -> None:
    from numba.core.errors import NumbaError

    try:
        sample_kernel(form)(*arrays)
    except NumbaError as error:
        raise ValueError(
            f"format {form.name!r}: Numba cannot compile numba_load {form.numba_load!r} and numba_store "
            f"{form.numba_store!r}: {error}"
        ) from None


def _differ(one: torch.Tensor, other: torch.Tensor, most: torch.Tensor) -> int | None:
    """Return the first index at which two differ by more than ``most``; None: nowhere."""
    one, other = one.double(), other.double()
    alike = (one == other) | ((one - other).abs() <= most) | (one.isnan() & other.isnan())
    return None if bool(alike.all()) else int((~alike).int().argmax())


def _neighbours(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether entries are integers that differ by at most one: a state dict may round differently."""
    return not one.is_floating_point() and bool(((one.double() - other.double()).abs() <= 1).all())
