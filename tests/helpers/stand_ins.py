"""Functions that stand in for others, and what is said of a refusal."""

from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises ``error``, whatever it is given."""

    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def refusal(act: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    """What an error of this kind says; "" if there is none."""
    try:
        act()
    except kind as error:
        return str(error)
    return ""
