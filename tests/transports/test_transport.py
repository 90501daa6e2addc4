"""How a table reaches a kernel, on a played card: order, hazards, fallbacks.  No GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_ins import raising

from pagedopt.transports.by_value import ARGUMENT_BYTES, HybridTransport, StructTransport
from pagedopt.transports.choose import TRANSPORTS
from pagedopt.transports.ring import RING_SIZE, ManagedTransport, MemcpyTransport
from pagedopt.transports.transport import TABLE_AT
from tests.card.tables import Tables, change, decode, filled, run

RINGS = ("managed", "mapped", "memcpy")
in_memory = pytest.mark.parametrize("name", RINGS)


# ---- a ring of tables ----


@in_memory
def test_kernels_read_the_table_of_their_own_launch(cuda: Tables, name: str) -> None:
    """Twenty steps launched ahead, each with other words, before anything has run."""
    way, table = TRANSPORTS[name](0), filled([5, 3000])
    for step in range(20):
        change(table, step, ("scalars", "rows", "both")[step % 3])
        assert cuda.run(way, table, 7) == 1
    cuda.drain(7)
    assert cuda.count("wait") == 20 - RING_SIZE, "the host waits only for the oldest of a full ring"


@in_memory
def test_an_unchanged_table_is_sent_once_and_never_waited_for(cuda: Tables, name: str) -> None:
    way, table = TRANSPORTS[name](0), filled([5, 3000])
    for _ in range(3 * RING_SIZE):
        cuda.run(way, table, 7)
    cuda.drain(7)
    assert cuda.count("wait") == 0
    assert cuda.allocations == 1
    assert way.copied_bytes == (8 * len(table.words) if name == "memcpy" else 0)


@in_memory
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda way: pickle.loads(pickle.dumps(way))], ids=["deep", "pickle"])
def test_a_copied_transport_has_tables_of_its_own(cuda: Tables, name: str, copied: Callable[[Any], Any]) -> None:
    """The memory of the first ends with it."""
    way, table = TRANSPORTS[name](0, RING_SIZE - 1), filled([5, 3000])
    cuda.run(way, table, 7)
    other = copied(way)
    assert other._size == RING_SIZE - 1
    cuda.run(other, table, 7)
    cuda.drain(7)
    assert not {b.address for b in way._buffers} & {b.address for b in other._buffers}


@pytest.mark.parametrize("nbytes", ARGUMENT_BYTES)
@pytest.mark.parametrize("kind", [StructTransport, HybridTransport])
def test_a_copied_transport_has_the_same_limit(kind: Any, nbytes: int) -> None:
    other = copy.deepcopy(kind(0, nbytes))
    assert getattr(other, "_struct", other).argument_bytes == nbytes
    with pytest.raises(ValueError, match="argument_bytes is 8192; CUDA has the limits"):
        kind(0, 8192)


def test_memcpy_sends_what_changed_and_no_more(cuda: Tables) -> None:
    way, table = MemcpyTransport(0), filled([5, 3000])
    cuda.run_changed(way, table, RING_SIZE)
    cuda.drain(7)
    for what, words in (("scalars", table.rows_at), ("rows", table.rows_end)):
        for step in range(2 * RING_SIZE):
            if step == RING_SIZE:  # by now every place in the ring has the rows as they are
                sent = way.copied_bytes
            change(table, 10 * words + step, what)
            cuda.run(way, table, 7)
        cuda.drain(7)
        assert way.copied_bytes - sent == RING_SIZE * 8 * words, what


@in_memory
def test_a_table_without_chunks_is_not_launched(cuda: Tables, name: str) -> None:
    way = TRANSPORTS[name](0)
    assert run(way, filled([0, 0]), 7, lambda argument, count: pytest.fail("launched over nothing")) == 0
    with way.lend(filled([5, 7]), 7) as lent:
        assert list(lent.parts((1, 1))) == []


@in_memory
def test_what_fails_before_or_after_its_launch_leaves_the_transport_usable(cuda: Tables, name: str) -> None:
    way, table = TRANSPORTS[name](0), filled([5, 3000])
    for step in range(RING_SIZE + 2):
        change(table, step, "both")
        with pytest.raises(RuntimeError, match="no kernel"):
            run(way, table, 7, raising(RuntimeError("no kernel")))
        with pytest.raises(KeyError), way.lend(table, 7) as lent:  # noqa: PT012
            cuda.launch(table, 7)(*next(iter(lent.parts())))
            raise KeyError("after the launch")
    cuda.drain(7)


@in_memory
def test_a_captured_graph_keeps_its_table_for_life(cuda: Tables, name: str) -> None:
    way, tables, graphs = TRANSPORTS[name](0), (filled([5, 3000]), filled([9] * 50, seed=9)), []
    for number, table in enumerate((*tables, tables[0])):
        cuda.run(way, table, 7)
        way.prepare(table)
        graphs.append(cuda.capture(cuda.run, way, table, 7))
        change(table, 20 + number, "both")
    for step in range(3 * RING_SIZE):
        for table in tables:
            change(table, 50 + step, "both")
            cuda.run(way, table, 7)
        for graph in graphs:
            cuda.replay(graph)  # between any two steps
    cuda.drain(7)


@in_memory
def test_a_capture_that_was_not_prepared_is_refused(cuda: Tables, name: str) -> None:
    """Memory cannot be had while a graph is captured; nothing in flight may be taken instead."""
    way, table = TRANSPORTS[name](0), filled([5, 3000])
    way.prepare(filled([5]))
    cuda.run(way, table, 7)
    with pytest.raises(RuntimeError, match="call prepare"):
        cuda.capture(cuda.run, way, table, 7)


ACTS = st.sampled_from(["run", "scalars", "rows", "both", "drain", "drain some"])
STEPS = st.lists(st.tuples(ACTS, st.integers(0, 2), st.integers(7, 8)), max_size=60)


@in_memory
@given(steps=STEPS, ring=st.integers(1, RING_SIZE))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_work_reads_the_right_words(cuda: Tables, name: str, steps: list, ring: int) -> None:
    cuda.card.order.run()
    way = TRANSPORTS[name](0, ring)
    tables = [filled([5], seed=1), filled([3000, 7], seed=2), filled([8] * 70, seed=3)]
    for number, (what, which, stream) in enumerate(steps):
        if what == "drain":
            cuda.drain(stream)
        elif what == "drain some":
            cuda.drain(stream, which + 1)
        else:
            if what != "run":
                change(tables[which], 100 + number, what)
            cuda.run(way, tables[which], stream)
    for stream in (8, 7):
        cuda.drain(stream)


def test_managed_tables_are_advised_to_stay_on_the_host(cuda: Tables) -> None:
    table = filled([5])
    cuda.run(ManagedTransport(0), table, 7)
    calls = [name.removesuffix("_v2") for name in cuda.card.driver.calls if name.startswith("cuMem")]
    assert calls[:3] == ["cuMemAllocManaged", "cuMemAdvise", "cuMemAdvise"]


# ---- by value ----


@pytest.mark.parametrize("nbytes", ARGUMENT_BYTES)
@given(
    numels=st.lists(st.one_of(st.integers(0, 2), st.integers(0, 30_000)), max_size=400),
    lists=st.integers(1, 5),
    sets=st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_arguments_by_value_hold_the_whole_table(nbytes: int, numels: list[int], lists: int, sets: int) -> None:
    table = filled(numels, lists, 3, sets)
    table.rows["set"] = np.arange(len(numels)) % sets
    passed, seen, way = list[np.ndarray](), [], StructTransport(0, nbytes)
    run(way, table, 0, lambda argument, count: passed.append(argument))
    for argument in passed:
        assert argument.nbytes <= nbytes
        assert argument.view(way.dtype)["header"]["chunk_numel"].tolist() == [table.geometry.chunk_numel]
        scalars, found = decode(argument, table)
        assert scalars == table.scalars.flatten().tolist()
        seen += found
    rows = [table.rows[row : row + 1].view(np.uint64).tolist() for row in range(len(numels))]
    assert seen == [(rows[row], offset) for row, offset in table.chunks.tolist()]
    assert way.copied_bytes == 0


@pytest.mark.parametrize("nbytes", ARGUMENT_BYTES)
def test_arguments_are_rebuilt_when_the_table_changes_and_only_then(nbytes: int) -> None:
    way, table, other = StructTransport(0, nbytes), filled([5, 3000]), filled([5, 3000], seed=5)
    passed: list[np.ndarray] = []
    for subject in (table, table, other, table):
        run(way, subject, 0, lambda argument, count: passed.append(argument))
    assert passed[0] is passed[1]
    assert decode(passed[2], other)[1] != decode(passed[0], table)[1] == decode(passed[3], table)[1]
    kept = passed[0].copy()
    change(table, 77, "both")
    run(way, table, 0, lambda argument, count: passed.append(argument))
    assert decode(passed[4], table)[0] == table.scalars.flatten().tolist()
    assert passed[0].tobytes() == kept.tobytes(), "an argument handed out before was written"


@pytest.mark.parametrize("nbytes", ARGUMENT_BYTES)
def test_hybrid_goes_by_value_as_long_as_one_launch_takes_it(cuda: Tables, nbytes: int) -> None:
    way = HybridTransport(0, nbytes)
    most, scalars = divmod(StructTransport(0, nbytes).words, 4)  # rows of 4 words, no chunks: each tensor is one
    small, large = filled([5] * most, uniforms=scalars), filled([5] * (most + 1), uniforms=scalars, seed=2)
    assert len(small.words) == StructTransport(0, nbytes).words
    seen = []
    for table in (small, large, small):
        run(way, table, 7, lambda argument, count: seen.append((way.kind(table), argument.nbytes)))  # noqa: B023
    by_value = (f"TableOf<{nbytes}>", StructTransport(0, nbytes).dtype.itemsize)
    assert seen == [by_value, ("TableAt", TABLE_AT.itemsize), by_value]
    assert way.copied_bytes == 8 * len(large.words)


def test_a_hybrid_prepares_for_the_way_it_will_take(cuda: Tables) -> None:
    way, small, large = HybridTransport(0), filled([5]), filled([5] * 400, seed=2)
    for table in (small, large):
        way.prepare(table)
    cuda.replay(cuda.capture(cuda.run, way, large, 7))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_is_lent_is_of_the_kind_that_was_promised(cuda: Tables, name: str) -> None:
    """A kernel is compiled for that kind before any page is on its way."""
    way = TRANSPORTS[name](0)
    for table in (filled([5]), filled([5] * 400, seed=2), filled([5])):
        with way.lend(table, 7) as lent:
            assert lent.kind == way.kind(table)
            sizes = {argument.nbytes for argument, _ in lent.parts()}
        in_memory = lent.kind == "TableAt"
        assert sizes == {TABLE_AT.itemsize if in_memory else StructTransport(0).dtype.itemsize}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_spans_are_lent_one_by_one_from_one_table(cuda: Tables, name: str) -> None:
    way, table = TRANSPORTS[name](0), filled([5, 3000, 0, 1024, 70])
    want = [(table.rows[row : row + 1].view(np.uint64).tolist(), offset) for row, offset in table.chunks.tolist()]
    seen = []
    with way.lend(table, 7) as lent:
        cuda.drain(7)
        for span in [(0, 2), (2, 3), (3, 3), (3, len(want))]:
            for argument, count in lent.parts(span):
                found = decode(argument, table)[1]
                assert len(found) == count
                seen += found
    assert seen == want
