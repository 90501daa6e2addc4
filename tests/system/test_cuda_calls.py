"""Calls of the driver that are made in one: their order, and the first that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pagedopt.system import driver
from pagedopt.system.copies import Copy
from pagedopt.system.driver import Calls, CudaError
from pagedopt.system.look import compiled_look

THREE = [("cuStreamWaitEvent", 1, 2, 0), ("cuMemcpyAsync", 3, 4, 5, 1), ("cuEventRecord", 6, 1)]


@pytest.mark.parametrize("refused", [None, 0, 1, 2])
def test_they_are_made_in_order_up_to_the_first_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    """Where nothing is compiled."""
    made: list[Any] = []

    def call(name: str, *given: int) -> None:
        if len(made) == refused:
            raise CudaError(name, "CUDA_ERROR_UNKNOWN", "says the test")
        made.append((name, *given))

    monkeypatch.setattr(driver, "extension_with_driver", lambda: None)
    monkeypatch.setattr(driver, "call", call)
    ours = Calls(THREE)
    if refused is None:
        ours()
    else:
        with pytest.raises(CudaError, match=THREE[refused][0]):
            ours()
    assert made == THREE[:refused]


class Compiled:
    """An extension whose calls are refused from one on."""

    def __init__(self, refused: int) -> None:
        self.refused, self.asked = refused, 0

    def Calls(self, given: Any) -> Any:  # as the extension has it
        assert given == tuple(THREE)
        self.asked += 1
        return self

    def make(self) -> tuple[int, int]:
        return self.refused, 0 if self.refused == len(THREE) else 1


@pytest.mark.parametrize("refused", [0, 2, 3])
def test_the_compiled_ones_say_which_was_refused(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    compiled, said = Compiled(refused), list[Any]()
    monkeypatch.setattr(driver, "extension_with_driver", lambda: compiled)
    monkeypatch.setattr(driver, "check_code", lambda name, code: said.append((name, code)))
    ours = Calls(THREE)
    ours()
    ours()
    assert said == ([] if refused == 3 else 2 * [(THREE[refused][0], 1)])
    assert compiled.asked == 1


def test_a_call_that_there_is_not() -> None:
    """The compiled extension looks for it when the calls are given."""
    if (extension := compiled_look(wait=True)) is None:
        pytest.skip("there is no compiler")
    with pytest.raises(ValueError, match="no such call of the driver: cuNothing"):
        extension.Calls([("cuNothing", 1)])


def test_a_copy_of_several_ranges_is_a_call_for_each() -> None:
    copy = Copy(1000, 5000, 16, ranges=3, target_gap=100, source_gap=32)
    assert copy.calls(7) == [("cuMemcpyAsync", 1000 + 100 * i, 5000 + 32 * i, 16, 7) for i in range(3)]
