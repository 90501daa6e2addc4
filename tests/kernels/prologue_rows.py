"""Rows for the prologue's kernel: hyperparameters in memory as float32 and as float64, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedopt.kernels.cuda import PROLOGUE_AT
from pagedopt.rules import Rule
from pagedopt.transports.transport import opaque

#: Runs a prologue: its argument, and the number of rows.
Launch = Callable[[npt.NDArray[Any], int], None]
#: In every word of a table that nobody has written.
UNTOUCHED = 7.0


class Rows:
    """Numbers of several rows, each in its own memory, and a table.

    Args:
        rule: whose prologue is to be run.
        sets: for each row its hyperparameters; of ``step`` it has taken one less.
        single: for each row which numbers are float32: the step count, then the hyperparameters; left out: none.
        absent: rows that take no step.
        uncounted: rows without a step count.
        spare: words of a set behind the uniforms.
        seed_at: index of the seed in a set.
        device: where all of it is.
    """

    def __init__(
        self,
        rule: Rule,
        sets: Sequence[Mapping[str, float]],
        single: npt.NDArray[np.bool_] | None = None,
        absent: Collection[int] = (),
        uncounted: Collection[int] = (),
        spare: int = 0,
        seed_at: int = -1,
        device: str = "cpu",
    ) -> None:
        self.rule, self.absent, self.uncounted, self.seed_at = rule, absent, uncounted, seed_at
        self.stride = rule.uniform_count + spare
        numbers = np.array([[s.get("step", 1.0) - 1, *(s[n] for n in rule.scalars)] for s in sets])
        self.single = np.zeros(numbers.shape, bool) if single is None else single
        # A number that is read in the wrong place is NaN.
        self.wide = torch.from_numpy(np.where(self.single, np.nan, numbers)).to(device)
        self.narrow = torch.from_numpy(np.where(self.single, numbers, np.nan).astype(np.float32)).to(device)
        at = np.arange(numbers.size, dtype=np.uint64).reshape(numbers.shape)
        addresses = np.where(self.single, self.narrow.data_ptr() + 4 * at + 1, self.wide.data_ptr() + 8 * at)
        addresses[list(uncounted), 0] = 0
        if "step" in rule.scalars:
            addresses[:, 1 + rule.scalars.index("step")] = 0
        takes = np.ones(len(sets), np.uint64)
        takes[list(absent)] = 0
        addresses[list(absent)] = 8  # nothing is there
        inputs = np.column_stack([takes, addresses.astype(np.uint64)])
        self.inputs = torch.from_numpy(inputs.view(np.int64)).to(device)
        self.table = torch.full((len(sets), self.stride), UNTOUCHED, dtype=torch.float64, device=device)

    def numbers(self) -> npt.NDArray[np.float64]:
        """For each row its step count and hyperparameters, as they are in memory."""
        return np.where(self.single, self.narrow.cpu().numpy(), self.wide.cpu().numpy())

    def argument(self) -> npt.NDArray[Any]:
        """What the kernel takes."""
        fields = np.zeros(1, PROLOGUE_AT)
        fields["table"], fields["inputs"] = self.table.data_ptr(), self.inputs.data_ptr()
        fields["rows"], fields["stride"], fields["seed_at"] = len(self.table), self.stride, self.seed_at
        return opaque(fields)

    def start(self, launch: Launch) -> None:
        """Launch the kernel."""
        launch(self.argument(), len(self.table))

    def run(self, launch: Launch) -> npt.NDArray[np.float64]:
        """Run the kernel; return each row's uniforms."""
        self.start(launch)
        return self.table.cpu().numpy()[:, : self.rule.uniform_count]

    def expected(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The table and :meth:`numbers` after the next run."""
        table, numbers = self.table.cpu().numpy().copy(), self.numbers()
        after, scalars = numbers.copy(), self.rule.scalars
        for row in set(range(len(table))).difference(self.absent):
            step = 0.0 if row in self.uncounted else numbers[row, 0] + 1
            given = {name: float(step if name == "step" else numbers[row, 1 + i]) for i, name in enumerate(scalars)}
            uniforms = self.rule.uniforms(given)
            table[row, : len(uniforms)] = uniforms
            if self.seed_at >= 0:
                table[row, self.seed_at] = step
            if row not in self.uncounted:
                after[row, 0] = step
            for name, at in self.rule.carried.items():
                after[row, 1 + scalars.index(name)] = uniforms[at]
        return table, np.where(self.single, after.astype(np.float32), after)


def same_bits(got: npt.NDArray[np.float64], want: npt.NDArray[np.float64]) -> bool:
    """Equal including NaN and the sign of zero; not what is in a NaN."""
    numbers, others = (np.where(np.isnan(x), 0, x).view(np.int64) for x in (got, want))
    return np.array_equal(numbers, others) and np.array_equal(np.isnan(got), np.isnan(want))


def check_runs(rows: Rows, launch: Launch, runs: int = 3) -> None:
    """Runs of one kernel, each on the numbers that the one before has left."""
    for _ in range(runs):
        table, numbers = rows.expected()
        rows.start(launch)
        assert same_bits(rows.table.cpu().numpy(), table)
        assert same_bits(rows.numbers(), numbers)
    assert (rows.table.cpu().numpy()[list(rows.absent)] == UNTOUCHED).all()


def mixed_rows(rule: Rule, sets: Sequence[Mapping[str, float]], device: str = "cpu") -> Rows:
    """Rows of every kind: numbers of both types, absent rows, a seed, and no step count where the rule takes none."""
    count = len(sets)
    single = np.random.default_rng(3).random((count, 1 + len(rule.scalars))) < 0.5
    absent, uncounted = range(2, count, 7), () if "step" in rule.scalars else range(1, count, 5)
    return Rows(rule, sets, single, absent, uncounted, spare=2, seed_at=rule.uniform_count, device=device)
