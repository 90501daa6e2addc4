"""The one place that launches, on a played card: what comes before what, and what is left when it fails."""

from __future__ import annotations

import pytest
from played_sweep import STREAM, Device
from played_tables import Tables

from pagedopt.paging.visits import Update
from pagedopt.transports.choose import TRANSPORTS
from pagedopt.transports.ring import RING_SIZE

#: Tensors whose table goes by value, and so many that it does not.
FEW, MANY = (700, 1, 3, 2000), (700, 1, 3, 2000) * 60

every_transport = pytest.mark.parametrize("name", TRANSPORTS)
every_size = pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])


@every_transport
@every_size
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
    device.cuda.drain(STREAM)


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
    device.cuda.drain(STREAM)


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
    device.cuda.drain(STREAM)


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
    device.cuda.drain(STREAM)
    assert device.cuda.count("wait") == 2 * RING_SIZE - 1 - RING_SIZE
