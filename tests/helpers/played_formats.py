"""Kernels of formats: what Numba leaves in lists, and what g++ does as it plays the CUDA text; NVRTC compiles them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nvrtc_support
import pytest
import torch
from host_build import Play, build, functors, launch
from int8_support import same
from support import scalars_for

from pagedopt import Sweep
from pagedopt.formats.format import Format
from pagedopt.kernels import nvrtc, source
from pagedopt.rules import Rule
from pagedopt.tables.layout import BLOCK, Geometry

#: Of parameters: parts of quads, whole blocks and parts of them, more than a round of a warp or of a block of threads,
#: and nothing at all.
SIZES = (1, 3, 255, 256, 258, 0, 4096, 1024 + 31, 9000)
NUMBERS = (3, 1, 4, 15, 9, 2, 6, 535, 8)
#: Warps and blocks of threads per chunk; a chunk has several rounds.
SHAPES = {32: Geometry(1024, 32), BLOCK: Geometry(8192, BLOCK)}
SEED = (5 << 32) + 3
ARCHS = ["sm_75", pytest.param("sm_90", marks=pytest.mark.long), "sm_100"]

#: A rule, the format of each of its inputs, and the threads of a block.
Variant = tuple[Rule, tuple[Format, ...], int]
Lists = list[list[torch.Tensor]]


def values_of(name: str, numel: int, generator: torch.Generator) -> torch.Tensor:
    """Ordinary numbers, with zeros in the middle; gradients have some that are not finite, and a block of tiny ones."""
    values = torch.randn(numel, generator=generator)
    if name in ("exp_avg_sq", "value"):
        values.abs_()
    values[numel // 2 : numel // 2 + 300] = 0
    if numel > 4000 and name in ("grad", "value"):
        values[:256] *= 1e-25
        values[600], values[601], values[numel - 1] = torch.nan, torch.inf, 1e30
    return values


@dataclass(frozen=True)
class Kernels:
    """Kernels of one text: ``variants`` of them, and the ``formats`` whose texts they need."""

    variants: Sequence[Variant]
    formats: tuple[Format, ...]

    @property
    def rules(self) -> list[Rule]:
        return list(dict.fromkeys(rule for rule, *_ in self.variants))

    def play(self, index: int) -> Play:
        """What plays the CUDA text of a variant."""
        names = tuple(source.instance(rule, forms, threads, "TableAt") for rule, forms, threads in self.variants)
        return build(names, functors(self.rules), formats=self.formats)[index]

    def lists_of(self, index: int, gap: int = 0) -> Lists:
        """Columns of parameters of ``SIZES``, ``gap`` entries off their start, with entries of 7 behind."""
        rule, formats, _ = self.variants[index]
        generator = torch.Generator().manual_seed(7)
        columns: list[Lists] = []
        for name, form in zip(rule.inputs, formats, strict=True):
            parts = []
            for n in SIZES:
                encoded = form.encode(values_of(name, n, generator).to(form.arithmetic))
                room = [torch.full((len(t) + gap + 9,), 7).to(t.dtype) for t in encoded]
                parts.append([r[gap : gap + len(t)].copy_(t) for r, t in zip(room, encoded, strict=True)])
            columns.append([list(column) for column in zip(*parts, strict=True)])
        (first, *lost), *rest = columns  # what a parameter has lost comes last
        return [first, *(column for each in rest for column in each), *lost]

    def updated(self, use: str, index: int, gap: int = 0, backwards: bool = False, **how: Any) -> Lists:
        """The lists after one update by Numba or by g++'s play of the CUDA text."""
        rule, formats, threads = self.variants[index]
        lists = self.lists_of(index, gap)
        sweep = Sweep(rule, lists, formats=formats, geometry=SHAPES[threads], numbers=NUMBERS, **how)
        if use == "Numba":
            sweep.run(scalars_for(rule), seed=SEED)
        else:
            sweep.set_scalars([rule.uniforms(scalars_for(rule))], SEED)
            launch(self.play(index), sweep.table.host, 0, backwards)
        return lists

    def check(self, capfd: pytest.CaptureFixture[str], index: int, first: Lists, *others: Lists) -> None:
        """All lists have the same bits, which differ from those of before, and all around them is still 7."""
        rule, *_ = self.variants[index]
        assert "runtime error" not in (said := capfd.readouterr().err), said
        for other in others:
            assert [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if not same(a, b)] == []
        changed = rule.writes[0]  # nothing in front of it has several columns there
        assert not same(first[changed], self.lists_of(index)[changed])
        for t in (t for lists in others for column in lists for t in column):
            assert (t.as_strided((9,), (1,), t.storage_offset() + len(t)) == 7).all(), "written behind the end"

    def compile(self, arch: str) -> None:
        """NVRTC compiles each variant of an update; the test is skipped where it knows no such GPU."""
        library = nvrtc_support.nvrtc()
        if int(arch[3:]) not in (known := library.nvrtcGetSupportedArchs()[1]):
            pytest.skip(f"this NVRTC compiles for {known}, not for {arch}")
        for rule in (rule for rule in self.rules if "grad" in rule.inputs):
            mine = [(forms, threads) for one, forms, threads in self.variants if one is rule]
            names = {source.instance(rule, *one, "TableAt", small_grid=arch == "sm_75") for one in mine}
            text = source.text(rule, self.formats)
            cubin, symbols = nvrtc.compile_cuda(text, tuple(sorted(names)), arch)
            assert cubin[:4] == b"\x7fELF"
            assert len(set(symbols)) == len(names)
