"""A table in device memory whose scalars a kernel fills in: what the host copies there, when, and in which order.

The card is played; the prologue is a stand-in that adds 1 to the first scalar of each row that takes a step.
``tests/kernels/test_prologue.py`` plays the kernel itself, ``tests/played/test_played_captures.py`` all of it.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch

from pagedopt import DeviceTable
from pagedopt.kernels import cuda as kernels
from pagedopt.kernels import pointer
from pagedopt.launch.on_device import STAGING_BUFFERS, DeviceStep
from pagedopt.paging.visits import Update
from pagedopt.rules import RULES
from pagedopt.system import driver
from pagedopt.tables.layout import Geometry, HostTable
from pagedopt.transports.choose import TRANSPORTS
from pagedopt.transports.ring import RING_SIZE
from pagedopt.transports.transport import TABLE_AT
from tests.card.tables import Device, Tables, change, words_at

RULE, ROWS, STREAM = RULES["adamw"], 3, 7


class World:
    """A step on a played card; ``runs`` counts prologues that have run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: Tables) -> None:
        self.cuda, self.runs = cuda, 0
        monkeypatch.setattr(kernels, "prologue_kernel", lambda rule, device: self.prologue)
        self.table = HostTable(4, [5, 3000, 1], RULE.uniform_count, ROWS, Geometry(1024, 32))
        change(self.table, 1, "both")
        self.step = DeviceStep(RULE, 0, self.table, 2, np.array([4.0, 5.0, 6.0]))
        self.tell(1)

    def tell(self, value: int) -> None:
        """Other inputs and constants."""
        self.step.inputs[:], self.step.constants[:], self.step.changed = value, value / 3, True
        self.table.stamp += 1

    def prologue(self, argument: np.ndarray, rows: int, stream: kernels.Stream) -> None:
        at = argument.view(kernels.PROLOGUE_AT)[0]
        told, want = self.step.inputs.copy(), self.table.row_words.copy()
        assert (int(at["rows"]), int(at["stride"]), int(at["seed_at"])) == (ROWS, RULE.uniform_count, -1)
        assert rows == ROWS

        def run() -> None:
            inputs = words_at(int(at["inputs"]), told.size).reshape(told.shape)
            assert np.array_equal(inputs, told), "the prologue reads what was told later, or nothing"
            scalars = words_at(int(at["table"]), self.table.rows_at).view(np.float64)
            scalars.reshape(ROWS, -1)[:, 0] += 1
            there = words_at(int(at["table"]), len(self.table.words))[self.table.rows_at : self.table.rows_end]
            assert np.array_equal(there.view(np.int64).reshape(want.shape), want)
            self.runs += 1

        inputs, rows_at = int(at["inputs"]), int(at["table"])
        read = [(inputs, inputs + told.nbytes), (rows_at, rows_at + self.table.words.nbytes)]
        self.cuda.card.kernel(stream.ptr, "a prologue", read, [(rows_at, rows_at + 8 * self.table.rows_at)], run)

    def launch(self, stream: int = STREAM, spans: Any = (None,)) -> int:
        """A step in as many launches as there are spans; the number of kernels."""
        kernels = 0
        with self.step.lend(self.table, stream) as lent:
            for span in spans:
                for argument, count in lent.parts(span):
                    assert int(argument.view(TABLE_AT)["words"][0]) == self.step.address
                    assert count > 0
                    kernels += 1
        return kernels

    @property
    def firsts(self) -> list[float]:
        """The first scalar of each row, on the device."""
        return words_at(self.step.address, self.table.rows_at).view(np.float64).reshape(ROWS, -1)[:, 0].tolist()

    @property
    def counters(self) -> list[float]:
        return words_at(self.step.counter_at(0), ROWS).view(np.float64).tolist()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, cuda: Tables) -> World:
    return World(monkeypatch, cuda)


def test_one_prologue_runs_before_the_launches_of_a_step(world: World) -> None:
    chunks = len(world.table.chunk_words)
    assert world.launch(spans=((0, 1), (1, chunks), (chunks, chunks))) == 2
    world.cuda.drain(STREAM)
    assert world.runs == 1
    assert world.launch() == 1
    world.cuda.drain(STREAM)
    assert world.runs == 2


def test_what_has_not_changed_is_not_copied_and_scalars_and_counts_are_the_device_s(world: World) -> None:
    before = world.table.scalars[:, 0].tolist()
    for _ in range(3):
        world.launch()
        world.cuda.drain(STREAM)
    assert world.step.copies == 1
    assert world.firsts == [first + 3 for first in before]
    words_at(world.step.counter_at(0), ROWS).view(np.float64)[:] = 9.0  # a prologue counts there
    world.tell(2)
    world.launch()
    world.cuda.drain(STREAM)
    assert world.step.copies == 2
    assert world.firsts == [first + 4 for first in before]
    assert world.counters == [9.0] * ROWS


def test_what_is_told_on_another_stream_waits_for_the_launches_before(world: World) -> None:
    """And a launch of the first stream for what was told there."""
    for number, stream in enumerate((STREAM, STREAM + 1, STREAM + 1, STREAM)):
        world.tell(number)
        world.launch(stream)
    for stream in (STREAM + 1, STREAM):
        world.cuda.drain(stream)
    assert world.runs == 4


def test_counters_begin_where_they_are_told_to(world: World) -> None:
    world.launch()
    world.cuda.drain(STREAM)
    assert world.counters == [4.0, 5.0, 6.0]


def test_each_step_reads_what_was_told_before_it(world: World) -> None:
    for value in range(2, 3 * STAGING_BUFFERS):
        world.tell(value)
        change(world.table, value, "rows")
        world.launch()
    world.cuda.drain(STREAM)
    assert world.runs == 3 * STAGING_BUFFERS - 2
    assert world.cuda.count("wait"), "more copies than buffers, and none was waited for"


