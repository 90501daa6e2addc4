"""Trained by others with a queued update: the bits of a plain step, nothing reads too early, and pages are hidden."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_operators
from clients import ADAMW, gpt2, values
from overlapped import SmallPages, linears
from processes import together

from pagedopt import PagedAdamW

torchvision_operators.declare()
pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:this step was not queued.*no forward"),
]
AWAY: dict[str, Any] = {**ADAMW, "placement": SmallPages, "device_budget": 0}


@pytest.fixture(params=[6, pytest.param(200, marks=pytest.mark.long)])
def steps(request: pytest.FixtureRequest) -> int:
    """How many steps are compared."""
    return int(request.param)


def agree(ends: list[tuple[list[float], Any, Any]]) -> None:
    """Of a queued and a plain run: losses and weights are the same bits, and something was hidden."""
    (losses, weights, optimizer), (plain_losses, plain_weights, _) = ends
    assert losses == plain_losses
    assert all(map(torch.equal, weights, plain_weights))
    report = optimizer.overlap_report()
    assert report.hidden > sum(arena.layout.pages for arena in optimizer.store.arenas)
    assert not report.plain


@contextlib.contextmanager
def watched(optimizer: Any, attached: bool) -> Iterator[None]:
    with optimizer.watch_reads() if attached else contextlib.nullcontext():
        yield


def net() -> torch.nn.Module:
    torch.manual_seed(2)
    return linears(13, 40)


def batches(steps: int) -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(torch.randn(8 * steps, 13, generator=generator), batch_size=8)


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}], ids=str)
def test_trainer(tmp_path: Path, more: dict[str, Any], steps: int) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 61, (16,), generator=generator) for _ in range(64)]

    def run(attached: bool) -> Any:
        model = gpt2()
        optimizer = PagedAdamW(model.parameters(), **AWAY)
        if attached:
            optimizer.attach(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps)
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], max_steps=steps, per_device_train_batch_size=4, logging_steps=1,
            save_strategy="steps", save_steps=steps // 2, disable_tqdm=True, max_grad_norm=0.5, eval_strategy="steps",
            eval_steps=steps // 3, **more,
        )  # fmt: skip
        data = [{"input_ids": text, "labels": text} for text in texts]
        made = transformers.Trainer(
            model, arguments, train_dataset=data, eval_dataset=data[:4], optimizers=(optimizer, schedule)
        )
        with watched(optimizer, attached):
            made.train()
        optimizer.wait()
        history = made.state.log_history
        return [e[k] for e in history for k in ("loss", "eval_loss") if k in e], values(model), optimizer

    agree([run(True), run(False)])


@pytest.mark.parametrize("more", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_lightning(tmp_path: Path, more: dict[str, Any], steps: int) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, attached: bool) -> None:
            super().__init__()
            self.net, self.losses = net(), []
            self.optimizer = PagedAdamW(self.net.parameters(), **AWAY)
            if attached:
                self.optimizer.attach(self.net)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def run(attached: bool) -> Any:
        module = Module(attached)
        trainer = lightning.Trainer(
            default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_val=0.5,
            max_epochs=2 + 2 * ("accumulate_grad_batches" in more), **more,
        )  # fmt: skip
        with watched(module.optimizer, attached):
            trainer.fit(module, batches(steps // 2))
        module.optimizer.wait()
        return module.losses, values(module.net), module.optimizer

    agree([run(True), run(False)])


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_accelerate(more: dict[str, Any], steps: int) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    import clients

    def run(attached: bool) -> Any:
        clients.forget_accelerate()
        by, inner = accelerate.Accelerator(cpu=True, **more), net()
        optimizer = PagedAdamW(inner.parameters(), **AWAY)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        model, opt, data, schedule = by.prepare(inner, optimizer, batches(steps), schedule)
        if attached:
            optimizer.attach(model)
        losses = []
        with watched(optimizer, attached):
            for x in itertools.chain(*[data] * (1 + ("gradient_accumulation_steps" in more))):
                with by.accumulate(model), by.autocast():
                    loss = model(x).square().mean()
                    by.backward(loss)
                    if by.sync_gradients:
                        by.clip_grad_norm_(model.parameters(), 0.5)
                    opt.step()
                    schedule.step()
                    opt.zero_grad()
                losses.append(loss.item())
        optimizer.wait()
        return losses, values(inner), optimizer

    agree([run(True), run(False)])


@pytest.mark.parametrize("whole", [True, False], ids=["DDP", "its module"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_ddp(whole: bool, options: dict[str, Any], steps: int) -> None:
    """Two processes, over gloo."""
    for ours, plain in zip(_ddp(True, whole, options, steps), _ddp(False, whole, options, steps), strict=True):
        assert ours["losses"] == plain["losses"]
        assert all(map(torch.equal, ours["values"], plain["values"]))
        assert ours["hidden"] > 100
        assert not ours["plain"]


def _ddp(attached: bool, whole: bool, options: dict[str, Any], steps: int) -> list[Any]:
    return together("tests.clients.overlapped_group.trained", 2, "cpu", attached, whole, options, steps)


def test_fsdp_is_refused() -> None:
    (said,) = together("tests.clients.overlapped_group.refused", 1, "cpu")
    assert ["FullyShardedDataParallel" in said[0], "FSDPModule" in said[1]] == [True, True]
