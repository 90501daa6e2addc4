"""A training loop of one's own: train, save, and go on where the last run ended.

    python examples/loop.py

On one device.  Run twice: the second run goes on with the first one's checkpoint, in runs/examples.
"""

from pathlib import Path

import torch

from pagedopt import PagedAdamW

CHECKPOINT = Path("runs/examples/loop.pt")
STEPS = 50


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
    # Where torch.optim.AdamW stood.  Half of the state stays on the device (of a model on a CPU: in RAM), and half goes
    # to the host (to a file).  Without device_budget all of it stays.
    optimizer = PagedAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, device_budget="50%")
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)

    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # one of torch.optim.AdamW does, too, and the other way round
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]
        print(f"goes on at step {first}")

    generator = torch.Generator(device).manual_seed(first)
    for step in range(first, first + STEPS):
        x = torch.randn(32, 64, generator=generator, device=device)
        loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(optimizer.memory_report())

    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    torch.save({"step": first + STEPS, **{name: part.state_dict() for name, part in parts.items()}}, CHECKPOINT)


if __name__ == "__main__":
    main()
