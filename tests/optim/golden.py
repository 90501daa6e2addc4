"""Golden trajectories: what 50 steps make of parameters and state, bit for bit, as digests in ``data/golden.json``.

Inputs come from integer arithmetic, so that no generator of random numbers has a say.  A case has one digest for all
devices, compilers and placements: rules round as IEEE says.  (One with ``exp`` or ``log`` would need one per library.)
To record those that are missing (delete a line of the file to have it recorded anew), from the root of the project:

    PYTHONPATH=.:tests/helpers python tests/optim/golden.py --record
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from paths import DATA

from tests import specs

FILE = DATA / "golden.json"
STEPS, DIGESTS_AFTER = 50, (1, 10, 50)
#: Of a case and step; gradients repeat.
GRADIENTS = 10
#: A scalar, a few, a tail for every vector width, several dimensions, and one of more than a page of state in a file
#: (64 KiB); in the large cases, which take a CPU a second each, of more than a page on a GPU (2 MiB).
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (4097,), (130, 7), (70_001,))
LARGE = (*SHAPES[:-1], (2_100_001,))
#: Significant bits of the inputs, so that each is exact in its dtype.
BITS = {torch.float64: 31, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

Options = dict[str, Any]


class Case(NamedTuple):
    """What has one digest."""

    optimizer: str
    dtype: torch.dtype
    state_format: str | None
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    @property
    def large(self) -> bool:
        return self.shapes is LARGE

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.optimizer} {dtype} {self.state_format or 'as the parameter'}{', large' if self.large else ''}"


CASES = [
    Case(name, dtype, state_format)
    for dtype in BITS  # first, as the inputs of one dtype are kept
    for name, case in specs.CASES.items()
    for stored, state_format in case.recorded
    if stored is dtype
]
#: One, two and three tensors of state.
CASES += [
    Case("momentum", torch.bfloat16, None, LARGE),
    Case("amsgrad", torch.bfloat16, "float32", LARGE),
    Case("adamw", torch.float32, None, LARGE),
]


def placements(case: Case, device: str) -> dict[str, Options]:
    """Options that may not change a bit, by name."""
    if not specs.CASES[case.optimizer].names:
        return {"default": {}}
    out: dict[str, Options] = {"default": {}, "host": {"placement": "host"}}
    if device == "cpu":
        file = {"placement": "file"}
        small = {"file": {**file, "device_budget": 0}, "file half": {**file, "device_budget": "50%"}}
        return out if case.large else out | small
    for access in ("staged", "in_place"):
        mapped = {"placement": "mapped", "host_access": access}
        out |= {f"mapped {access}": {**mapped, "device_budget": 0}}
        if case.large:
            out |= {f"mapped half {access}": {**mapped, "device_budget": "50%"}}
    return out | ({"managed": {"placement": "managed", "device_budget": "50%"}} if case.large else {})


def numbers(numel: int, stream: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Values from -1 to 1 of eight magnitudes, each exact in ``dtype``: a mixed Weyl sequence, of integers only."""
    words = torch.arange(numel, dtype=torch.int64, device=device) * 0x9E3779B1 + (stream + 1) * 0x85EBCA77
    words &= 0xFFFFFFFF
    words ^= words >> 15
    words = (words * 0x2C1B3C6D) & 0xFFFFFFFF
    words ^= words >> 12
    words = (words * 0x297A2D39) & 0xFFFFFFFF
    words ^= words >> 15
    bits = BITS[dtype]
    value = (words >> (32 - bits)) - (1 << (bits - 1))  # ``bits`` bits with the sign: exact
    scale = 1 << (7 - (words & 7))  # 2 ** 0 … 2 ** 7, exact as the quotient below
    return (value.to(torch.float64) * scale * 2.0 ** -(bits + 6)).to(dtype)


@functools.lru_cache(maxsize=2 * (GRADIENTS + 1))
def _values(stream: int, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], device: str) -> list[torch.Tensor]:
    """One tensor per shape; stream 0 holds first parameters, the others gradients.  Kept: all cases share them."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = numbers(sum(sizes), stream, dtype, device).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def digest(params: Iterable[torch.Tensor], opt: torch.optim.Optimizer) -> str:
    """A short digest of every bit of the parameters and of their state."""
    whole = hashlib.sha256()
    for p in params:
        for name, tensor in [("", p), *sorted(opt.state.get(p, {}).items())]:
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            whole.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return whole.hexdigest()[:12]


def trajectory(case: Case, device: str, options: Options, steps: int = STEPS) -> str:
    """Digests after some of the steps; the second parameter has no gradient in every seventh step."""
    params = [torch.nn.Parameter(value.clone()) for value in _values(0, case.dtype, case.shapes, device)]
    chosen = specs.CASES[case.optimizer]
    groups = [{"params": params[::2]}, {"params": params[1::2], **chosen.other}]
    opt = chosen.make(False, groups, state_format=case.state_format, **options)
    found = []
    for step in range(1, steps + 1):
        grads = _values(1 + step % GRADIENTS, case.dtype, case.shapes, device)
        for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
            p.grad = None if i == 1 and step % 7 == 0 else grad
        opt.step()
        if step in DIGESTS_AFTER:
            assert all(p.isfinite().all() for p in params), f"{case}: infinite after step {step}; it shows nothing"
            found.append(digest(params, opt))
    return " ".join(found)


def recorded() -> dict[str, str]:
    """Digests by case."""
    found: dict[str, str] = json.loads(FILE.read_text())
    return found


def record() -> None:
    """Write the digests that are missing, and remove those without a case.

    Raises:
        SystemExit: placements disagree; nothing is written then.
    """
    known = recorded()
    found = {str(case): known[str(case)] for case in CASES if str(case) in known}
    missing = [case for case in CASES if str(case) not in known]
    for case in missing:
        by_place = {name: trajectory(case, "cpu", options) for name, options in placements(case, "cpu").items()}
        if len(set(by_place.values())) > 1:
            sys.exit(f"{case}: placements disagree, nothing recorded: {by_place}")
        found[str(case)] = by_place["default"]
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(missing)} of {len(found)} digests in {FILE} are new")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", required=True, help="add the digests that are missing")
    parser.parse_args()
    record()


if __name__ == "__main__":
    main()
