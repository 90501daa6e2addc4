"""An interrupt at a line, or a failure of a call, while state is on a GPU or partly on the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_errors import assert_clean
from faults import Scene, scenes
from shots import EVERY, each, failure_at, judge_failure, judge_signal, judge_two, signal_at, two_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    *([pytest.mark.timeout(7200)] if EVERY else []),
]


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    yield
    assert_clean()


@pytest.mark.parametrize("scene", scenes("cuda"), ids=str)
def test_a_signal_at_any_line(scene: Scene) -> None:
    each(scene, signal_at, judge_signal)


@pytest.mark.parametrize("scene", scenes("cuda"), ids=str)
def test_a_failure_of_any_call(scene: Scene) -> None:
    each(scene, failure_at, judge_failure)


@pytest.mark.parametrize("scene", [s for s in scenes("cuda") if s.operation in ("step", "load used")], ids=str)
def test_a_second_interrupt(scene: Scene) -> None:
    each(scene, two_at, judge_two)
