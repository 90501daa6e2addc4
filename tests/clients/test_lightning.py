"""Lightning's Trainer, and Fabric."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import clients
import pytest
import torch
import torchvision_operators
from clients import ADAMW, PLACES, digest, everywhere, moved_alike, on_devices, values
from optim_support import model

from pagedopt import PagedAdamW

torchvision_operators.declare()
lightning = pytest.importorskip("lightning", reason="lightning is not installed")
pytestmark = [pytest.mark.clients, clients.NOT_QUEUED]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

STEPS = 6


def loader(batches: int = STEPS) -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(torch.randn(8 * batches, 13, generator=generator), batch_size=8)


class Automatic(lightning.LightningModule):
    """Lightning steps; the schedule changes the learning rate after each step."""

    make: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = model(), []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: torch.Tensor, _: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        opt = self.make(self.net.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Automatic):
    """The module steps, every second time with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        opt = self.optimizers()

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        if index % 2:
            opt.step(closure=closure)
        else:
            closure()
            opt.step()
        self.lr_schedulers().step()


def one_of(device: str) -> dict[str, Any]:
    return {"accelerator": "cpu" if device == "cpu" else "gpu", "devices": 1}


def fit(folder: Path, device: str, module: Any, make: Any, checkpoint: Path | None = None, **options: Any) -> Any:
    """The optimizer, after two epochs."""
    module.make = make
    trainer = trainer_in(folder, device, **options)
    trainer.fit(module, loader(STEPS // 2), ckpt_path=checkpoint)
    return trainer.optimizers[0]


def trainer_in(folder: Path, device: str, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    rest = {"max_epochs": 2, "enable_checkpointing": False, **options}
    return lightning.Trainer(default_root_dir=folder, **one_of(device), **quiet, **rest)


def beside_torch(
    folder: Path, device: str, place: str, near: float, kind: Any = Automatic, torchs: Any = clients.torchs,
    ours: Any = (), **options: Any,
) -> None:  # fmt: skip
    ends = []
    for make in (functools.partial(clients.both(place)[0], **dict(ours)), torchs):
        module = kind()
        opt = fit(folder, device, module, make, **options)
        ends.append((module.losses, values(module.net), opt))
    steps = 4 if "accumulate_grad_batches" in options else STEPS
    clients.agree(ends, steps, near, values(model()), skips=options.get("precision") == "16-mixed")


@everywhere
def test_automatic_optimization(tmp_path: Path, device: str, place: str) -> None:
    """Automatic optimization, with a schedule, clipping and accumulation."""
    beside_torch(tmp_path, device, place, 1e-5, gradient_clip_val=0.5, accumulate_grad_batches=2)


@everywhere
def test_manual_optimization(tmp_path: Path, device: str, place: str) -> None:
    """Manual optimization, `optimizer.step()` with and without a closure."""
    beside_torch(tmp_path, device, place, 1e-5, kind=Manual)


@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2, "max_epochs": 4}], ids=str)
def test_attached(tmp_path: Path, more: dict[str, Any]) -> None:
    """`attach(model)`, with a schedule, clipping and accumulation."""

    def run(make: Any) -> Any:
        module = Automatic()
        opt = make(module.net)
        fit(tmp_path, "cpu", module, lambda params: opt, gradient_clip_val=0.5, **more)
        return module.losses, module.net

    clients.alike_when_attached(run)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@everywhere
def test_bf16(tmp_path: Path, device: str, place: str, precision: str) -> None:
    """`precision="bf16-mixed"` and `"bf16-true"`, where parameters and state are bfloat16."""
    beside_torch(tmp_path, device, place, 2e-2, precision=precision)


@clients.on_cuda
def test_fp16_mixed(tmp_path: Path, device: str, place: str) -> None:
    """`precision="16-mixed"`, with its scaler and clipping, for which Lightning refuses torch's fused optimizers."""
    loop = functools.partial(clients.torchs, fused=False)
    beside_torch(tmp_path, device, place, 2e-2, torchs=loop, precision="16-mixed", gradient_clip_val=0.5)


