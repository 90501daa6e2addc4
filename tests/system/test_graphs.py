"""What a graph keeps alive: the destructor, called as CUDA calls it, lets go of it at the next call."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref

import pytest
from gpu_support import count_held

from pagedopt.system import graphs


class Kept:
    """Something that can be watched."""


def destroyed(held: graphs.Held) -> None:
    """Run the destructor on another thread, as the driver does."""
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(graphs.destructor())
    thread = threading.Thread(target=run, args=(held.address,))
    thread.start()
    thread.join()


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> list[graphs.Held]:
    held: list[graphs.Held] = []
    monkeypatch.setattr(graphs, "_held", held)
    for _ in range(3):
        graphs.hold(Kept())
    return held


def test_what_is_held_lives_until_the_graph_is_gone(holding: list[graphs.Held]) -> None:
    seen = [weakref.ref(held.kept) for held in holding]
    assert count_held() == 3
    gone = holding[1]
    assert not gone.released
    destroyed(gone)
    assert gone.released
    assert [watch() is None for watch in seen] == [False, False, False], "the destructor itself frees nothing"
    graphs.drop_released()
    assert [watch() is None for watch in seen] == [False, True, False]
    assert count_held() == 2
    assert gone not in holding


def test_what_lets_go_may_capture_and_let_go_itself(holding: list[graphs.Held]) -> None:
    class Nested:
        def __del__(self) -> None:
            graphs.drop_released()
            graphs.hold(Kept())

    holding[0].kept = Nested()
    destroyed(holding[0])
    graphs.drop_released()
    assert len(holding) == 3


def test_a_semaphore_outlives_whoever_waits_for_it(holding: list[graphs.Held]) -> None:
    watch, held = weakref.ref(holding[0].kept), holding[0]
    before = sys.getrefcount(held)
    destroyed(held)
    graphs.drop_released()
    assert watch() is None
    assert sys.getrefcount(held) == before - 2, "the list's reference, and the one that outlives it"
