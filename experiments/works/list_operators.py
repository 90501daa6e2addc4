"""An operator that does nothing to two lists, of which it writes the first, registered in every way that torch has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from experiments.works import lines

Operator = Callable[[list[torch.Tensor], list[torch.Tensor]], Any]
ARGUMENTS = "Tensor(a!)[] written, Tensor[] read"
DIRECT, OURS, CUSTOM_OP, TRITON_OP, EXTENSION = (
    "called directly", "Library.define (ours)", "custom_op", "triton_op", "C++ extension",
)  # fmt: skip
CPP = """
#include <torch/library.h>
static void nothing(at::TensorList written, at::TensorList read) {}
TORCH_LIBRARY_FRAGMENT(lists, m) {
    m.def("extension(Tensor(a!)[] written, Tensor[] read) -> ()");
    m.impl("extension", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(nothing)));
}
"""


def nothing(written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
    """What each of them does."""


def direct() -> Operator:
    return nothing


def ours() -> Operator:
    from pagedopt.system.registered_ops import define

    return define("lists_of_nothing", ARGUMENTS, nothing, nothing)


def by_custom_op() -> Operator:
    made = torch.library.custom_op("lists::custom_op", nothing, mutates_args=("written",))
    made.register_fake(nothing)
    return made


def by_triton_op() -> Operator:
    return torch.library.triton_op("lists::triton_op", nothing, mutates_args=("written",))


def by_extension() -> Operator:
    from torch.utils.cpp_extension import load_inline

    load_inline("lists_of_nothing", CPP, is_python_module=False, no_implicit_headers=True)
    torch.library.register_fake("lists::extension", nothing)
    return torch.ops.lists.extension.default


WAYS: dict[str, Callable[[], Operator]] = {
    DIRECT: direct, OURS: ours, CUSTOM_OP: by_custom_op, TRITON_OP: by_triton_op, EXTENSION: by_extension,
}  # fmt: skip


def lines_of(way: str) -> int:
    """Lines that somebody writes to register the operator, without the operator itself; of ours those of ``define``."""
    counted = lines.of_python(inspect.getsource(WAYS[way])) - 1  # without its def
    if way == OURS:
        from pagedopt.system import registered_ops

        counted = lines.of_python(inspect.getsource(registered_ops), ["define"])
    return counted + (len(CPP.strip().splitlines()) if way == EXTENSION else 0)
