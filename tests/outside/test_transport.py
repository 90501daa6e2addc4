"""A transport from outside: the tables that it lends are right, whoever asks for it; what is none is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_support import DEVICES, NEEDED

from pagedopt import DeviceTable, PagedAdamW, Sweep, multi_tensor_apply
from pagedopt.foreach_ops import foreach_norm
from pagedopt.rules import add
from pagedopt.transports import MemcpyTransport, StructTransport, Transport
from tests.card.tables import STREAM, Device, Tables
from tests.loads import MOVES
from tests.specs import CASES
from tests.world import RESIDENT, Side, Worlds, parameters

from .transport import Recorder

FEW = (700, 1, 3, 2000)


@pytest.fixture(autouse=True)
def record() -> Iterator[list[tuple[int, int, int]]]:
    Recorder.record.clear()
    yield Recorder.record
    Recorder.record.clear()


def test_its_tables_are_read_as_they_were_when_launched(
    cuda: Tables, monkeypatch: pytest.MonkeyPatch, record: list
) -> None:
    """Ten steps ahead of a played card, pages among them."""
    device = Device(monkeypatch, cuda, Recorder, FEW)
    chunks = len(device.sweep.table.host.chunks)
    for number in range(1, 11):
        device.step(number, device.steps() if number % 2 else None)
    device.cuda.drain(STREAM)
    assert record == [(0, len(FEW), chunks)] * 10
    assert device.cuda.count("pinned") == 4, "the tables of the one that it wraps are in a ring"
    assert device.sweep.launches == 5 * 3 + 5


def test_a_captured_graph_is_prepared_by_the_one_within(
    cuda: Tables, monkeypatch: pytest.MonkeyPatch, record: list
) -> None:
    device = Device(monkeypatch, cuda, Recorder, FEW)
    device.sweep.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.step(1)
    for _ in range(2):
        graph.replay()
        cuda.drain(STREAM)
    assert len(record) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_lends_through_it_on_a_card_and_so_do_its_copies(device: str, record: list) -> None:
    sides = Side("recorded", {"transport": Recorder}), Side("recorded in part", {"transport": Recorder}, share=0.4)
    worlds = Worlds(CASES["adamw"], RESIDENT, *sides, device=device).step(3)
    for act in ("deepcopy", "pickle"):
        before = len(record)
        worlds.do(MOVES[act]).step(3)
        assert (len(record) >= before + 3) == (device == "cuda")
        assert all(world.optimizer.transport is Recorder for world in worlds.ours[1:])
    assert not worlds.over


def test_on_a_cpu_it_is_not_needed(record: list) -> None:
    multi_tensor_apply(add, [[torch.ones(3)], [torch.ones(3)]], {"alpha": 1.0}, transport=Recorder)
    DeviceTable([[torch.ones(3)]], transport=Recorder)
    assert record == []


def test_what_is_no_transport_is_refused_at_once() -> None:
    lists = [[torch.ones(3)], [torch.ones(3)]]
    takers: list[Any] = [
        lambda transport: PagedAdamW(parameters(), transport=transport),
        lambda transport: DeviceTable(lists, transport=transport),
        lambda transport: Sweep(add, lists, transport=transport),
        lambda transport: multi_tensor_apply(add, lists, {"alpha": 1.0}, transport=transport),
    ]

    class Mute(Transport):
        pass

    class Silent(Recorder):
        lend = Transport.lend

    cases: list[tuple[Any, type[Exception], str]] = [
        ("pigeon", ValueError, "transport is 'pigeon'; there are hybrid, .*or a subclass of pagedopt.transports"),
        (5, TypeError, "transport is 5; give a subclass of pagedopt.transports.Transport, or one of hybrid, managed"),
        ([], TypeError, r"transport is \[\]; give a subclass"),
        (None, TypeError, "transport is None; give a subclass"),
        (dict, TypeError, "transport is <class 'dict'>; give a subclass"),
        (Transport, TypeError, "transport is <class 'pagedopt.transports.transport.Transport'>; give a subclass"),
        (Mute, TypeError, "transport Mute has no kind and no lend; a transport defines kind and lend"),
        (Silent, TypeError, "transport Silent has no lend; a transport"),
    ]
    for take in takers:
        for transport, error, text in cases:
            with pytest.raises(error, match=text):
                take(transport)
    for take in takers[:2]:
        with pytest.raises(TypeError, match="is an object of StructTransport; give the class here, transport="):
            take(StructTransport(0))
    for take in takers[2:]:
        take(StructTransport(0))  # these are for one device, whose objects they take


@pytest.mark.parametrize("mark", [pytest.param(None, marks=NEEDED)])
def test_whoever_launches_on_a_card_lends_through_it(mark: None, record: list) -> None:
    ones, twos = ([torch.full((n,), value, device="cuda") for n in (3, 5000)] for value in (1.0, 2.0))
    for _ in range(2):
        multi_tensor_apply(add, [ones, twos], {"alpha": 1.0}, transport=Recorder)
    assert [t.unique().tolist() for t in ones] == [[5.0], [5.0]]
    Sweep(add, [ones, twos], transport=Recorder).run({"alpha": 1.0})
    assert [t.unique().tolist() for t in ones] == [[7.0], [7.0]]
    assert foreach_norm(ones, transport=Recorder)[0].item() == pytest.approx(7 * 3**0.5)
    with DeviceTable([ones], transport=Recorder).rows_on_device() as rows:
        assert rows
    assert len(record) == 2 + 1 + 2 + 1
    with pytest.raises(ValueError, match="passes tables by value"):
        DeviceTable([ones], transport=StructTransport)
    with pytest.raises(ValueError, match="passes tables by value"):
        DeviceTable([ones], transport=type("Vague", (Recorder,), {"in_memory": False}))
    assert DeviceTable([ones], transport=MemcpyTransport)
