"""Kernels that are measured compile: a fault in a text shows without a GPU."""

from __future__ import annotations

import pytest
from nvrtc_support import nvrtc

from experiments.copies import addresses
from experiments.works import held_lists, list_copy, norm_tanh
from pagedopt.kernels.nvrtc import compile_cuda


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("#define DIM 256\n" + norm_tanh.CUDA, ("norm_tanh",)),
        (list_copy.CUDA, ("copy_list",)),
        (addresses.CUDA, ("look",)),
        (held_lists.CUDA, ("listed", "by_value")),
    ],
    ids=("norm_tanh", "copy_list", "look", "held_lists"),
)
def test_a_text_compiles(text: str, names: tuple[str, ...]) -> None:
    nvrtc()
    cubin, _ = compile_cuda(text, names, "sm_90")
    assert cubin[:4] == b"\x7fELF"
