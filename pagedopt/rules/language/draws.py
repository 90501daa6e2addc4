"""Calls that give another number each time: of a rule, which is traced once, every step would have the first."""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def draws(function: Any, given: Iterable[Any]) -> bool:
    """Return whether a call is one of a generator of random numbers, is given one, or asks for the time."""
    clock = getattr(function, "__module__", "") in ("time", "secrets")
    return clock or any(isinstance(x, _GENERATORS) for x in (getattr(function, "__self__", None), *given))


def states() -> bytes:
    """Return the states of Python's, NumPy's and torch's own generators (of torch that of the CPU)."""
    state = torch.get_rng_state()  # read by address: a mode of torch's may be active, which would make a fake of a copy
    own = ctypes.string_at(state.data_ptr(), state.nbytes)
    return own + pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
