"""Functions that stand in for others."""

from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises ``error``, whatever it is given."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call
