"""Operators that tell torch something that is not so, each beside what it ought to do, and a function that shows it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Lie:
    """An operator that lies.

    Attributes:
        schema: its arguments and result.
        run: what it does.
        fake: what it says without values.
        use: a function of the operator and a tensor, whose eager result is the right one but for ``honest``.
        honest: the right result of ``use``, where even an eager call gives another.
        backward: its gradient, if it says one.
        elsewhere: whether it is registered for the other kind of device alone.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    use: Callable[[Any, torch.Tensor], torch.Tensor]
    honest: Callable[[torch.Tensor], torch.Tensor] | None = None
    backward: Callable[..., Any] | None = None
    elsewhere: bool = False


def writes_in_secret(x: torch.Tensor) -> torch.Tensor:
    """Twice the tensor; and the tensor becomes zero."""
    out = x * 2
    x.zero_()
    return out


def after_secret(op: Any, x: torch.Tensor) -> torch.Tensor:
    """Twice a tensor that the function has made, and what is left of it."""
    y = x + 1
    return op(y) + y


#: What the operator that writes elsewhere remembers.
own: dict[str, torch.Tensor] = {}


def writes_its_own(x: torch.Tensor) -> None:
    """Double what was remembered, and not what is handed: the same memory, as long as nobody hands a clone."""
    own.get("x", x).mul_(2)


def remembered(op: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor, doubled where it lies; eager calls remember it."""
    if not torch.compiler.is_compiling():
        own["x"] = x
    op(x)
    return x + 0


def halved(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Half of the right gradient."""
    return grad


def gradient(op: Any, x: torch.Tensor) -> torch.Tensor:
    """Of the sum of what the operator gives."""
    x = x.detach().clone().requires_grad_()
    op(x).sum().backward()
    assert x.grad is not None
    return x.grad


def doubled(x: torch.Tensor) -> torch.Tensor:
    """Twice the tensor."""
    return x * 2


PURE = "(Tensor x) -> Tensor"
SECRET, OWN, SHAPE, DTYPE, ALIAS, DEVICE, GRADIENT = (
    "it writes what it does not say", "it writes its own tensor, not the one handed", "its fake has another shape",
    "its fake has another dtype", "it returns its argument", "it is not registered for this device",
    "its gradient is half of what it should be",
)  # fmt: skip
LIES: Mapping[str, Lie] = {
    SECRET: Lie(PURE, writes_in_secret, torch.empty_like, after_secret),
    OWN: Lie("(Tensor(a!) x) -> ()", writes_its_own, lambda x: None, remembered, lambda x: x * 2),
    SHAPE: Lie(PURE, doubled, lambda x: x.new_empty(x.numel() // 2), lambda op, x: op(x) + 1),
    DTYPE: Lie(PURE, doubled, lambda x: torch.empty_like(x, dtype=torch.float64), lambda op, x: op(x) + 1),
    ALIAS: Lie(PURE, lambda x: x, torch.empty_like, lambda op, x: op(x + 1).mul_(2) + 1),
    DEVICE: Lie(PURE, doubled, torch.empty_like, lambda op, x: op(x) + 1, doubled, elsewhere=True),
    GRADIENT: Lie(PURE, doubled, torch.empty_like, gradient, lambda x: torch.full_like(x, 2), halved),
}
_libraries: list[torch.library.Library] = []


@functools.cache
def registered(name: str, device: str) -> Any:
    """The operator of a lie, for the kind of device."""
    lie, number = LIES[name], [*LIES].index(name)
    lib = torch.library.Library("lies", "FRAGMENT")
    _libraries.append(lib)
    lib.define(f"lie_{number}{lie.schema}")
    other = "CPU" if device == "cuda" else "CUDA"
    lib.impl(f"lie_{number}", lie.run, other if lie.elsewhere else device.upper())
    torch.library.register_fake(f"lies::lie_{number}", lie.fake, lib=lib)
    if lie.backward:
        torch.library.register_autograd(f"lies::lie_{number}", lie.backward, lib=lib)
    return getattr(torch.ops.lies, f"lie_{number}").default
