"""How far is PagedAdamW from torch's AdamW?  Copies of a model get the same gradients in every step.

    python examples/beside_torch.py --device-budget 0 --state-format int8

On one device.  Put your own model, batches and options in place of those in ``main``.
"""

import argparse
import copy
from collections.abc import Callable, Iterable

import torch

from pagedopt import PagedAdamW

SAME = {"lr": 1e-3, "weight_decay": 0.1}


def apart(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest absolute difference between their parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((p.detach().double() - q.detach().double()).abs().max()) for p, q in pairs)


def beside(model: torch.nn.Module, losses: Iterable[Callable[[], torch.Tensor]], **options: object) -> None:
    """Train a model with torch's AdamW and copies with PagedAdamW and in float64; print how far they are apart."""
    start, ours, exact = (copy.deepcopy(model) for _ in range(3))
    optimizers = {
        model: torch.optim.AdamW(model.parameters(), **SAME),
        ours: PagedAdamW(ours.parameters(), **SAME, **options),
        exact.double(): torch.optim.AdamW(exact.parameters(), **SAME),
    }
    for loss in losses:
        model.zero_grad()
        loss().backward()
        for other, optimizer in optimizers.items():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.to(q.dtype)
            optimizer.step()
    print(f"torch's AdamW and PagedAdamW: {apart(model, ours):.2g} apart")
    print(f"from the same steps in float64: torch's {apart(model, exact):.2g}, ours {apart(ours, exact):.2g}")
    print(f"these steps have moved a parameter by {apart(model, start):.2g} at most")
    print(optimizers[ours].memory_report())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device-budget", default="50%")
    parser.add_argument("--state-format")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    batches = torch.randn(100, 32, 64, device=model[0].weight.device)
    losses = (lambda x=x: torch.nn.functional.mse_loss(model(x), x.flip(1)) for x in batches)
    beside(model, losses, **vars(parser.parse_args()))


if __name__ == "__main__":
    main()
