"""Lists of tiny tensors at two sets of addresses, updated through any transport, with counts that must come out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagedopt import Sweep, rule
from pagedopt.system import driver
from pagedopt.system.driver import Advice, Location
from pagedopt.tables.layout import HostTable, Span, table_type
from pagedopt.transports.by_value import HybridTransport, StructTransport
from pagedopt.transports.ring import ManagedTransport, MappedTransport, MemcpyTransport, TableBuffer
from pagedopt.transports.transport import TABLE_AT, Argument, Lent, Transport, opaque

#: Elements of a tensor, (2, 3), and from one to the next, as torch's allocator would place them (512 bytes).
SHAPE, STRIDE = (2, 3), 128
ELEMENTS = SHAPE[0] * SHAPE[1]
#: A table in memory, as kernels name it.
TABLE_TYPE = table_type(0)


@rule
def count_one(value, *, by):
    """A table with one list: value + by"""
    return value + by


@rule
def count_four(param, grad, exp_avg, exp_avg_sq, *, by):
    """A table with the four lists of AdamW; what is stored stays a whole number."""
    param = param + by
    exp_avg = exp_avg + by
    exp_avg_sq = exp_avg_sq + by * grad
    return param, exp_avg, exp_avg_sq


RULES = {1: count_one, 4: count_four}


def advised(*advice: tuple[Advice, Location]) -> type[ManagedTransport]:
    """Managed memory with other advice."""
    return type("Advised", (ManagedTransport,), {"advice": advice})


class Prefetched(ManagedTransport):
    """No advice, but a prefetch to the device before each launch over new words."""

    advice = ()

    def publish(self, buffer: TableBuffer, words: int, stream: int) -> None:
        """Prefetch what has changed."""
        driver.prefetch(buffer.source, 8 * words, Location.DEVICE, self.device, stream)


class TorchCopies(Transport):
    """The lecture's words to the letter: in every step a list of numbers becomes a tensor, copied to the device."""

    name = "torch's copies"
    in_memory = True

    def __init__(self, device: int, pinned: bool) -> None:
        super().__init__(device)
        self.pinned = pinned

    def kind(self, table: HostTable) -> str:
        """A table in memory."""
        return TABLE_TYPE

    def lend(self, table: HostTable, stream: int) -> Lent:
        """The table as it is now."""
        copy = self.copied(torch.tensor(table.words.view(np.int64).tolist()))
        self.copied_bytes += table.words.nbytes
        return Copied(table, copy)

    def copied(self, words: torch.Tensor) -> torch.Tensor:
        """On the device; out of page-locked memory without waiting for the copy."""
        return (words.pin_memory() if self.pinned else words).to(f"cuda:{self.device}", non_blocking=self.pinned)


class Copied(Lent):
    """A table in a tensor, which torch gives to nobody else before the launches behind it on this stream are done."""

    kind = TABLE_TYPE

    def __init__(self, table: HostTable, copy: torch.Tensor) -> None:
        self._table, self._copy = table, copy
        self.address = copy.data_ptr()

    def parts(self, span: Span | None = None) -> tuple[tuple[Argument, int], ...]:
        """One launch over everything, or over a span."""
        first, last = span or (0, len(self._table.chunks))
        fields = np.zeros(1, TABLE_AT)
        fields["words"], fields["header"] = self.address, self._table.header(first, last)[0]
        return ((opaque(fields), last - first),) if last > first else ()


Make = Callable[[int], Transport]
TRANSPORTS: dict[str, Make] = {
    "managed": ManagedTransport,
    "mapped": MappedTransport,
    "memcpy": MemcpyTransport,
    "struct 4 KB": lambda device: StructTransport(device, 4096),
    "struct 32 KB": lambda device: StructTransport(device, 32764),
    "hybrid": HybridTransport,
}
#: torch's own calls in place of ours: copies of the whole table in every step, whether it was rewritten or not.
COPIES: dict[str, Make] = {
    "torch.tensor(ptrs).to(cuda)": lambda device: TorchCopies(device, pinned=False),
    "….pin_memory(), non_blocking": lambda device: TorchCopies(device, pinned=True),
}
ADVICE: dict[str, Make] = {
    "none": advised(),  # pages migrate to whoever touched them last
    "preferred host": advised((Advice.PREFERRED, Location.HOST)),  # the device maps them when it first faults
    "accessed by": advised((Advice.ACCESSED_BY, Location.DEVICE)),  # the device has them mapped, wherever they are
    "preferred host, accessed by": ManagedTransport,
    "preferred device": advised((Advice.PREFERRED, Location.DEVICE)),  # they return after every write of the host
    "read mostly": advised((Advice.READ_MOSTLY, Location.DEVICE)),  # a write throws the other side's copy away
    "prefetch": Prefetched,
}


class Lists:
    """``count`` tiny tensors in each of 1 or 4 lists, twice, and one sweep that goes over one or the other."""

    def __init__(self, lists: int, count: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(count)
        shape = (2, lists, count, STRIDE)
        self.start = torch.randint(1, 4, shape, device=device, generator=generator, dtype=torch.float32)
        self.memory = self.start.clone()
        self.tensors = [list(x[:, :ELEMENTS].unflatten(1, SHAPE).unbind()) for x in self.memory[0]]
        self.sweep = Sweep(RULES[lists], self.tensors)
        first = self.sweep.table.host.rows["address"].copy()
        self._addresses = (first, first + np.uint64(self.memory[0].nbytes))
        self._values = {by: [self.sweep.rule.uniforms({"by": by})] for by in (1.0, 2.0)}
        self._by = 1.0
        self.active = 0
        self.total = [0.0, 0.0]

    def rewrite(self) -> None:
        """Let the table name the other set of tensors."""
        self.active = 1 - self.active
        host = self.sweep.table.host
        host.rows["address"] = self._addresses[self.active]
        host.rows_changed()

    def other_scalar(self) -> None:
        """Add 2 next time instead of 1, or the other way round."""
        self._by = 3.0 - self._by

    def step(self, way: Transport | None = None) -> None:
        """Update the set of tensors that the table names, once."""
        if way is not None:
            self.sweep.transport = way
        self.sweep.run(self._values[self._by])
        self.total[self.active] += self._by

    def check(self, what: str) -> None:
        """Compare every element with the number of updates it must have had.

        Raises:
            AssertionError: a launch read a stale or half-written table, or none at all.
        """
        for side, due in enumerate(self.total):
            for j, (now, start) in enumerate(zip(self.memory[side], self.start[side], strict=True)):
                grows = due * (self.start[side][1] if len(self.start[side]) == 4 and j == 3 else 1)
                expected = start + grows * (j in self.sweep.rule.writes)
                if not torch.equal(now[:, :ELEMENTS], expected[:, :ELEMENTS]):
                    raise AssertionError(f"{what}: list {j} of set {side} is not what {due:.0f} updates make of it")
                if not torch.equal(now[:, ELEMENTS:], start[:, ELEMENTS:]):
                    raise AssertionError(f"{what}: list {j} of set {side} was written beyond its tensors")
