"""``torch.ops.pagedopt.multi_tensor_apply_``: what ``torch.compile`` and ``torch.export`` see of a rule over lists.

It avoids a graph break, and declares which tensors are written.  Eager calls do not pass through it.  It has no
derivative, no batching rule, and no form that writes nothing: ``torch.func.vmap`` and ``torch.func.functionalize``
refuse it.  It is defined when ``torch.compile`` first needs it: ``import pagedopt`` defines none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rules.rule import Rule, find_registered
from .sweep import apply, named

#: What ``torch.ops.pagedopt`` holds.  A fragment: others may add to the same namespace.
LIBRARY = torch.library.Library("pagedopt", "FRAGMENT")
#: Tells Inductor not to capture an operator in its CUDA graphs.  torch before 2.9 has no such tag.
UNSAFE_IN_CUDA_GRAPHS: tuple[torch.Tag, ...] = tuple(
    tag for tag in [getattr(torch.Tag, "cudagraph_unsafe", None)] if tag is not None
)


#: Stands behind the name of a rule whose results go into lists of their own.
OUT_OF_PLACE = ", out of place"


def _rule(name: str) -> Rule:
    """Return the rule of a name that was passed to the operator."""
    base = find_registered(name.removesuffix(OUT_OF_PLACE))
    return base.out_of_place if name.endswith(OUT_OF_PLACE) else base


def _lists(rule: Rule, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the lists in the rule's order; ValueError if the rule has another number of them."""
    writes, inputs = rule.writes, len(rule.inputs)
    count, rest = divmod(len(written), len(writes))
    if rest or len(read) != count * (inputs - len(writes)):
        raise ValueError(
            f"rule {rule.name!r} writes {len(writes)} lists and reads {inputs - len(writes)} more, of one length; got "
            f"{len(written)} tensors to write and {len(read)} to read"
        )
    from_written, from_read = iter(written), iter(read)
    return [[next(from_written if i in writes else from_read) for _ in range(count)] for i in range(inputs)]


def _run(written: list[torch.Tensor], read: list[torch.Tensor], rule: str, scalars: torch.Tensor) -> None:
    """Apply the rule to the tensors that are passed.  A compiler may pass clones; it copies them back itself."""
    found = _rule(rule)
    if written:
        apply(found, _lists(found, written, read), named(found, scalars))


def _fake(written: list[torch.Tensor], read: list[torch.Tensor], rule: str, scalars: torch.Tensor) -> None:
    """Check the arguments without their values, so that compilation refuses those that do not fit."""
    found = _rule(rule)
    lists = _lists(found, written, read)
    if scalars.dtype is not torch.float64 or scalars.dim() != 1 or scalars.device.type != "cpu":
        raise ValueError(
            f"scalars is {scalars.dtype} {tuple(scalars.shape)} on {scalars.device}; give float64 (n,) on cpu"
        )
    for name, tensors in zip(found.inputs, lists, strict=True):
        for i, (tensor, first) in enumerate(zip(tensors, lists[0], strict=True)):
            torch._check(
                tensor.shape == first.shape,
                lambda name=name, i=i, has=tensor.shape, want=first.shape: (
                    f"tensor {i} of {name!r} has shape {tuple(has)}, of {found.inputs[0]!r} {tuple(want)}"
                ),
            )


#: ``multi_tensor_apply_(Tensor(a!)[] written, Tensor[] read, str rule, Tensor scalars)``: the lists that the rule
#: writes, one behind the other, the lists that it only reads, the name ``rule.registered``, and its hyperparameters as
#: float64 on the CPU.  ValueError for what does not fit the rule, or a rule that is not in this process.  No CUDA graph
#: of a compiler may hold it: the host reads the hyperparameters in each call.
#: ``torch.library.custom_op`` would define it in fewer lines, and a call takes 3 to 5 times as long
#: (notes/custom_op.md).
LIBRARY.define(
    "multi_tensor_apply_(Tensor(a!)[] written, Tensor[] read, str rule, Tensor scalars) -> ()",
    tags=UNSAFE_IN_CUDA_GRAPHS,
)
LIBRARY.impl("multi_tensor_apply_", _run, "CompositeExplicitAutograd")
torch.library.register_fake("pagedopt::multi_tensor_apply_", _fake, lib=LIBRARY)
multi_tensor_apply_: Any = torch.ops.pagedopt.multi_tensor_apply_.default
