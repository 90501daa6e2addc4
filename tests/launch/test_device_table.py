"""The table for kernels of one's own, walked by a Numba kernel on the CPU (tests/gpu has a CuPy RawKernel)."""

from typing import Any

import numba
import pytest
import torch

from pagedopt import DeviceTable
from pagedopt.kernels import pointer


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


def test_an_absent_tensor_is_skipped_by_its_size() -> None:
    sources, targets = [torch.ones(3), torch.ones(3)], [torch.zeros(3), torch.zeros(3)]
    table = DeviceTable([sources, targets], writes=[1])
    table.refresh([None, [None, targets[1]]])
    scale_into(table.rows, 2.0)
    assert [t.tolist() for t in targets] == [[0.0] * 3, [2.0] * 3]


def test_bad_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="same number of tensors"):
        DeviceTable([[torch.ones(2)], []])


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


def test_it_shows_itself_in_a_line() -> None:
    table = DeviceTable([[torch.ones(2)] * 3, [torch.ones(2, dtype=torch.bfloat16) for _ in range(3)]], writes=[1])
    assert repr(table) == "DeviceTable(2 x 3 tensors (float32, bfloat16) on cpu, writes=[1])"
    assert repr(DeviceTable([[]])) == "DeviceTable(1 x 0 tensors (none) on cpu, writes=[])"
