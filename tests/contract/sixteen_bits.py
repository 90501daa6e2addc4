"""In 16 bits: the share of parameters that a step of ours, or of one of torch's ways, does not round as float64.

Every step begins from torch's own parameters and state, after ten steps.  It prints the shares of notes/arithmetic.md:

    PYTHONPATH=.:tests/helpers:tests/contract python -m tests.contract.sixteen_bits [cuda]
"""

from __future__ import annotations

import sys

import torch
from test_contract_numbers import SHAPES, Training, ways

from pagedopt.optim.registry import OPTIMIZERS
from tests.contract.scenarios import DEFAULT, ordinary, reference

BEGIN = 10


def main(device: str = "cpu") -> None:
    names = ("ours", "loop", "foreach", "fused")
    print("| optimizer | dtype |", " | ".join(names), "|", " | ".join(f"ours ≠ {way}" for way in names[1:]), "|")
    print("| --- | --- |" + " ---: |" * (2 * len(names) - 1))
    for entry in (entry for entry in OPTIMIZERS if entry.torch):
        for dtype in (torch.bfloat16, torch.float16):
            hyper, kind = ordinary(entry), reference(entry)
            stand = Training(kind, {**hyper, **DEFAULT[device]}, dtype, device, SHAPES).to_step(BEGIN).stand()

            def step(kind: type, dtype: torch.dtype, wide: bool = False, **flags: object) -> torch.Tensor:
                training = Training(kind, {**hyper, **flags}, dtype, device, SHAPES, wide)  # noqa: B023
                return training.at(stand).to_step(BEGIN + 1).kinds()["parameter"].to(dtype)  # noqa: B023

            exact = step(kind, dtype, wide=True, foreach=False)
            found = {"ours": step(entry.optimizer, dtype)} | {w: step(kind, dtype, **f) for w, f in ways(entry).items()}
            shares = [(found[name] != exact).double().mean() for name in names]
            shares += [(found["ours"] != found[way]).double().mean() for way in names[1:]]
            print(f"| {entry.name} | {str(dtype)[6:]} |", " | ".join(f"{float(share):.2%}" for share in shares), "|")


if __name__ == "__main__":
    main(*sys.argv[1:])
