"""Random histories of a pointer table: it holds what the tensors are now, or refuses and holds what they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import scalars_for

from pagedopt import PointerTable, Sweep
from pagedopt.rules import RULES

SHAPES = ((5,), (4, 6), (2, 3, 4), (1, 7), (0,), (33,))
#: What may happen to a tensor; None of these is asked to be legal.
EVENTS = (
    "nothing", "move", "move both", "absent", "shape", "dtype", "transpose", "free", "resize", "value", "alias",
    "offset",
)  # fmt: skip
HISTORY = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1), st.integers(0, len(SHAPES) - 1)), max_size=12)


def alter(lists: list[list[torch.Tensor | None]], event: str, j: int, i: int) -> None:
    old = lists[j][i]
    base = torch.randn(SHAPES[i]) if old is None else old
    if event == "move":
        lists[j][i] = base.clone() if base.untyped_storage().nbytes() else torch.randn(SHAPES[i])
    elif event == "move both":
        lists[0][i], lists[1][i] = torch.randn(SHAPES[i]), torch.randn(SHAPES[i])
    elif event == "absent":
        lists[j][i] = None
    elif event == "shape":
        lists[j][i] = torch.randn((*SHAPES[i][:-1], SHAPES[i][-1] + 1))
    elif event == "dtype":
        lists[j][i] = torch.randn(SHAPES[i]).double()
    elif event == "transpose":
        lists[j][i] = torch.randn(SHAPES[i][::-1]).permute(*reversed(range(len(SHAPES[i]))))
    elif event == "free" and old is not None:
        old.untyped_storage().resize_(0)
    elif event == "resize" and old is not None:
        old.resize_(*SHAPES[i][:-1], SHAPES[i][-1] + 2)
    elif event == "value" and old is not None and old.untyped_storage().nbytes():
        old.zero_()
    elif event == "alias":
        lists[j][i] = lists[1 - j][i]
    elif event == "offset":
        lists[j][i] = torch.randn(base.numel() + 3)[3:].view(base.shape)


def legal(lists: list[list[torch.Tensor | None]], strides: list[tuple[int, ...]]) -> bool:
    """The rules said once more, one tensor at a time."""
    for j, tensors in enumerate(lists):
        for i, tensor in enumerate(tensors):
            if tensor is None:
                if j == 0:
                    return False
                continue
            free = tensor.numel() and not tensor.untyped_storage().nbytes()
            if free or tensor.shape != SHAPES[i] or tensor.dtype is not torch.float32:
                return False
            pairs = zip(SHAPES[i], tensor.stride(), strides[i], strict=True)
            if tensor.numel() > 1 and any(n != 1 and a != b for n, a, b in pairs):
                return False
    return True


def state(lists: list[list[torch.Tensor | None]]) -> list[list[int | None]]:
    return [[None if t is None else t.data_ptr() for t in tensors] for tensors in lists]


@given(HISTORY)
@settings(deadline=None, max_examples=250)
def test_refresh_is_true_exactly_when_something_changed(history: list[tuple[str, int, int]]) -> None:
    now: list[list[torch.Tensor | None]] = [[torch.randn(s) for s in SHAPES] for _ in range(2)]
    table = PointerTable(now, writes=[0])
    strides = [t.stride() for t in now[0] if t is not None]
    last = [list(tensors) for tensors in now]
    seen = state(now)
    for event, j, i in history:
        alter(now, event, j, i)
        before, stamp = table.host.words.copy(), table.host.stamp
        if not legal(now, strides):
            with pytest.raises((ValueError, TypeError), match=r"tensor \d"):
                table.refresh(now)
            assert np.array_equal(table.host.words, before)
            assert table.host.stamp == stamp
            now = [list(tensors) for tensors in last]  # put back what can be put back
            for tensor in (t for tensors in now for t in tensors):
                if tensor is not None and (tensor.numel() and not tensor.untyped_storage().nbytes()):
                    return  # freed for good: nothing legal can follow
            if not legal(now, strides):
                return
            continue
        assert table.refresh(now) is (state(now) != seen)
        seen, last = state(now), [list(tensors) for tensors in now]
        rows = table.host.rows
        assert rows["address"].tolist() == [
            [0 if t is None else t.data_ptr() for t in row] for row in zip(*now, strict=True)
        ]
        missing = [any(t is None for t in row) for row in zip(*now, strict=True)]
        sizes = [int(np.prod(shape)) for shape in SHAPES]
        assert rows["numel"].tolist() == [0 if gone else n for n, gone in zip(sizes, missing, strict=True)]
        assert table.refresh(now) is False


def test_a_refused_refresh_leaves_tensors_and_sweep_as_they_were() -> None:
    rule = RULES["sgd"]
    weights, grads = [torch.ones(5), torch.ones(4, 6)], [torch.ones(5), torch.ones(4, 6)]
    sweep = Sweep(rule, [weights, grads])
    bad = [torch.full((5,), 9.0), torch.full((6, 4), 9.0)]
    with pytest.raises(ValueError, match="tensor 1 of grad has shape"):
        sweep.refresh([weights, bad])
    assert all((w == 1).all() for w in weights)
    sweep.run(scalars_for(rule, lr=0.25, weight_decay=0.0))  # still the good gradients, not 9
    assert all((w == 0.75).all() for w in weights)
    assert all((b == 9).all() for b in bad)


@pytest.mark.parametrize("j", [0, 1])
def test_a_view_into_freed_memory_is_refused(j: int) -> None:
    """Its address is its offset, which is not 0."""
    lists = [[torch.randn(8)[3:], torch.randn(5)] for _ in range(2)]
    table = PointerTable(lists, writes=[0])
    lists[j][0].untyped_storage().resize_(0)
    assert lists[j][0].data_ptr() == 12
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tensor 0 of .* has no memory"):
            table.refresh(lists)
