"""A training loop with Hugging Face accelerate: train, save, and go on where the last run ended.

    pip install -e '.[clients]'  # first
    python examples/accelerate_loop.py

On one device; ``accelerate launch examples/accelerate_loop.py`` takes all.
Run twice: the second run goes on with the first one's checkpoint, in runs/examples.
"""

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from pagedopt import PagedAdamW

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; first: pip install -e '.[clients]'") from None

CHECKPOINT = Path("runs/examples/accelerate")
EPOCHS = 3


def main() -> None:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    batches = DataLoader(torch.randn(1024, 64), batch_size=32)
    # With device_budget="50%" half of the state would be on the host (of a model on a CPU: in a file).
    optimizer = PagedAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)

    if CHECKPOINT.exists():
        accelerator.load_state(str(CHECKPOINT))
        print("goes on with", CHECKPOINT)

    for epoch in range(EPOCHS):
        for x in batches:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = torch.nn.functional.mse_loss(model(x), x.flip(1))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.print(optimizer.optimizer.memory_report())
    accelerator.save_state(str(CHECKPOINT))


if __name__ == "__main__":
    main()
