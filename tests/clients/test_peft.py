"""PEFT: LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import clients
import pytest
import torch
import torchvision_operators
from clients import ADAMW, PLACES, digest, everywhere, on_devices, values

from pagedopt import PagedAdamW

torchvision_operators.declare()
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("peft.optimizers")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore:.*load_in_8bit.*|.*fan_in_fan_out.*")]

STEPS = 6


def model(device: str, **config: Any) -> Any:
    """A GPT-2 of two layers with adapters on its attention."""
    return peft.get_peft_model(clients.gpt2(), lora(**config)).to(device)


def lora(**config: Any) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1, **config
    )


def train(net: Any, opt: Any, steps: int = STEPS, first: int = 0) -> list[float]:
    def loss_of(step: int) -> Any:
        torch.manual_seed(step)
        text = torch.randint(0, 61, (4, 16)).to(net.device)
        return net(input_ids=text, labels=text).loss

    return clients.steps(opt, range(first, first + steps), loss_of)


def beside_torch(device: str, place: str, make: Any, **config: Any) -> None:
    """``make(model, class, options)`` makes the optimizer."""
    ends = []
    for kind, options in clients.kinds(place):
        net = model(device, **config)
        start = values(net)
        opt = make(net, kind, options)
        ends.append((train(net, opt), values(net), opt))
    clients.agree(ends, STEPS, 1e-5, start, 1e-4)


@pytest.mark.parametrize("config", [{}, {"use_dora": True}], ids=["lora", "dora"])
@everywhere
def test_lora(device: str, place: str, config: dict[str, Any]) -> None:
    """LoRA and DoRA, all of the model's parameters given, of which only the adapters get gradients."""
    beside_torch(device, place, lambda net, kind, options: kind(net.parameters(), **options), **config)


@everywhere
def test_loraplus(device: str, place: str) -> None:
    """`create_loraplus_optimizer`, whose groups have rates of their own, and may be empty."""

    def make(net: Any, kind: Any, options: dict[str, Any]) -> Any:
        return peft.optimizers.create_loraplus_optimizer(net, kind, loraplus_lr_ratio=4.0, **options)

    beside_torch(device, place, make)


@everywhere
def test_adapters_that_come_and_go(device: str, place: str) -> None:
    """In mid-training an adapter is merged and unmerged, another one added with `add_param_group` and switched to."""
    ends = []
    for make in clients.both(place):
        net = model(device)
        opt = make(clients.trainable(net))
        losses = train(net, opt, 2)
        net.merge_adapter()
        net.unmerge_adapter()
        losses += train(net, opt, 2, 2)
        net.add_adapter("second", lora())
        net.set_adapter("second")
        opt.add_param_group({"params": clients.trainable(net), "lr": 0.02})
        start = values(net)
        losses += train(net, opt, 4, 4)
        ends.append((losses, values(net), opt))
    clients.agree(ends, 8, 1e-5, start, 1e-4)


@on_devices
def test_save_pretrained(tmp_path: Path, device: str) -> None:
    """`save_pretrained` and the optimizer's state dict, resumed, also in another place."""

    def run(place: str) -> str:
        net = model(device)
        opt = PagedAdamW(clients.trainable(net), **ADAMW, **PLACES[place])
        train(net, opt, 3)
        net.save_pretrained(tmp_path / place)
        torch.save(opt.state_dict(), tmp_path / f"{place}.pt")
        train(net, opt, 3, 3)
        return digest(net, opt)

    clients.goes_on(__file__, tmp_path, device, run)


def go_on(folder: Path, device: str, before: str, after: str) -> str:
    net = peft.PeftModel.from_pretrained(model(device).unload(), folder / before, is_trainable=True)
    opt = PagedAdamW(clients.trainable(net), **ADAMW, **PLACES[after])
    opt.load_state_dict(torch.load(folder / f"{before}.pt", weights_only=True))
    train(net, opt, 3, 3)
    return digest(net, opt)


if __name__ == "__main__":
    clients.child(go_on)