@clients.on_cuda
def test_fp16_mixed_fused(tmp_path: Path, device: str, place: str) -> None:
    """`precision="16-mixed"` with `fused=True`: the step divides by the scale of Lightning's scaler."""
    beside_torch(tmp_path, device, place, 2e-2, ours={"fused": True}, precision="16-mixed")


@clients.on_cuda
def test_fp16_mixed_clipped_inside(tmp_path: Path, device: str, place: str) -> None:
    """`precision="16-mixed"` with `fused=True, max_grad_norm=0.5`, where torch's loop is clipped by Lightning."""
    loop = functools.partial(clients.torchs, fused=False)
    ends = []
    for make, options in (
        (functools.partial(clients.both(place)[0], fused=True, max_grad_norm=0.5), {}),
        (loop, {"gradient_clip_val": 0.5}),
    ):
        module = Automatic()
        opt = fit(tmp_path, device, module, make, precision="16-mixed", **options)
        ends.append((module.losses, values(module.net), opt))
    clients.agree(ends, STEPS, 2e-2, values(model()), skips=True)


@clients.on_cuda
def test_lightning_refuses_to_clip_what_is_fused(tmp_path: Path, device: str, place: str) -> None:
    """`precision="16-mixed"` and `gradient_clip_val` refuse `fused=True` of ours, as they do of torch's."""
    for make in (functools.partial(clients.both(place)[0], fused=True), clients.torchs):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping because it performs unscaling"):
            fit(tmp_path, device, Automatic(), make, precision="16-mixed", gradient_clip_val=0.5)


def ours_in(place: str) -> Any:
    return lambda p: PagedAdamW(p, **ADAMW, **PLACES[place])


def saving(folder: Path) -> dict[str, Any]:
    """Options of Lightning's Trainer for a checkpoint after each epoch."""
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    return {"callbacks": [keep], "enable_checkpointing": True}


class Tuned(Automatic):
    """One that is tuned: its backbone, and what of a batch fits."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[0]

    def training_step(self, batch: torch.Tensor, _: int) -> Any:
        if len(batch) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
        return self.loss(batch)


class Sized(lightning.LightningDataModule):
    """Data in batches of a size to be found."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(64, 13), batch_size=self.batch_size)


class Frozen(Tuned):
    """One whose backbone waits."""

    def configure_optimizers(self) -> Any:
        self.backbone.requires_grad_(False)
        return self.make(clients.trainable(self.net))


CALLBACKS = {
    "swa": lambda: lightning.pytorch.callbacks.StochasticWeightAveraging(0.002, swa_epoch_start=1),
    "ema": lambda: lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.8),
    "finetuning": lambda: lightning.pytorch.callbacks.BackboneFinetuning(1, backbone_initial_lr=0.003),
}


@pytest.mark.parametrize("name", CALLBACKS)
@everywhere
def test_callbacks(tmp_path: Path, device: str, place: str, name: str) -> None:
    """`StochasticWeightAveraging`, `EMAWeightAveraging`, and `BackboneFinetuning`, which adds a group."""
    ends = []
    for make in clients.both(place):
        module = Frozen() if name == "finetuning" else Automatic()
        opt = fit(tmp_path, device, module, make, max_epochs=4, callbacks=[CALLBACKS[name]()])
        ends.append((module.losses, values(module.net), opt))
    clients.agree(ends, 12, 1e-5, values(model()))


