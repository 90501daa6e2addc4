"""The update under the next forward: what is read between step() and the forward waits for it.

    python examples/overlap.py

Losses and weights are those of the same loop without attach(), bit for bit.
"""

import torch

from pagedopt import PagedAdamW

STEPS = 50


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    width = 2048 if device == "cuda" else 256
    layers = [each for _ in range(8) for each in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = PagedAdamW(model.parameters(), lr=3e-4, weight_decay=0.1, device_budget=0)
    optimizer.attach(model)  # from now on a module waits for its own parameters, and step() for nothing
    average = [p.detach().clone() for p in model.parameters()]

    generator = torch.Generator(device).manual_seed(0)
    for step in range(STEPS):
        x = torch.randn(32, width, generator=generator, device=device)
        loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # queued
        optimizer.zero_grad()
        if step % 10 == 0:
            with optimizer.waited():  # nothing notices that the average reads the parameters here
                torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            print(f"step {step}: loss {loss.item():.4f}")
    print(optimizer.overlap_report())
    print(optimizer.memory_report())  # methods of the optimizer, and model.state_dict(), wait by themselves


if __name__ == "__main__":
    main()
