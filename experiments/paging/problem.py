"""What every part works on: 268 M float32 parameters whose AdamW state, 2.1 GB of it, may lie anywhere."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console

from experiments.bench import Case, measure
from experiments.workloads import HYPER, Work
from pagedopt import MemoryReport, PagedAdamW
from pagedopt.system import driver
from pagedopt.system.driver import Location

FULL = Work("268 M fp32 (16 x 4096²)", [(4096, 4096)] * 16, torch.float32, 28, 5e-5)
QUICK = Work("4 M fp32 (16 x 512²)", [(512, 512)] * 16, torch.float32, 28, 5e-5)
#: Bytes of state per parameter: two moments.
STATE_BYTES = 8
#: Managed memory of this experiment stays below this, and below a quarter of what is free.
MOST_MANAGED = 8 << 30
#: What may go wrong with one contender without ending the part: a refusal, no room, a rival that is not there.
REFUSALS = (RuntimeError, MemoryError, ValueError, OSError, ImportError, NotImplementedError)


class Run:
    """One run of a part: its options, and what it has left out."""

    def __init__(self, device: torch.device, quick: bool, console: Console) -> None:
        self.device, self.quick, self.console = device, quick, console
        self.work = QUICK if quick else FULL
        self.rounds, self.seconds = (3, 0.1) if quick else (12, 1.2)
        self.left_out: list[str] = []
        self._grads: list[torch.Tensor] | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of all state."""
        return STATE_BYTES * self.work.numel

    def parameters(self) -> list[torch.nn.Parameter]:
        """The same random parameters every time; all share their gradients."""
        params = self.work.parameters(self.device, self._grads)
        if self._grads is None:
            self._grads = [p.grad for p in params if p.grad is not None]
        return params

    def measure(
        self, cases: Sequence[Case], rounds: int | None = None, seconds: float | None = None, warmup: int = 2
    ) -> dict[str, Any]:
        """Host, wall and GPU times by name of case, and ``best``: the GPU's median if there is one, else the wall's."""
        rounds, seconds = rounds or self.rounds, seconds or self.seconds
        timings = measure(cases, self.device, rounds=rounds, seconds=seconds, warmup=warmup)
        return {name: {**timing.as_dict(), "best": timing.best()} for name, timing in timings.items()}

    def wall(self, cases: Sequence[Case], rounds: int | None = None, seconds: float | None = None) -> dict[str, Any]:
        """Wall times of what blocks the host or moves pages: each is waited for, and so is what comes before it."""
        waited = [
            Case(case.name, _waited(case.run), _waited(case.before) if case.before else torch.cuda.synchronize)
            for case in cases
        ]
        cpu = torch.device("cpu")
        timings = measure(waited, cpu, rounds=rounds or self.rounds, seconds=seconds or self.seconds, warmup=1)
        return {name: dict(vars(timing.wall)) for name, timing in timings.items()}

    def host(self, case: Case, rounds: int) -> dict[str, float]:
        """Time until a call returns, whatever it queued."""
        timing = measure([case], torch.device("cpu"), rounds=rounds, warmup=1)[case.name]
        return dict(vars(timing.host))

    def say(self, text: str) -> None:
        """Print progress."""
        self.console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A contender that may fail: what it says is kept, its memory is given back, the others go on."""
        try:
            yield
        except REFUSALS as error:
            self.left_out.append(f"{name}: {type(error).__name__}: {str(error).strip()[:600]}")
            self.say(f"{name}: FAILED: {error}")
        finally:
            self.free()

    def free(self) -> None:
        """Give GPU memory back to the driver: managed memory is refused beyond a quarter of what is free."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _waited(run: Callable[[], object]) -> Callable[[], None]:
    def waited() -> None:
        run()
        torch.cuda.synchronize()

    return waited


def adamw(params: Sequence[torch.nn.Parameter], **options: Any) -> PagedAdamW:
    """PagedAdamW with the hyperparameters that everyone has here."""
    return PagedAdamW(params, **HYPER, **options)


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


def push_out(places: Sequence[tuple[int, int]], device: torch.device, piece: int = 0) -> None:
    """Prefetch managed ranges to the host, in calls of ``piece`` bytes (0: one per range), on the current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream
    for address, nbytes in places:
        for at in range(0, nbytes, piece or nbytes):
            driver.prefetch(address + at, min(piece or nbytes, nbytes - at), Location.HOST, device.index, stream)


def away_bytes(report: MemoryReport) -> int:
    """Bytes of state that are not on the device."""
    return sum(nbytes for place, nbytes in report.by_place.items() if place != "device")


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Sixteen hexadecimal digits that say which bits the tensors hold, and where: the same on every device."""
    total = 0
    for i, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(torch.int32).flatten()
        for at in range(0, len(bits), PIECE):
            piece = bits[at : at + PIECE].long()
            weight = torch.arange(len(piece), device=piece.device).mul_(2654435761).add_(1)
            # Sums modulo 2**64 do not depend on their order.
            part = int((piece * weight).sum())
            total = (31 * total + part + i) % (1 << 64)
    return f"{total:016x}"


#: Elements that :func:`digest` widens at a time.
PIECE = 1 << 24
