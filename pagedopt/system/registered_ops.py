"""Operators that torch is told of: the library ``pagedopt`` of ``torch.ops``, and what an operator of it needs.

Each operator is defined where it is implemented, when ``torch.compile`` first needs it.  ``import pagedopt`` defines
none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: What ``torch.ops.pagedopt`` holds.  A fragment: others may add to the same namespace.
LIBRARY = torch.library.Library("pagedopt", "FRAGMENT")
#: Tells Inductor not to capture an operator in its CUDA graphs.  torch before 2.9 has no such tag.
UNSAFE_IN_CUDA_GRAPHS: tuple[torch.Tag, ...] = tuple(
    tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None
)


def define(
    name: str,
    arguments: str,
    run: Callable[..., None],
    fake: Callable[..., None],
    tags: tuple[torch.Tag, ...] = (),
) -> Any:
    """Define an operator without a result, for all devices, and return it.

    ``torch.library.custom_op`` would do the same in 3 lines for 11, and a call takes 3 to 5 times as long
    (notes/custom_op.md).

    Args:
        name: of the operator in the library.
        arguments: its arguments, as a schema has them: what it writes is annotated there, as ``Tensor(a!)[] written``.
        run: does it, and raises the version counters of what it writes.
        fake: what is known without values: it checks shapes, and writes nothing.
        tags: of the operator.

    Returns:
        the overload, to be called with the arguments.

    Raises:
        RuntimeError: the library has an operator of this name.

    Example:
        >>> double = define("double_", "Tensor(a!) x", lambda x: x.mul_(2), lambda x: None)
        >>> double(torch.ones(3))

    Source: https://docs.pytorch.org/docs/stable/library.html
    """
    LIBRARY.define(f"{name}({arguments}) -> ()", tags=tags)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pagedopt::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.pagedopt, name).default


__all__ = ["LIBRARY", "UNSAFE_IN_CUDA_GRAPHS", "define"]
