"""Tables of many optimizers in memory that they share, on a played card."""

from __future__ import annotations

import functools

import pytest
from held import together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from played_tables import Tables, change, filled, run
from stand_ins import raising

from pagedopt.system.cuda import driver
from pagedopt.tables.layout import HostTable
from pagedopt.transports import MemcpyTransport
from pagedopt.transports.choose import TRANSPORTS, pooled
from pagedopt.transports.pool import ALLOCATION, SMALL, PooledTransport

in_memory = pytest.mark.parametrize("name", ["managed", "mapped", "memcpy"])


@in_memory
def test_a_thousand_tables_take_a_few_buffers_and_nobody_waits(cuda: Tables, name: str) -> None:
    owners = [(pooled(name, 0), filled([99], 4, 6, 2, seed=i)) for i in range(1000)]
    before = cuda.allocations  # of those that ask what works
    for step in range(3):
        for i, (way, table) in enumerate(owners):
            change(table, 1000 * (step + 1) + i, "both")  # no two are alike
            cuda.run(way, table, 7)
        assert not cuda.count("wait")
        cuda.drain(7)
        assert cuda.allocations - before <= 1000 * 512 // ALLOCATION + 1, "used again once the device has read it"


@in_memory
def test_a_large_table_has_places_of_its_own(cuda: Tables, name: str) -> None:
    way, table = pooled(name, 0), filled([5] * 400)
    assert table.words.nbytes > SMALL
    before = cuda.allocations
    for _ in range(5):
        cuda.run(way, table, 7)
    cuda.drain(7)
    assert cuda.allocations - before == 1
    assert way.copied_bytes == (table.words.nbytes if name == "memcpy" else 0)


def test_what_is_no_ring_is_not_pooled(cuda: Tables) -> None:
    class Own(MemcpyTransport):
        pass

    assert type(pooled(Own, 0)) is Own
    assert not isinstance(pooled("struct", 0), PooledTransport)


@in_memory
def test_a_launch_that_fails_gives_its_place_back(cuda: Tables, name: str) -> None:
    way, table = pooled(name, 0), filled([5])
    for step in range(2000):
        change(table, step, "scalars")
        with pytest.raises(RuntimeError, match="no kernel"):
            run(way, table, 7, raising(RuntimeError("no kernel")))
        cuda.drain(7)
    assert cuda.allocations <= 2


@in_memory
def test_a_table_that_cannot_be_sent_gives_its_place_back(
    cuda: Tables, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, table = pooled(name, 0), filled([5])
    before = cuda.allocations
    monkeypatch.setattr(TRANSPORTS[name], "publish", raising(RuntimeError("no copy")))
    for step in range(600):
        change(table, step, "scalars")
        with pytest.raises(RuntimeError, match="no copy"):
            way.lend(table, 7)
    assert cuda.allocations - before == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["run", "both", "drain"]), st.integers(0, 4), st.integers(7, 8)), max_size=80
)


@in_memory
@given(steps=STEPS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_work_reads_the_right_words(cuda: Tables, name: str, steps: list) -> None:
    cuda.card.order.run()
    tables: list[HostTable] = [filled([5 + i], seed=i) for i in range(5)]
    ways = [pooled(name, 0) for _ in tables]
    for number, (what, which, stream) in enumerate(steps):
        if what == "drain":
            cuda.drain(stream, which)
        else:
            if what == "both":
                change(tables[which], 100 + number, "both")
            cuda.run(ways[which], tables[which], stream)
    cuda.drain(8)
    cuda.drain(7)


def test_the_hazard_is_real(cuda: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    way, table = pooled("managed", 0), filled([5])
    monkeypatch.setattr(driver.Event, "has_passed", lambda self: True)
    cuda.run_changed(way, table, 2 * ALLOCATION // 256)
    with pytest.raises(AssertionError, match=r"(?s)(?=.*nothing orders the two).*rewritten under a launch"):
        cuda.drain(7)
    cuda.card.order.faults.clear()


def test_two_threads_never_have_one_place(cuda: Tables) -> None:
    way, seen, inside = pooled("managed", 0), list[int](), list[int]()

    def lend(table: HostTable) -> None:
        for _ in range(300):
            with way.lend(table, 7) as lent:
                seen.append(lent.address)
                assert lent.table is table  # type: ignore[attr-defined]
                inside.append(lent.address)
                assert len(set(inside)) == len(inside)
                inside.remove(lent.address)

    assert together(*(functools.partial(lend, filled([5], seed=i)) for i in range(2))) == []
    assert len(seen) == 600
