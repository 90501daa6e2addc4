"""What runs and experiments make of their numbers: the spread of samples, JSON (which has no NaN), an empty figure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def spread(samples: Sequence[float]) -> dict[str, float]:
    """``p10``, ``median`` and ``p90`` of at least one sample, in its unit."""
    low, median, high = (float(value) for value in np.percentile(samples, (10, 50, 90)))
    return {"p10": low, "median": median, "p90": high}


def as_json(content: Any) -> str:
    """A file's text: plain values as JSON, null for every number that is not finite."""
    return json.dumps(finite(content), indent=1, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Plain values with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, drawn without a display; None where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
