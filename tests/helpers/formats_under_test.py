"""Formats that show what kernels tell them, and that parameters may have formats, too."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedopt.formats import Column, Format


@dataclass(frozen=True, kw_only=True)
class WhereItStands(Format):
    """Stores where each element stands, and nothing of its value."""

    name: str = "where it stands"
    columns: tuple[Column, ...] = (
        Column("parameter", torch.int32), Column("number", torch.int64), Column("drawn", torch.int64),
    )  # fmt: skip
    cuda_type: str = "WhereItStands"
    cuda_text: str = """
struct WhereItStands {
    static constexpr int columns = 3;
    template <class S, int WIDTH> static __device__ void load(S (&x)[WIDTH], const Spot& spot) {}
    template <class S, int WIDTH> static __device__ void store(const S (&x)[WIDTH], const Spot& spot) {
        for (int i = 0; i < spot.live; ++i) {
            const long long at = spot.at + spot.offset(i);
            spot.column<int>(0)[at] = (int)spot.row;
            spot.column<long long>(1)[at] = spot.index + spot.offset(i);
            spot.column<long long>(2)[at] = (long long)spot.seed;
        }
    }
};
"""
    numba_load: str = "x[:live] = S(0)"
    numba_store: str = """
for i in range(live):
    parameter[i] = row
    number[i] = index + i
    drawn[i] = seed
"""

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Nothing of them."""
        return tuple(torch.zeros(len(values), dtype=column.dtype) for column in self.columns)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """Nothing of them."""
        return torch.zeros(numel)


@dataclass(frozen=True, kw_only=True)
class TwoHalves(Format):
    """A float32: its upper half is a bfloat16 parameter, its lower half what that has lost."""

    name: str = "two halves"
    columns: tuple[Column, ...] = (Column("", torch.bfloat16), Column("lost", torch.uint16))
    cuda_type: str = "TwoHalves"
    cuda_text: str = """
struct TwoHalves {
    static constexpr int columns = 2;
    template <class S, int WIDTH> static __device__ void load(S (&x)[WIDTH], const Spot& spot) {
        for (int i = 0; i < WIDTH; ++i)
            if (i < spot.live) {
                const unsigned high = spot.column<unsigned short>(0)[spot.at + spot.offset(i)];
                x[i] = S(__uint_as_float(high << 16 | spot.column<unsigned short>(1)[spot.at + spot.offset(i)]));
            }
    }
    template <class S, int WIDTH> static __device__ void store(const S (&x)[WIDTH], const Spot& spot) {
        for (int i = 0; i < WIDTH; ++i)
            if (i < spot.live) {
                const unsigned bits = __float_as_uint((float)x[i]);
                spot.column<unsigned short>(0)[spot.at + spot.offset(i)] = bits >> 16;
                spot.column<unsigned short>(1)[spot.at + spot.offset(i)] = bits & 0xffff;
            }
    }
};
"""
    numba_load: str = """
for i in range(live):
    x[i] = S(float_of(np.uint32(elements[i]) << np.uint32(16) | np.uint32(lost[i])))
"""
    numba_store: str = """
for i in range(live):
    bits = bits_of(np.float32(x[i]))
    elements[i] = np.uint16(bits >> np.uint32(16))
    lost[i] = np.uint16(bits & np.uint32(0xFFFF))
"""

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The halves."""
        halves = values.float().view(torch.int16).view(-1, 2)
        return halves[:, 1].contiguous().view(torch.bfloat16), halves[:, 0].contiguous().view(torch.uint16)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """The numbers."""
        return torch.stack([column.view(torch.int16) for column in columns[::-1]], 1).view(torch.float32).view(-1)
