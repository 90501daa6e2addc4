"""Whether a format's text for Numba and its ``encode`` and ``decode`` say the same of a few elements."""

from __future__ import annotations

import functools

import numpy as np
import torch

from ..kernels.cpu_text import sample_source
from ..system.numba import compile_text
from .format import ElementFormat

#: Entries as numbers; of whole ones those that the dtype has.
_NUMBERS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, -1, -2, -5, -21, -89)
_PARTS = (0.25, -0.75, 1.5)
#: How far apart numbers may be that are said to be the same: of what is loaded, and of the largest that is stored.
_LOADED, _STORED = 1e-4, 0.02


@functools.lru_cache(maxsize=64)
def check_sample(form: ElementFormat) -> None:
    """Load and store a few elements as kernels for the CPU do, and compare with ``decode`` and ``encode``.

    Raises:
        ValueError: they disagree: what a state dict says would not be what is stored; or Numba cannot compile the text.
    """
    what = f"format {form.name!r}"
    entries = _entries(form.dtype)
    width = _read_as(form)
    if width.itemsize != entries.element_size():
        raise ValueError(f"{what}: numba_type {form.numba_type!r} has {width.itemsize} bytes; {form.dtype} has "
                         f"{entries.element_size()}")  # fmt: skip
    number = np.dtype(str(form.arithmetic).removeprefix("torch."))
    loaded, stored = np.zeros(len(entries), number), np.zeros(len(entries), width)
    _run(form, entries.view(torch.uint8).numpy().view(width), loaded, stored)
    values, kept = torch.from_numpy(loaded), torch.from_numpy(stored.view(np.uint8)).view(form.dtype)
    decoded = form.decode(entries, numel=len(entries))
    if (at := _differ(decoded, values, _LOADED * values.double().abs())) is not None:
        raise ValueError(
            f"{what}: decode makes {float(decoded[at])!r} of an entry {entries[at].item()!r}, and numba_load "
            f"{float(values[at])!r}; define encode and decode, so that they say what the kernels do"
        )
    (encoded,) = form.encode(values)
    again, theirs = (form.decode(each, numel=len(entries)) for each in (encoded, kept))
    most = values.double().abs().nan_to_num(0, 0, 0).max()
    if (at := _differ(again, theirs, _STORED * most)) is not None and not _neighbours(encoded, kept):
        raise ValueError(
            f"{what}: encode makes an entry {encoded[at].item()!r} of {float(values[at])!r}, and numba_store "
            f"{kept[at].item()!r}; define encode and decode, so that they say what the kernels do"
        )


def _entries(dtype: torch.dtype) -> torch.Tensor:
    """Some that may well be stored."""
    if dtype.is_floating_point:
        return torch.tensor([*_NUMBERS, *_PARTS], device="cpu").to(dtype)
    if dtype is torch.bool:
        return torch.tensor([False, True], device="cpu")
    return torch.tensor([n for n in _NUMBERS if n >= torch.iinfo(dtype).min], device="cpu").to(dtype)


def _read_as(form: ElementFormat) -> np.dtype:
    """The NumPy type of an entry."""
    try:
        return np.dtype(eval(form.numba_type, {"_np": np}))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"format {form.name!r}: numba_type is {form.numba_type!r}: {error}") from None


def _run(form: ElementFormat, *arrays: np.ndarray) -> None:
    from numba.core.errors import NumbaError

    try:
        compile_text.load(sample_source(form), "sample", "pagedopt.kernels.numba_numbers")(*arrays)
    except NumbaError as error:
        raise ValueError(
            f"format {form.name!r}: Numba cannot compile numba_load {form.numba_load!r} and numba_store "
            f"{form.numba_store!r}: {error}"
        ) from None


def _differ(one: torch.Tensor, other: torch.Tensor, most: torch.Tensor) -> int | None:
    """The first place where two differ by more than ``most``; None: there is none."""
    one, other = one.double(), other.double()
    alike = (one == other) | ((one - other).abs() <= most) | (one.isnan() & other.isnan())
    return None if bool(alike.all()) else int((~alike).int().argmax())


def _neighbours(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether entries are whole numbers at most one apart: rounded otherwise, which a state dict may be."""
    return not one.is_floating_point() and bool(((one.double() - other.double()).abs() <= 1).all())
