"""A format of this package's own: whole numbers from -127 to 127, and a scale for each 64 of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedopt.formats import Column, Format

BLOCK = 64

CUDA = """
struct Int8Blocks {
    static constexpr int columns = 2;
    template <class S, int WIDTH> static __device__ void load(S (&x)[WIDTH], const Spot& spot) {
        const S scale = S(spot.live ? spot.column<const float>(1)[spot.at / 64] : 0);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            if (i < spot.live) x[i] = S(spot.column<const signed char>(0)[spot.at + spot.offset(i)]) * scale;
    }
    template <class S, int WIDTH> static __device__ void store(const S (&x)[WIDTH], const Spot& spot) {
        S most = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) most = element_max<S>(most, element_abs<S>(x[i]));
        most = block_max<64, WIDTH>(most);
        const float scale = float(most) / 127.0f;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i)
            if (i < spot.live) {
                const float code = scale > 0.0f ? rintf(float(x[i]) / scale) : 0.0f;
                spot.column<signed char>(0)[spot.at + spot.offset(i)] = (signed char)code;
            }
        if (spot.live && spot.at % 64 == 0) spot.column<float>(1)[spot.at / 64] = scale;
    }
};
"""

LOAD = """
for i in range(live):
    x[i] = S(codes[i]) * S(scale[0])
"""

STORE = """
most = np.float32(0)
for i in range(live):
    most = max(most, np.float32(abs(x[i])))
unit = most / np.float32(127)
scale[0] = unit
for i in range(live):
    codes[i] = np.int8(np.rint(np.float32(x[i]) / unit)) if unit > 0 else np.int8(0)
"""


@dataclass(frozen=True, kw_only=True)
class Int8Blocks(Format):
    """One byte an element, and four more for each 64: 8.5 bits in the place of float32's 32."""

    name: str = "int8 in blocks of 64"
    columns: tuple[Column, ...] = (Column("codes", torch.int8), Column("scale", torch.float32, BLOCK))
    block: int = BLOCK
    cuda_type: str = "Int8Blocks"
    cuda_text: str = CUDA
    numba_load: str = LOAD
    numba_store: str = STORE

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Columns for ``values`` (n,)."""
        numel = len(values)
        padded = torch.nn.functional.pad(values.float(), (0, -numel % BLOCK)).view(-1, BLOCK)
        scale = padded.abs().amax(1) / 127
        codes = torch.where(scale[:, None] > 0, padded / scale[:, None], 0).round()
        return codes.view(-1)[:numel].to(torch.int8), scale

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """``numel`` elements."""
        codes, scale = columns
        return codes.float() * scale.repeat_interleave(BLOCK)[:numel]