@everywhere
def test_tuner(tmp_path: Path, device: str, place: str) -> None:
    """`Tuner.lr_find` and `Tuner.scale_batch_size`: what they try leaves nothing behind in the training."""
    ends = []
    for make in clients.both(place):
        module, data = Tuned(), Sized()
        module.make, module.lr = make, 0.01
        trainer = trainer_in(tmp_path, device, max_epochs=1)
        tuner = lightning.pytorch.tuner.Tuner(trainer)
        rates = tuner.lr_find(module, loader(), num_training=8, update_attr=False).results["loss"]
        assert tuner.scale_batch_size(module, datamodule=data, steps_per_trial=2) == 8
        trainer.fit(module, loader(STEPS // 2))
        ends.append((rates + module.losses[-3:], values(module.net)))
    (ours, mine), (theirs, others) = ends
    assert ours == pytest.approx(theirs, rel=1e-5)
    moved_alike(mine, others, values(model()), 1e-5)


@on_devices
def test_checkpoints(tmp_path: Path, device: str) -> None:
    """`ModelCheckpoint` and `fit(ckpt_path=…)`, Fabric's `save` and `load`: resumed, also in another place."""

    def run(place: str) -> str:
        module = Automatic()
        end = digest(module.net, fit(tmp_path, device, module, ours_in(place), **saving(tmp_path / place)))
        fabric, net, opt = set_up(device, ours_in(place))
        batches = list(fabric.setup_dataloaders(loader()))
        train(fabric, net, opt, batches[:3])
        fabric.save(tmp_path / f"fabric {place}", {"net": net, "opt": opt})
        train(fabric, net, opt, batches[3:])
        return end + digest(net, opt.optimizer)

    clients.goes_on(__file__, tmp_path, device, run)


def go_on(folder: Path, device: str, before: str, after: str) -> str:
    module = Automatic()
    end = digest(module.net, fit(folder, device, module, ours_in(after), folder / before / "epoch=0.ckpt"))
    fabric, net, opt = set_up(device, ours_in(after))
    fabric.load(folder / f"fabric {before}", {"net": net, "opt": opt})
    train(fabric, net, opt, list(fabric.setup_dataloaders(loader()))[3:])
    return end + digest(net, opt.optimizer)


@everywhere
def test_the_class_changes_at_a_checkpoint(tmp_path: Path, device: str, place: str) -> None:
    """Ours loads a checkpoint of torch's AdamW, and torch's one of ours."""
    whole = Automatic()
    fit(tmp_path, device, whole, clients.torchs)
    for name, before, after in (("a", clients.torchs, ours_in(place)), ("b", ours_in(place), clients.torchs)):
        fit(tmp_path, device, Automatic(), before, **saving(tmp_path / name))
        module = Automatic()
        fit(tmp_path, device, module, after, tmp_path / name / "epoch=0.ckpt")
        assert module.losses == pytest.approx(whole.losses[3:], rel=1e-5)
        moved_alike(values(module.net), values(whole.net), values(model()), 1e-5)


def set_up(device: str, make: Any, **options: Any) -> Any:
    """Fabric, and what it makes of a model and an optimizer."""
    fabric = lightning.Fabric(**one_of(device), **options)
    net = model()
    return fabric, *fabric.setup(net, make(net.parameters()))


def train(fabric: Any, net: Any, opt: Any, batches: Any) -> list[float]:
    losses = []
    for x in batches:
        loss = net(x).square().mean()
        fabric.backward(loss)
        fabric.clip_gradients(net, opt, max_norm=0.5)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("precision", "near"), [("32-true", 1e-5), ("bf16-mixed", 2e-2)])
@everywhere
def test_fabric(device: str, place: str, precision: str, near: float) -> None:
    """Fabric: `setup`, `backward`, `clip_gradients`, in float32 and `bf16-mixed`."""
    ends = []
    for make in clients.both(place):
        fabric, net, opt = set_up(device, make, precision=precision)
        ends.append((train(fabric, net, opt, fabric.setup_dataloaders(loader())), values(net), opt.optimizer))
    clients.agree(ends, STEPS, near, values(model()))


def test_a_full_card_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """State for which the card has no room: Lightning's batch size finder sees a full card."""
    from lightning.pytorch.utilities.memory import is_oom_error, is_out_of_cpu_memory

    assert is_oom_error(clients.full_card(monkeypatch))
    assert not is_out_of_cpu_memory(clients.full_card(monkeypatch))


if __name__ == "__main__":
    clients.child(go_on)
