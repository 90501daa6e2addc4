"""timm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import clients
import pytest
import torch
import torchvision_operators
from clients import ADAMW, PLACES, Watched, digest, everywhere, on_devices, values

from pagedopt import PagedAdamW

torchvision_operators.declare()
timm = pytest.importorskip("timm", reason="timm is not installed")
for part in ("optim", "scheduler", "utils"):
    pytest.importorskip(f"timm.{part}")
pytestmark = pytest.mark.clients

STEPS = 8


def model(device: str) -> Any:
    """A vision transformer of three blocks for images of 16 x 16."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "mlp_ratio": 2}
    return timm.models.VisionTransformer(**sizes, num_classes=5).to(device)


def batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 3, 16, 16, generator=generator)
    return images.to(device), torch.randint(0, 5, (8,), generator=generator).to(device)


def train(net: Any, opt: Any, device: str, steps: int = STEPS, first: int = 0, after: Any = None) -> list[float]:
    """``after(step)`` is called behind each step."""

    def loss_of(step: int) -> torch.Tensor:
        images, labels = batch(step, device)
        return torch.nn.functional.cross_entropy(net(images), labels)

    return clients.steps(opt, range(first, first + steps), loss_of, after)


def beside_torch(device: str, place: str, make: Any, average: Any = None) -> None:
    """``make(model, class, options)`` makes the optimizer; ``average(model, optimizer)`` what is called after steps,
    and what follows the model, compared too."""
    ends = []
    for kind, options in clients.kinds(place):
        net = model(device)
        start = values(net)
        opt = make(net, kind, options)
        after, follower = average(net, opt) if average else (None, net)
        losses = train(net, opt, device, after=after)
        ends.append((losses, values(net) + values(follower), getattr(opt, "_base_optimizer", opt)))
    clients.agree(ends, STEPS, 1e-5, [*start, *start], 1e-4)


def plain(net: Any, kind: Any, options: dict[str, Any]) -> Any:
    return kind(net.parameters(), **options)


@everywhere
def test_weight_decay_groups(device: str, place: str) -> None:
    """`param_groups_weight_decay`: no decay of biases and norms; `CosineLRScheduler` with warm-up."""

    def make(net: Any, kind: Any, options: dict[str, Any]) -> Any:
        return kind(timm.optim.param_groups_weight_decay(net, 0.2), **options)

    def schedule(net: Any, opt: Any) -> Any:
        of = timm.scheduler.CosineLRScheduler(opt, STEPS, warmup_t=2, warmup_lr_init=1e-3)
        return of.step, net

    beside_torch(device, place, make, schedule)


@everywhere
def test_layer_decay(device: str, place: str) -> None:
    """`param_groups_layer_decay`: groups with an `lr_scale` of their own, which the schedule multiplies in."""

    def make(net: Any, kind: Any, options: dict[str, Any]) -> Any:
        groups = timm.optim.param_groups_layer_decay(net, weight_decay=0.2, layer_decay=0.5)
        assert len({group["lr_scale"] for group in groups}) == 5
        return kind(groups, **options)

    def schedule(net: Any, opt: Any) -> Any:
        return timm.scheduler.CosineLRScheduler(opt, STEPS).step, net

    beside_torch(device, place, make, schedule)


@pytest.mark.parametrize("name", ["paged", "lookahead_paged"])
@everywhere
def test_create_optimizer_v2(device: str, place: str, name: str) -> None:
    """`create_optimizer_v2` with a class of ours in timm's registry, by itself and under its `Lookahead`
    (no budget covers its slow weights: there is a warning)."""

    def make(net: Any, kind: Any, options: dict[str, Any]) -> Any:
        info = timm.optim.OptimInfo(name="paged", opt_class=kind, has_betas=True)
        timm.optim._optim_factory.default_registry.register(info)
        return timm.optim.create_optimizer_v2(net, name, layer_decay=0.7, **options)

    beside_torch(device, place, make)


@everywhere
def test_ema(device: str, place: str) -> None:
    """`ModelEmaV3`, updated after each step."""

    def average(net: Any, _: Any) -> Any:
        ema = timm.utils.ModelEmaV3(net, decay=0.8)
        return (lambda step: ema.update(net, step)), ema.module

    beside_torch(device, place, plain, average)


@clients.on_cuda
def test_native_scaler(device: str, place: str) -> None:
    """`NativeScaler` in float16, with clipping."""
    net = model(device)
    opt = Watched(net.parameters(), **PLACES[place])
    scaler = timm.utils.NativeScaler()
    for step in range(STEPS):
        images, labels = batch(step, device)
        with torch.autocast(device, torch.float16):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
        opt.zero_grad()
        scaler(loss, opt, clip_grad=0.5, parameters=net.parameters())
    assert opt.watched >= 2  # once the scale is down


@on_devices
def test_checkpoint_saver(tmp_path: Path, device: str) -> None:
    """`CheckpointSaver`, and `resume_checkpoint`: resumed, also in another place."""

    def run(place: str) -> str:
        net, opt = made(device, place)
        train(net, opt, device, 4)
        (tmp_path / place).mkdir()
        timm.utils.CheckpointSaver(net, opt, checkpoint_dir=str(tmp_path / place)).save_checkpoint(0)
        train(net, opt, device, 4, 4)
        return digest(net, opt)

    clients.goes_on(__file__, tmp_path, device, run)


def made(device: str, place: str) -> Any:
    net = model(device)
    groups = timm.optim.param_groups_layer_decay(net, weight_decay=0.2, layer_decay=0.5)
    return net, PagedAdamW(groups, **ADAMW, **PLACES[place])


def go_on(folder: Path, device: str, before: str, after: str) -> str:
    net, opt = made(device, after)
    timm.models.resume_checkpoint(net, str(folder / before / "last.pth.tar"), opt)
    train(net, opt, device, 4, 4)
    return digest(net, opt)


if __name__ == "__main__":
    clients.child(go_on)
