"""JSON as files hold it."""

from __future__ import annotations

import json
import math
from typing import Any


def as_json(content: Any) -> str:
    """Return JSON values as the text of a JSON file. Numbers that are not finite become null."""
    return json.dumps(finite(content), indent=1, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Return JSON values with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
