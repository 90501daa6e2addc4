"""A sweep on a played card, with a log of what it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from played_tables import Decoded, Tables, decode
from played_torch import CUDA
from support import F32, lists_for, scalars_for

from pagedopt import Sweep
from pagedopt.kernels import cuda as kernels
from pagedopt.paging.policy import Move
from pagedopt.paging.visits import Action, plan
from pagedopt.rules import RULES
from pagedopt.tables.layout import HostTable
from pagedopt.transports.transport import TABLE_AT

ADAMW = RULES["adamw"]
STREAM = 0


class Device:
    """Runs a sweep on a played card, and keeps a log of what it does; its kernel only reads its table.

    Its transport is of a name or class that ``Sweep`` takes.

    ``fails`` names what raises: ``compile``, ``fetch``, ``launch``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: Tables, kind: Any, sizes: tuple[int, ...]) -> None:
        self.cuda = cuda
        self.log: list[str] = []
        self.fails = ""
        lists = [[t.to(CUDA) for t in tensors] for tensors in lists_for(ADAMW, sizes, (F32,) * 4)]
        self.sweep = Sweep(ADAMW, lists, transport=kind)
        monkeypatch.setattr(kernels, "CudaKernel", self.kernel)

    def note(self, what: str, detail: object = "") -> None:
        self.log.append(f"{what} {detail}".strip())
        if what == self.fails:
            raise OSError(what)

    def kernel(self, text: str, name: str, *_: Any) -> Any:
        """In the place of a compiled kernel: when its turn comes it must find the table as it was when launched."""
        self.note("compile")
        by_value = "TableAt" not in name
        table = self.sweep.table.host

        def launch(argument: np.ndarray, count: int, stream: kernels.Stream) -> None:
            assert self.sweep.begun, "an interrupt that came now would find that nothing has begun"
            assert by_value == (argument.nbytes > 1000), "a kernel for another kind of argument"
            self.note("launch", count)
            copy, want = argument.copy(), _as_launched(argument, table)
            assert len(want[1]) == count
            at = 0 if by_value else int(argument.view(TABLE_AT)["words"][0])
            reads = [] if by_value else [(at, at + table.words.nbytes)]
            self.cuda.card.kernel(stream.ptr, "a kernel", reads, [], lambda: _same(decode(copy, table), want))

        return launch

    def begin(self) -> None:
        self.note("begin")

    def fetch(self, move: Move) -> None:
        self.note("fetch", move.page)

    def arrive(self, move: Move) -> None:
        self.note("arrive", move.page)

    def evict(self, move: Move) -> None:
        self.note("evict", move.page)

    def finish(self) -> None:
        self.note("finish")

    def step(self, number: int, steps: list[Action] | None = None) -> None:
        scalars = [ADAMW.uniforms(scalars_for(ADAMW, number))]
        if steps is None:
            self.sweep.launch(scalars)
        else:
            self.sweep.launch(scalars, steps, self)

    def drain(self) -> None:
        """Let the sweep's stream do all its work."""
        self.cuda.drain(STREAM)

    def steps(self) -> list[Action]:
        """The first chunk at hand, two pages that visit."""
        end = len(self.sweep.table.host.chunks)
        return plan((0, 1), [(Move(0, 8, 0), (1, 3)), (Move(0, 9, 1), (3, end))])


def _as_launched(argument: np.ndarray, table: HostTable) -> Decoded:
    """What an argument says with the words of the host table as they are now."""
    if argument.nbytes != TABLE_AT.itemsize:
        return decode(argument, table)
    words, here = table.words.copy(), argument.copy()
    here.view(TABLE_AT)["words"] = words.ctypes.data
    return decode(here, table)


def _same(now: Decoded, want: Decoded) -> None:
    assert now == want, "a table was rewritten under a launch, or never sent"
