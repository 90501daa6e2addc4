"""The self-test of the compiled look, in a child process: a wrong part of torch or CPython ends only that."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import words
from .parts import Look, look_of_this_build, store_verdict
from .record import ABSENT, Numbers, Record, Row


class _Example:
    """Two groups of parameters with gradients and state, of which one parameter has no gradient, and their record."""

    def __init__(self, look: Look) -> None:
        whole = torch.zeros(64, device="cpu")
        shapes = [(), (3,), (2, 3), (0,), (4, 2), (5,)]
        self.params: list[torch.Tensor] = [torch.nn.Parameter(torch.ones(s, device="cpu")) for s in shapes]
        self.params[4] = whole[8:16].view(4, 2).requires_grad_()
        for p in self.params[:-1]:
            p.grad = torch.ones_like(p)
        self.groups: list[dict[str, Any]] = [
            {"params": self.params[:3], "lr": 0.5, "betas": (0.5, 0.25)}, {"params": self.params[3:], "lr": 0.25}
        ]  # fmt: skip
        self.numbers = np.zeros(len(shapes), np.float32)
        steps = [torch.from_numpy(self.numbers[i : i + 1]).view(()) for i in range(len(shapes))]
        self.state: dict[Any, Any] = {
            p: {"step": t, "m": torch.zeros_like(p)} for p, t in zip(self.params, steps, strict=True)
        }
        self.counter = torch.empty(0, device="cpu")
        self._cells = np.zeros((len(shapes), 2), np.int64)
        rows = [
            Row(0, p.data_ptr(), *(self._cells.ctypes.data + 16 * i + 8 * j for j in range(2)))
            for i, p in enumerate(self.params[:-1])
        ]
        launch = [0] * words.LAUNCH
        launch[words.KERNEL] = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value or 0
        launch[words.THREADS] = 1
        at = self.numbers.ctypes.data + 4 * np.arange(len(rows))
        self.record = Record(
            look, self.groups, [*rows, ABSENT], [launch], self.state, [("step", "m")] * len(shapes), [Numbers(4, at)],
            [self.counter],
        )  # fmt: skip

    def look(self, step: float) -> bool:
        """Return whether a look takes a step, and all that it wrote, or left alone, is right."""
        before = self._seen()
        self.record.set_number(0, step)
        taken = self.record.look(self.groups, self.state) == words.DONE
        if not taken:
            return self._seen() != before  # never True: a look that refuses changes nothing
        wrote = [p.grad.data_ptr() for p in self.params[:-1] if p.grad is not None]
        versions = [before[1][i] + (i != len(self.params) - 1) for i in range(len(self.params))]
        numbers = [step] * (len(self.params) - 1) + [0.0]
        return self._seen() == (numbers, versions, before[2] + 1, [[at, at] for at in wrote] + [[0, 0]])

    def _seen(self) -> tuple[list[float], list[int], int, list[list[int]]]:
        return self.numbers.tolist(), [p._version for p in self.params], self.counter._version, self._cells.tolist()


def _swap_grad(e: _Example, new: Callable[[torch.Tensor], Any]) -> None:
    e.params[2].grad = new(torch.ones(2, 3, device="cpu"))


def _set_data(p: torch.Tensor, new: torch.Tensor) -> None:
    p.data = new


#: Edits that a look must notice.
_EDITS: tuple[Callable[[_Example], object], ...] = (
    lambda e: e.groups.append(e.groups[0]),
    lambda e: e.groups[1].update(lr=float("0.125")),
    lambda e: e.groups[1].update(new=1),
    lambda e: e.groups[0].update(params=(*e.params[:3],)),
    lambda e: e.groups[0]["params"].reverse(),
    lambda e: e.groups[0]["params"].append(e.params[0]),
    lambda e: e.groups[0]["params"].__setitem__(0, torch.nn.Parameter(torch.ones((), device="cpu"))),
    lambda e: setattr(e.params[-1], "grad", torch.ones(5, device="cpu")),
    lambda e: setattr(e.params[0], "grad", None),
    lambda e: _set_data(e.params[2], torch.ones(2, 3, device="cpu")),
    lambda e: _set_data(e.params[2], e.params[2].detach().view(3, 2)),
    lambda e: _set_data(e.params[4], torch._neg_view(e.params[4].detach())),
    lambda e: _swap_grad(e, lambda g: torch._neg_view(g)),
    lambda e: _set_data(e.params[2].grad, torch.ones(2, 3, dtype=torch.float64, device="cpu")),  # type: ignore[arg-type]
    lambda e: _set_data(e.params[2].grad, torch.ones(3, 2, device="cpu").t()),  # type: ignore[arg-type]
    lambda e: _set_data(e.params[2].grad, torch.ones(3, 2, device="cpu")),  # type: ignore[arg-type]
    lambda e: e.params[2].grad.untyped_storage().resize_(0),  # type: ignore[union-attr]
    lambda e: _swap_grad(e, lambda g: g.to_sparse()),
    lambda e: torch.utils.swap_tensors(e.params[1], torch.nn.Parameter(torch.ones(3, device="cpu"))),
    lambda e: e.state.pop(e.params[1]),
    lambda e: e.state.update({5: {}}),
    lambda e: e.state.update({e.params[1]: 5}),
    lambda e: e.state[e.params[1]].pop("m"),
    lambda e: e.state[e.params[1]].update(m=5),
    lambda e: e.state[e.params[1]].update(m=torch.zeros(3, device="cpu")),
    lambda e: _set_data(e.state[e.params[1]]["m"], torch.zeros(3, device="cpu")),
)  # fmt: skip


def works(look: Look) -> bool:
    """Return whether a look takes the steps that it should, notices each edit, and sees a profiler."""
    steady = _Example(look)
    if not steady.record.note(steady.groups) or not (steady.look(1.0) and steady.look(2.0)):
        return False
    for p in steady.params[:-1]:
        p.grad = torch.ones_like(p)
    if not steady.look(3.0):
        return False
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        if steady.look(4.0):
            return False
    if not steady.look(4.0):
        return False
    for edit in _EDITS:
        example = _Example(look)
        if not (example.record.note(example.groups) and example.look(1.0)):
            return False
        alive = [*example.params, *(p.grad for p in example.params), *example.state.values()]
        edit(example)
        if example.look(2.0):
            return False
        del alive
    return True


def main() -> None:
    """Test the look of this build, cache the verdict, and exit with 0 (it works) or 3."""
    look = look_of_this_build()
    found = look is not None and works(look)
    store_verdict(found)
    os._exit(0 if found else 3)
