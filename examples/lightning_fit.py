"""Lightning: train, save, and go on where the last run ended.

    pip install -e '.[clients]'  # first
    python examples/lightning_fit.py

On all devices: where there are two GPUs, Lightning starts a process for the second; ``devices=1`` takes one.
Run twice: the second run goes on with the first one's checkpoint, in runs/examples.
"""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from pagedopt import PagedAdamW

try:
    import lightning
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; first: pip install -e '.[clients]'") from None

FOLDER, EPOCHS = Path("runs/examples/lightning"), 3


class Flip(lightning.LightningModule):
    """Learns to turn its input around."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch), batch.flip(1))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        # Half of the state goes to the host (of a model on a CPU: to a file).
        optimizer = PagedAdamW(self.parameters(), lr=1e-3, weight_decay=0.1, device_budget="50%")
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    lightning.seed_everything(0)
    last = FOLDER / "last.ckpt"
    before = torch.load(last, map_location="cpu", weights_only=False)["epoch"] + 1 if last.exists() else 0
    keep = lightning.pytorch.callbacks.ModelCheckpoint(FOLDER, save_last=True, enable_version_counter=False)
    trainer = lightning.Trainer(
        max_epochs=before + EPOCHS, callbacks=[keep], precision="bf16-mixed", gradient_clip_val=1.0, logger=False
    )
    trainer.fit(Flip(), DataLoader(torch.randn(1024, 64), batch_size=32), ckpt_path=last if before else None)
    if trainer.is_global_zero:
        print(f"epochs {before} to {trainer.current_epoch}: loss {trainer.callback_metrics['loss'].item():.4f}")
        print(trainer.optimizers[0].memory_report())


if __name__ == "__main__":
    main()
