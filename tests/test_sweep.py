"""The one place that launches, on a device made of queues: what comes before what, and what is left when it fails."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Decoded, FakeCuda, decode
from support import F32, lists_for, scalars_for

from pagedopt import Sweep
from pagedopt.kernels import cuda as kernels
from pagedopt.paging.policy import Move
from pagedopt.paging.visits import Launch, Step, plan
from pagedopt.rules import RULES
from pagedopt.tables.layout import HostTable
from pagedopt.transports.choose import TRANSPORTS
from pagedopt.transports.ring import RING
from pagedopt.transports.transport import TABLE_AT

ADAMW = RULES["adamw"]
STREAM = 7
#: Tensors whose table goes by value, and so many that it does not.
FEW, MANY = (700, 1, 3, 2000), (700, 1, 3, 2000) * 60


class Device:
    """Runs a sweep over tensors on the CPU as if they were on a device, and keeps a log of what it does.

    ``fails`` names what raises: ``compile``, ``fetch``, ``launch``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, sizes: tuple[int, ...]) -> None:
        self.cuda = FakeCuda(monkeypatch)
        self.log: list[str] = []
        self.fails = ""
        self.sweep = Sweep(ADAMW, lists_for(ADAMW, sizes, (F32,) * 4))
        self.sweep.device, self.sweep.transport = torch.device("cuda", 0), TRANSPORTS[name](0)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        monkeypatch.setattr(kernels, "CudaKernel", self.kernel)
        anew = functools.cache(kernels.multi_tensor_kernel.__wrapped__)
        monkeypatch.setattr(kernels, "multi_tensor_kernel", anew)

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
            self.cuda.submit(stream.ptr, lambda: _same(decode(copy, table), want))

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

    def step(self, number: int, steps: list[Step] | None = None) -> None:
        scalars = [ADAMW.uniforms(scalars_for(ADAMW, number))]
        if steps is None:
            self.sweep.launch(scalars)
        else:
            self.sweep.launch(scalars, steps, self)

    def steps(self) -> list[Step]:
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


every_transport = pytest.mark.parametrize("name", TRANSPORTS)
every_size = pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])


@every_transport
@every_size
@pytest.mark.parametrize("prepared", [True, False])
def test_nothing_is_compiled_once_pages_are_on_their_way(
    name: str, sizes: tuple[int, ...], prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, name, sizes)
    if prepared:
        device.sweep.compile()
        assert device.log == ["compile"], "nothing, or something else, was prepared"
    device.step(1, device.steps())
    device.step(2, device.steps())
    assert device.log.count("compile") == 1, "what was prepared is not what is launched"
    assert device.log[:2] == ["compile", "begin"]
    device.cuda.drain(STREAM)


@every_transport
def test_what_is_launched_is_counted_and_stands_between_the_moves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, name, FEW)
    device.step(1, device.steps())
    rest = len(device.sweep.table.host.chunks) - 3
    assert device.log[1:] == [
        *("begin", "fetch 8", "fetch 9", "launch 1"),
        *("arrive 8", "launch 2", "evict 8"),
        *("arrive 9", f"launch {rest}", "evict 9", "finish"),
    ]
    assert device.sweep.launches == 3
    device.step(2)
    assert device.sweep.launches == 4
    device.cuda.drain(STREAM)


@every_transport
@pytest.mark.parametrize(("fails", "begun"), [("compile", False), ("fetch", False), ("launch", True)])
def test_a_step_has_begun_when_its_first_launch_is_made(
    name: str, fails: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, name, FEW)
    if fails != "compile":
        device.step(1)
    device.fails = fails
    with pytest.raises(OSError, match=fails):
        device.step(2, device.steps())
    assert device.sweep.begun is begun
    assert ("finish" in device.log) == (fails != "compile")
    device.fails = ""
    device.step(3, device.steps())
    assert device.sweep.begun
    device.cuda.drain(STREAM)


def test_a_step_without_work_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, "managed", FEW)
    device.step(1)
    device.step(2, [Launch((1, 1))])
    assert not device.sweep.begun
    assert device.sweep.launches == 1


@pytest.mark.parametrize("name", ["managed", "mapped", "memcpy", "hybrid"])
def test_a_table_is_guarded_though_a_later_launch_of_the_step_failed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was launched before the failure still reads it."""
    device = Device(monkeypatch, name, MANY)
    for number in range(1, 2 * RING):
        with pytest.raises(ValueError, match="ends with pages in their slots"):
            device.step(number, device.steps()[:4])
    device.cuda.drain(STREAM)
    assert device.cuda.calls.count("wait") == 2 * RING - 1 - RING