def test_constants_lie_where_inputs_are_told_they_do(world: World) -> None:
    world.step.constants[1, 2], world.step.changed = 0.125, True
    world.launch()
    world.cuda.drain(STREAM)
    assert words_at(world.step.constant_at(1, 2), 1).view(np.float64).tolist() == [0.125]


def test_in_a_capture_the_table_is_there_at_once_and_no_event_is_recorded(world: World) -> None:
    graph = world.cuda.capture(world.launch, stream=STREAM)
    before = world.firsts
    assert world.step.copies == 0
    for count in range(1, 4):
        world.cuda.replay(graph, STREAM)
        assert world.firsts == [first + count for first in before]
    world.tell(5)
    assert world.step.publish(world.table, STREAM)
    assert not world.step.publish(world.table, STREAM)
    world.cuda.drain(STREAM)
    kept = words_at(world.step.address, len(world.table.words) + world.step.inputs.size)
    assert kept[-1] == 5
    assert world.firsts == [first + 3 for first in before]


def test_a_copy_whose_buffer_could_not_be_had_can_be_queued_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room on the host, or a Ctrl-C in the allocation."""

    def full(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(driver, "allocate_pinned", full)
        for _ in range(2):
            with pytest.raises(MemoryError):
                world.launch()
    before = world.table.scalars[:, 0].tolist()
    assert world.launch() == 1
    world.cuda.drain(STREAM)
    assert world.firsts == [first + 1 for first in before]


# --- the one place that launches, on a played card: what comes before what, and what is left when it fails ------------


#: Tensors whose table goes by value, and so many that it does not.
FEW, MANY = (700, 1, 3, 2000), (700, 1, 3, 2000) * 25

every_transport = pytest.mark.parametrize("name", TRANSPORTS)


@pytest.mark.parametrize(("name", "sizes"), [*((name, FEW) for name in TRANSPORTS), ("struct", MANY), ("hybrid", MANY)])
@pytest.mark.parametrize("prepared", [True, False])
def test_nothing_is_compiled_once_pages_are_on_their_way(
    name: str, sizes: tuple[int, ...], prepared: bool, cuda: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, cuda, name, sizes)
    if prepared:
        device.sweep.compile()
        assert device.log == ["compile"], "nothing, or something else, was prepared"
    device.step(1, device.steps())
    device.step(2, device.steps())
    assert device.log.count("compile") == 1, "what was prepared is not what is launched"
    assert device.log[:2] == ["compile", "begin"]
    device.drain()


@every_transport
def test_what_is_launched_is_counted_and_stands_between_the_moves(
    name: str, cuda: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, cuda, name, FEW)
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
    device.drain()


@every_transport
@pytest.mark.parametrize(("fails", "begun"), [("compile", False), ("fetch", False), ("launch", True)])
def test_a_step_has_begun_when_its_first_launch_is_made(
    name: str, fails: str, begun: bool, cuda: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, cuda, name, FEW)
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
    device.drain()


def test_a_step_without_work_has_not_begun(cuda: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, cuda, "managed", FEW)
    device.step(1)
    device.step(2, [Update((1, 1))])
    assert not device.sweep.begun
    assert device.sweep.launches == 1


@pytest.mark.parametrize("name", ["managed", "mapped", "memcpy", "hybrid"])
def test_a_table_is_guarded_though_a_later_launch_of_the_step_failed(
    name: str, cuda: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was launched before the failure still reads it."""
    device = Device(monkeypatch, cuda, name, MANY)
    for number in range(1, 2 * RING_SIZE):
        with pytest.raises(ValueError, match="ends with pages in their slots"):
            device.step(number, device.steps()[:4])
    device.drain()
    assert device.cuda.count("wait") == 2 * RING_SIZE - 1 - RING_SIZE


# --- the table for kernels of one's own, walked by a Numba kernel on the CPU (tests/gpu has a CuPy RawKernel) ---------


@numba.njit
def scale_into(rows, by):  # type: ignore[no-untyped-def]
    for i in range(len(rows)):
        source = numba.carray(pointer(rows[i, 0]), rows[i, 2], numba.float32)
        target = numba.carray(pointer(rows[i, 1]), rows[i, 2], numba.float32)
        for j in range(rows[i, 2]):
            target[j] = by * source[j]


def test_a_numba_kernel_reads_the_rows() -> None:
    sources = [torch.randn(n) for n in (3, 0, 4097)]
    targets = [torch.full_like(t, 7.0) for t in sources]
    table = DeviceTable([sources, targets], writes=[1])
    scale_into(table.rows, 2.0)
    assert all(torch.equal(t, 2 * s) for s, t in zip(sources, targets, strict=True))
    moved = [t.clone() for t in sources]
    assert table.refresh([moved, None])
    moved[0].fill_(5.0)
    scale_into(table.rows, 2.0)
    assert targets[0].tolist() == [10.0] * 3
    with table.rows_on_device() as address:
        assert address == table.rows.ctypes.data


@pytest.mark.parametrize(
    ("writes", "error", "text"),
    [(0, TypeError, r"writes is 0; give the indices of the lists that are overwritten, e\.g\. writes=\[0\]"),
     ("0", TypeError, "writes is '0'; give the indices"),
     ([2], ValueError, "writes names list 2; there is 0 to 1"),
     ([0, -1], ValueError, "writes names list -1; there is 0 to 1")],
)  # fmt: skip
def test_lists_to_write_that_are_not_there_are_refused(writes: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DeviceTable([[torch.ones(2)], [torch.ones(2)]], writes=writes)
