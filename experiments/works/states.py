"""State of an optimizer in memory: its tensors, where they lie, their bits, and pages of it that are pushed out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedopt.system import driver
from pagedopt.system.driver import Location

#: Elements that :func:`digest` widens at a time.
PIECE = 1 << 24


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every state tensor but the step counts, sections one after the other."""
    found: dict[str, list[torch.Tensor]] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                found.setdefault(name, []).append(value)
    return [tensor for tensors in found.values() for tensor in tensors]


def ranges(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """(address, bytes) of the memory that state lies in, each once."""
    storages = [t.untyped_storage() for t in state_tensors(optimizer)]
    return sorted({(s.data_ptr(), s.nbytes()) for s in storages})


def push_out(places: Sequence[tuple[int, int]], device: torch.device) -> None:
    """Prefetch managed ranges to the host, in one call each, on the current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream
    for address, nbytes in places:
        driver.prefetch(address, nbytes, Location.HOST, device.index, stream)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Sixteen hexadecimal digits that say which bits the tensors hold, and where: the same on every device."""
    total = 0
    for i, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(torch.int32).flatten()
        for at in range(0, len(bits), PIECE):
            piece = bits[at : at + PIECE].long()
            weight = torch.arange(len(piece), device=piece.device).mul_(2654435761).add_(1)
            # Sums modulo 2**64 do not depend on their order.
            total = (31 * total + int((piece * weight).sum()) + i) % (1 << 64)
    return f"{total:016x}"
