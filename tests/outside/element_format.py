"""A format of one array, whose elements are stored alone: fixed-point numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedopt.formats import Column, ElementFormat

CUDA = """
struct Fixed16 {
    short code;
    Fixed16() = default;
    __device__ Fixed16(float x) : code((short)element_min(element_max(rintf(x * 32768.0f), -32767.0f), 32767.0f)) {}
    __device__ operator float() const { return code / 32768.0f; }
};
"""


@dataclass(frozen=True, kw_only=True)
class Fixed16(ElementFormat):
    """Steps of 2**-15 from -1 to 1, in 16 bits."""

    name: str = "16-bit fixed point"
    columns: tuple[Column, ...] = (Column("", torch.int16),)
    cuda_type: str = "Fixed16"
    cuda_text: str = CUDA
    numba_type: str = "_np.int16"
    numba_load: str = "S({}) / S(32768)"
    numba_store: str = "_np.int16(min(max(_np.rint(_np.float32({}) * 32768), -32767), 32767))"

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((values * 32768).round().clamp(-32767, 32767).to(torch.int16),)

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        return columns[0].float() / 32768
