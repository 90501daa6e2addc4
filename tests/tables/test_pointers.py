"""Pointer tables: what is refused, by list and index, and what is noticed when tensors change."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedopt import PointerTable

NAMES = ("weights", "grads")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def build(*lists: Sequence[Any], writes: Sequence[int] = ()) -> PointerTable:
    return PointerTable(lists, writes=writes, names=NAMES[: len(lists)] + ("third",) * (len(lists) - 2))


def assert_refused(
    table: PointerTable,
    lists: Sequence[Any],
    message: str,
    kind: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> None:
    """A refresh is refused, and changes nothing."""
    words, stamp, dtypes = table.host.words.copy(), table.host.stamp, list(table.dtypes)
    with pytest.raises(kind, match=message):
        table.refresh(lists)
    assert np.array_equal(table.host.words, words)
    assert (table.host.stamp, table.dtypes) == (stamp, dtypes)


def addresses(*lists: Sequence[torch.Tensor | None]) -> list[list[int]]:
    return [[0 if t is None else t.data_ptr() for t in row] for row in zip(*lists, strict=True)]


# ---- what is refused ----


def swapped(index: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda good: [*good[:index], value, *good[index + 1 :]]


Case = tuple[Callable[[list[Any]], list[Any]], type[Exception], str]
REFUSED: dict[str, Case] = {
    "a number": (swapped(1, 3.5), TypeError, "tensor 1 of grads is float, not a tensor"),
    "an array": (swapped(2, np.ones(7)), TypeError, "tensor 2 of grads is ndarray, not a tensor"),
    "sparse": (swapped(1, torch.eye(4, 6).to_sparse()), TypeError, "tensor 1 of grads is sparse"),
    "a shape": (swapped(1, torch.ones(6, 4)), ValueError, r"tensor 1 of grads has shape \(6, 4\), the .* \(4, 6\)"),
    "a flat shape": (swapped(1, torch.ones(24)), ValueError, r"tensor 1 of grads has shape \(24,\)"),
    "strides": (swapped(1, torch.ones(6, 4).t()), ValueError, r"1 of grads has strides \(1, 4\), weights has \(6, 1\)"),
    "gaps": (swapped(1, torch.ones(4, 12)[:, ::2]), ValueError, r"tensor 1 of grads has strides \(12, 2\)"),
    "expanded": (swapped(1, torch.ones(6).expand(4, 6)), ValueError, r"tensor 1 of grads has strides \(0, 1\)"),
    "a device": (swapped(2, torch.ones(7, device="meta")), ValueError, "2 of grads is on meta, the table is on cpu"),
    "a dtype": (swapped(2, torch.ones(7).double()), TypeError, r"tensor 2 of grads is torch\.float64; it should be"),
    "an integer": (swapped(2, torch.ones(7).int()), TypeError, r"tensor 2 of grads is torch\.int32; it should be"),
    "one missing": (lambda good: good[:-1], ValueError, "grads has 2 tensors, the table has 3|grads: 2"),
    "one more": (lambda good: [*good, torch.ones(1)], ValueError, "grads has 4 tensors, the table has 3|grads: 4"),
}


@pytest.mark.parametrize(("spoil", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_lists_that_do_not_fit_are_refused_and_change_nothing(spoil: Any, kind: type[Exception], message: str) -> None:
    weights, good = tensors((5,), (4, 6), (7,)), tensors((5,), (4, 6), (7,))
    with pytest.raises(kind, match=message):
        build(weights, spoil(good))
    table = build(weights, good, writes=[0])
    moved = [w.clone() for w in weights]
    assert_refused(table, [moved, spoil([g.clone() for g in good])], message, kind)
    assert table.refresh([weights, good]) is False
    assert table.refresh([moved, good]) is True


def test_a_refused_list_does_not_settle_the_dtype_of_an_empty_one() -> None:
    table = build(tensors((3,), (4,)), [None, None])
    text = r"tensor 1 of grads is torch\.float32; it should be torch\.bfloat16"
    assert_refused(table, [None, [torch.ones(3).bfloat16(), torch.ones(4)]], text, TypeError)
    assert table.refresh([None, tensors((3,), (4,))]) is True


def test_the_first_list_has_none_absent() -> None:
    with pytest.raises(TypeError, match="tensor 1 of weights is NoneType"):
        build([torch.ones(2), None], tensors((2,), (2,)))
    table = build(tensors((2,)), tensors((2,)))
    assert_refused(table, [[None], None], "tensor 0 of weights is NoneType", TypeError)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 6)[:, ::2], torch.ones(6).expand(4, 6), torch.ones(3, 4, 6)[:, :2], torch.ones(10).unfold(0, 4, 2)],
    ids=["every second", "expanded", "slice of a middle", "windows"],
)
def test_a_tensor_with_gaps_or_overlaps_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"tensor 1 of weights of shape .* has gaps or overlaps itself"):
        build([torch.ones(3), tensor])


def test_no_lists_are_refused_and_empty_lists_are_not() -> None:
    with pytest.raises(ValueError, match="no lists"):
        PointerTable([])
    table = build([], [])
    assert (len(table), table.device.type, len(table.host.chunks)) == (0, "cpu", 0)
    assert table.refresh([[], []]) is False


# ---- what is noticed ----


def test_lists_of_other_lengths_are_refused_though_together_they_are_as_many() -> None:
    weights, grads = tensors((5,), (5,), (5,)), tensors((5,), (5,), (5,))
    table = build(weights, grads)
    for _ in range(3):
        assert table.refresh([weights, grads]) is False
        with pytest.raises(ValueError, match="weights has 4 tensors, the table has 3"):
            table.refresh([[*weights, grads[0]], grads[1:]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.resize_(5, 6), "has shape"),
        (lambda t: t.resize_(3, 6), "has shape"),  # keeps its memory and its address
        (lambda t: t.t_(), "has shape"),
        (lambda t: t.as_strided_((4, 6), (1, 4)), "has strides"),  # same size at the same address
        (lambda t: t.unsqueeze_(0), "has shape"),
        (lambda t: t.set_(torch.ones(4, 7)), "has shape"),
        (lambda t: setattr(t, "data", t.data.view(torch.int32)), "is torch.int32"),  # same address, other meaning
    ],
    ids=["grown", "shrunk", "transposed", "restrided", "one more dimension", "set", "reinterpreted"],
)
def test_a_tensor_altered_in_place_is_noticed(change: Callable[[torch.Tensor], Any], message: str) -> None:
    weights, grads = tensors((3,), (4, 6)), tensors((3,), (4, 6))
    table = build(weights, grads)
    change(grads[1])
    assert_refused(table, [weights, grads], f"tensor 1 of grads {message}", (ValueError, TypeError))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__)
@pytest.mark.parametrize("made_in", [torch.no_grad, torch.enable_grad], ids=lambda m: m.__name__)
def test_the_autograd_mode_is_no_change(made_in: Any, mode: Any) -> None:
    weights, grads = [torch.ones(5, requires_grad=True), torch.ones(3, 4)], tensors((5,), (3, 4))
    with made_in():
        table = build(weights, grads, writes=[0])
    with mode():
        assert table.refresh([weights, grads]) is False
    weights[0].requires_grad_(False)
    table.refresh([weights, grads])
    assert table.refresh([weights, grads]) is False


# ---- absent tensors ----


def test_absent_tensors_come_and_go() -> None:
    weights, grads = tensors((5,), (7,), (0,)), tensors((5,), (7,), (0,))
    table = build(weights, [grads[0], None, None])
    assert table.host.rows["numel"].tolist() == [5, 0, 0]
    assert table.absent == [1, 2]
    assert table.refresh([weights, [grads[0], None, None]]) is False
    assert table.refresh([weights, grads]) is True
    assert table.host.rows["numel"].tolist() == [5, 7, 0]
    assert table.refresh([None, [None, grads[1], grads[2]]]) is True
    assert table.host.rows["numel"].tolist() == [0, 7, 0]
    assert table.host.rows["address"].tolist() == addresses(weights, [None, *grads[1:]])
    assert table.moved([weights, grads]) == [("grads", 0)]


def test_a_list_of_absent_tensors_takes_the_dtype_that_comes() -> None:
    weights = tensors((5,), (7,))
    table = build(weights, [None, None])
    assert table.dtypes == [torch.float32, None]
    assert table.refresh([weights, tensors((5,), (7,), dtype=torch.bfloat16)]) is True
    assert table.dtypes == [torch.float32, torch.bfloat16]


# ---- layouts ----


def test_any_dense_order_of_dimensions_is_taken() -> None:
    nhwc = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(2)]
    transposed = [torch.randn(6, 4).t() for _ in range(2)]
    permuted = [torch.randn(2, 3, 4).permute(2, 0, 1) for _ in range(2)]
    table = build([nhwc[0], transposed[0], permuted[0]], [nhwc[1], transposed[1], permuted[1]])
    assert table.host.rows["numel"].tolist() == [120, 24, 24]
    with pytest.raises(ValueError, match="laid out alike"):
        build([nhwc[0]], [nhwc[1].contiguous()])


def test_strides_of_dimensions_of_one_do_not_matter() -> None:
    odd = torch.ones(1, 5, 1).as_strided((1, 5, 1), (99, 1, 42))
    assert build([torch.ones(1, 5, 1)], [odd]).host.rows["numel"].tolist() == [5]
    conv = torch.ones(8, 1, 3, 3)
    assert build([conv], [conv.clone().to(memory_format=torch.channels_last)]).numels == [72]
    assert build([torch.ones(1)], [torch.ones(4)[::4]]).numels == [1]


# ---- memory that is shared ----


ROOM, VALUES = torch.ones(1000), tensors((5,), (7,))
#: Lists, those of them that are written, and the two tensors that overlap; "": none do.
OVERLAPS: dict[str, tuple[list[list[torch.Tensor | None]], list[int], str]] = {
    "given twice": (
        [[ROOM[:5], ROOM[9:12], ROOM[:5]], tensors((5,), (3,), (5,))],
        [0],
        "tensors 0 and 2 .* overlap",
    ),
    "read twice": ([[ROOM[:5], ROOM[9:12], ROOM[:5]], tensors((5,), (3,), (5,))], [], ""),
    **{f"views {n}": ([[ROOM[:7], ROOM[n : n + 3]]], [0], "tensors 0 and 1 .* overlap") for n in (1, 3, 4, 6)},
    **{f"read behind {n}": ([[ROOM[:7]], [ROOM[n : n + 7]]], [0], "overlap") for n in (1, 6)},
    **{f"read before {n}": ([[ROOM[n : n + 7]], [ROOM[:7]]], [0], "overlap") for n in (1, 6)},
    "neighbours": ([[ROOM[:7], ROOM[7:8]], [ROOM[20:27], ROOM[27:28]]], [0, 1], ""),
    # foreach_mul(x, x): the element is read before it is written.
    "read and written": ([VALUES, VALUES], [0], ""),
    "another row's": ([[VALUES[0], VALUES[0].clone()], [torch.ones(5), VALUES[0]]], [0], "tensors 1 and 0 .* overlap"),
    "written twice": ([VALUES, VALUES], [0, 1], "overlap"),
    "other elements": ([tensors((5,)), VALUES[:1], [VALUES[0].view(torch.bfloat16)[:5]]], [1], "overlap"),
    "a large one amid small": ([[ROOM[400:410], ROOM, ROOM[900:901]]], [0], "overlap"),
    "a large one first": ([[ROOM, ROOM[5:6]]], [0], "overlap"),
    "a large one last": ([[ROOM[999:], ROOM]], [0], "overlap"),
    "absent": ([[ROOM[:5], ROOM[2:7]], [torch.ones(5), None]], [0], ""),
    "empty": ([[ROOM[:5], ROOM[2:2]]], [0], ""),
}


@pytest.mark.parametrize(("lists", "writes", "text"), OVERLAPS.values(), ids=OVERLAPS)
def test_overlap_of_what_is_written_is_refused(lists: list[Any], writes: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text) if text else contextlib.nullcontext():
        build(*lists, writes=writes)


def test_overlap_that_comes_later_is_refused_and_nothing_changes() -> None:
    room = torch.ones(20)
    weights = [room[:5], room[5:10]]
    table = build(weights, tensors((5,), (5,)), writes=[0])
    assert_refused(table, [[room[:5], room[3:8]], None], "overlap")
    assert table.refresh([weights, None]) is False


# --- random histories of a pointer table: it holds what the tensors are now, or refuses and holds what they were ------


SHAPES = ((5,), (4, 6), (2, 3, 4), (1, 7), (0,), (33,))
#: What may happen to a tensor; None of these is asked to be legal.
EVENTS = (
    "nothing", "move", "move both", "absent", "shape", "dtype", "transpose", "free", "resize", "value", "alias",
    "offset",
)  # fmt: skip
HISTORY = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1), st.integers(0, len(SHAPES) - 1)), max_size=12)


def alter(lists: list[list[torch.Tensor | None]], event: str, j: int, i: int) -> None:
    old, shape = lists[j][i], SHAPES[i]
    made: dict[str, Callable[[], torch.Tensor | None]] = {
        "move": lambda: torch.randn(shape),
        "absent": lambda: None,
        "shape": lambda: torch.randn((*shape[:-1], shape[-1] + 1)),
        "dtype": lambda: torch.randn(shape).double(),
        "transpose": lambda: torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))),
        "alias": lambda: lists[1 - j][i],
        "offset": lambda: torch.randn(math.prod(shape) + 3)[3:].view(shape),
    }
    if event == "move both":
        lists[0][i], lists[1][i] = torch.randn(shape), torch.randn(shape)
    elif event in made:
        lists[j][i] = made[event]()
    elif old is not None and event == "free":
        old.untyped_storage().resize_(0)
    elif old is not None and event == "resize":
        old.resize_(*shape[:-1], shape[-1] + 2)
    elif old is not None and event == "value" and old.untyped_storage().nbytes():
        old.zero_()


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


@pytest.mark.parametrize("j", [0, 1])
def test_a_view_into_freed_memory_is_refused(j: int) -> None:
    """Its address is its offset, which is not 0."""
    lists = [[torch.randn(8)[3:], torch.randn(5)] for _ in range(2)]
    table = PointerTable(lists, writes=[0])
    lists[j][0].untyped_storage().resize_(0)
    assert lists[j][0].data_ptr() == 12
    with pytest.raises(ValueError, match=r"tensor 0 of .* has no memory"):
        PointerTable(lists)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tensor 0 of .* has no memory"):
            table.refresh(lists)
