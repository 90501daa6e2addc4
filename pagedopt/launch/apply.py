"""What is called with lists of tensors: ``multi_tensor_apply`` of a rule, and ``DeviceTable`` for custom kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..rules.rule import Rule, check_rule
from ..tables.layout import WORD
from ..tables.pointers import PointerTable, TensorList
from ..transports.choose import TransportOption, check_transport, create
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


class DeviceTable(PointerTable):
    """Lists of tensors as rows of addresses that a kernel can read with no explicit copy.

    Row i is ``k + 2`` words of 8 bytes: the addresses of tensor i in each of the k lists, its number of elements (0 if
    it is absent from a list), and one word that is 0 here.

    The table keeps its tensors alive.  Each access to its rows compares the tensors' addresses: it takes over new
    addresses, and raises for tensors that can no longer be used.

    Args:
        lists: see :class:`PointerTable`.
        writes: indices of the lists your kernel overwrites.
        transport: ``managed``, ``mapped`` or ``memcpy``, or your own class with ``in_memory``; not used on a CPU.

    Raises:
        ValueError, TypeError: see :class:`PointerTable`; or ``transport`` passes tables by value, or is no transport.

    Autograd does not notice what your kernel writes: call ``torch.autograd.graph.increment_version`` for each tensor it
    has overwritten.

    Example:
        >>> scale = cupy.RawKernel(r'''
        ... extern "C" __global__ void scale(const unsigned long long* rows, float by) {
        ...     const unsigned long long* row = rows + 3 * blockIdx.x;      // one list: address, numel, 0
        ...     float* x = (float*)row[0];
        ...     for (long long i = threadIdx.x; i < (long long)row[1]; i += blockDim.x) x[i] *= by;
        ... }''', "scale")
        >>> table = pagedopt.DeviceTable([tensors], writes=[0])
        >>> stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        >>> with stream, table.rows_on_device() as rows:
        ...     scale((len(table),), (256,), (rows, cupy.float32(2)))  # of a table that is not empty

    ``tests/outside/kernel.py`` has an example for tables of any size, and one for Numba.
    """

    def __init__(
        self, lists: Sequence[TensorList], *, writes: Sequence[int] = (), transport: TransportOption = "managed"
    ) -> None:
        check_transport(transport)
        super().__init__(lists, writes=writes)
        self._transport: Transport | None = None
        if self.device.type == "cuda":
            self._transport = create(transport, self.device.index)
            if not self._transport.in_memory:
                raise ValueError(
                    f"transport {transport!r} passes tables by value; a kernel of your own needs one in memory"
                )

    def __repr__(self) -> str:
        """Say how many lists and tensors, their dtypes and device, and which lists a kernel overwrites."""
        dtypes = ", ".join("none" if d is None else str(d).removeprefix("torch.") for d in self.dtypes)
        size = f"{len(self.dtypes)} x {len(self)} tensors"
        return f"DeviceTable({size} ({dtypes}) on {self.device}, writes={list(self.writes)})"

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows in host memory, (n, k + 2) int64, for a Numba kernel on the CPU.

        Raises:
            ValueError, TypeError: a tensor has another size, dtype or device than before, or no memory.
        """
        self.follow()
        return self.host.row_words

    @contextlib.contextmanager
    def rows_on_device(self) -> Iterator[int]:
        """Lend the address of the rows to kernels launched on the current stream inside the block.

        The table is not rewritten before they have ended, even if :meth:`refresh` is called meanwhile.

        Raises:
            ValueError, TypeError: a tensor has another size, dtype or device than before, or no memory.
        """
        self.follow()
        if self._transport is None:
            yield self.rows.ctypes.data
            return
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream().cuda_stream
            with self._transport.lend(self.host, stream) as lent:
                yield lent.address + WORD * self.host.rows_at
