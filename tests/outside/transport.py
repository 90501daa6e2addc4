"""A transport of one's own: it lends what another lends, and keeps a record."""

from __future__ import annotations

from typing import ClassVar

from pagedopt.transports import HostTable, Lent, MemcpyTransport, Transport


class Recorder(Transport):
    """Copies tables, and records of each that it lends (device, tensors, chunks)."""

    in_memory = True
    record: ClassVar[list[tuple[int, int, int]]] = []

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.inner = MemcpyTransport(device)

    def kind(self, table: HostTable) -> str:
        return self.inner.kind(table)

    def prepare(self, table: HostTable) -> None:
        self.inner.prepare(table)

    def lend(self, table: HostTable, stream: int) -> Lent:
        self.record.append((self.device, len(table.rows), len(table.chunks)))
        return self.inner.lend(table, stream)
