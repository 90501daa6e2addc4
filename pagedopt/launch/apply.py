"""``multi_tensor_apply``: a rule over lists of tensors, called once, from Python or from a compiled function."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..rules.rule import Rule, check_rule
from ..tables.pointers import TensorList
from ..transports.choose import TransportOption
from ..transports.transport import Transport
from .sweep import Scalars, apply, named, packed


def multi_tensor_apply(
    rule: Rule,
    lists: Sequence[Sequence[torch.Tensor]],
    scalars: Scalars | torch.Tensor | None = None,
    *,
    out: Sequence[Sequence[torch.Tensor]] | None = None,
    transport: TransportOption | Transport = "managed",
) -> None:
    """Apply ``rule`` to every element of lists of tensors, in one launch on the current stream.

    In a function that ``torch.compile`` or ``torch.export`` traces, it is one operator in the graph,
    ``torch.ops.pagedopt.multi_tensor_apply_``.  Make ``scalars`` a tensor there, outside of the function: compilers
    specialize on a Python float, and compile the function again for another value.

    Args:
        rule: a function decorated with :func:`pagedopt.rule`, or one of :mod:`pagedopt.rules`.
        lists: one list of tensors per input of the rule.  Tensor i of each list has one shape, strides and device; each
            list has one dtype of float16, bfloat16, float32, float64.  Arithmetic is in float32, or in float64 if any
            list is.  The lists in ``rule.writes`` are overwritten, and their version counters go up.
        scalars: the rule's hyperparameters by name; or all of them in the order of ``rule.scalars``, as a float64
            tensor (hyperparameters,) on the CPU.  New values of those that it returns are not returned here: they
            are in ``rule.uniforms(scalars)``, at the indices in ``rule.carried``.
        out: lists that take the results instead of ``rule.writes``.
        transport: how the table of addresses reaches a CUDA kernel (``managed``, ``mapped``, ``memcpy``, ``struct``,
            ``hybrid``), a class of your own (:class:`pagedopt.transports.Transport`), or a transport object.  Its
            tables are reused from call to call.  Compiled functions take ``managed`` alone.

    Raises:
        ValueError, TypeError: the lists do not fit the rule or each other, or the scalars do not fit the rule; nothing
            has been launched then.

    Example:
        >>> @pagedopt.rule
        ... def decay(weight, *, rate):
        ...     return weight * (1 - rate)
        >>> multi_tensor_apply(decay, [list(model.parameters())], {"rate": 0.1})
        >>> @torch.compile
        ... def decayed(weights, scalars):
        ...     multi_tensor_apply(decay, [weights], scalars)
        >>> decayed(list(model.parameters()), torch.tensor([0.1], dtype=torch.float64))  # any rate, one graph

    Write ``import pagedopt.launch.registered`` before ``torch.export.load`` of a program that has the operator.
    """
    check_rule(rule)
    if torch.compiler.is_compiling():
        _in_a_graph(rule, lists, scalars, out, transport)
        return
    rule = rule if out is None else rule.out_of_place
    given: list[TensorList] = [tuple(x) for x in (*lists, *(out or ()))]
    if given and not given[0]:
        return
    apply(rule, given, named(rule, scalars) if isinstance(scalars, torch.Tensor) else scalars or {}, transport)


def _in_a_graph(
    rule: Rule,
    lists: Sequence[Sequence[torch.Tensor]],
    scalars: Scalars | torch.Tensor | None,
    out: Sequence[Sequence[torch.Tensor]] | None,
    transport: TransportOption | Transport,
) -> None:
    """Put the operator into the graph that is being traced."""
    from . import registered

    if transport != "managed":
        raise ValueError(f"transport is {transport!r}, and a compiled function takes 'managed' alone; leave it out")
    if len(lists) != len(rule.inputs):
        raise ValueError(f"rule {rule.name!r} takes {len(rule.inputs)} lists {rule.inputs}, got {len(lists)}")
    writes = rule.writes if out is None else ()
    written = [t for tensors in out for t in tensors] if out is not None else [t for i in writes for t in lists[i]]
    read = [t for i, tensors in enumerate(lists) if i not in writes for t in tensors]
    if not written:
        return
    name = rule.registered if out is None else rule.registered + registered.OUT_OF_PLACE
    values = scalars if isinstance(scalars, torch.Tensor) else packed(rule, scalars or {})
    with torch.no_grad():
        registered.multi_tensor_apply_(written, read, name, values)


__all__ = ["multi_tensor_apply"]
