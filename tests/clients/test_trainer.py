"""Hugging Face's Trainer."""

from __future__ import annotations

import os
import signal
import weakref
from pathlib import Path
from typing import Any

import clients
import pytest
import torch
import torchvision_operators
from children import run
from clients import ADAMW, PLACES, Watched, digest, everywhere, gpt2, moved_alike, on_devices, values

from pagedopt import PagedAdamW, PagedScheduleFreeAdamW

torchvision_operators.declare()
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = [pytest.mark.clients, clients.NOT_QUEUED]

STEPS = 6
SAVING = {"save_strategy": "steps", "save_steps": 3}


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 61, (16,), generator=generator) for _ in range(64)]
    return [{"input_ids": text, "labels": text} for text in texts]


def trainer(folder: Path, device: str, net: Any = None, kind: Any = None, more: Any = (), **arguments: Any) -> Any:
    """A Trainer, made of ``arguments`` for TrainingArguments and ``more`` for itself."""
    usual = {"max_steps": STEPS, "per_device_train_batch_size": 4, "save_strategy": "no", "logging_steps": 1}
    usual |= {"lr_scheduler_type": "cosine", "weight_decay": ADAMW["weight_decay"], "disable_tqdm": True}
    settings = transformers.TrainingArguments(
        str(folder), use_cpu=device == "cpu", report_to=[], **{**usual, **arguments}
    )
    settings._n_gpu = min(1, settings.n_gpu)  # with more it would wrap the model in DataParallel
    net = net or gpt2()
    return transformers.Trainer(net, settings, train_dataset=data(), optimizer_cls_and_kwargs=kind, **dict(more))


def losses(made: Any) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def inner(made: Any) -> Any:
    """Its optimizer, out of accelerate's wrapping."""
    opt = made.optimizer
    while hasattr(opt, "optimizer"):
        opt = opt.optimizer
    return opt


def beside_torch(tmp_path: Path, device: str, place: str, near: float, ours: Any = (), **arguments: Any) -> None:
    """Train with ours and with torch's: every step is torch's, and so are losses and weights to ``near``; ``ours`` are
    options more."""
    ends = []
    (mine, options), theirs = clients.kinds(place)
    for kind in ((mine, {**options, **dict(ours)}), theirs):
        made = trainer(tmp_path, device, kind=kind, **arguments)
        made.train()
        ends.append((losses(made), values(made.model), inner(made)))
    clients.agree(ends, STEPS, near, values(gpt2()), skips=bool(arguments.get("fp16")))


@everywhere
def test_optimizer_cls_and_kwargs(tmp_path: Path, device: str, place: str) -> None:
    """`optimizer_cls_and_kwargs`, with a schedule and clipping."""
    beside_torch(tmp_path, device, place, 1e-5, max_grad_norm=0.5)


@everywhere
def test_bf16_and_accumulation(tmp_path: Path, device: str, place: str) -> None:
    """`bf16=True`, `gradient_accumulation_steps=2`."""
    beside_torch(tmp_path, device, place, 2e-2, bf16=True, gradient_accumulation_steps=2)


@everywhere
def test_schedule_free(tmp_path: Path, device: str, place: str) -> None:
    """`PagedScheduleFreeAdamW`: Trainer evaluates at the average, and goes on where gradients are taken."""
    kind = PagedScheduleFreeAdamW, {"lr": 2e-2, "warmup_steps": 2, **PLACES[place]}
    held, runs = data()[:8], []
    for often in ({}, {"eval_strategy": "steps", "eval_steps": 2}):
        net = gpt2()
        for module in net.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # an evaluation's loader draws a random number
        made = trainer(
            tmp_path, device, net, kind, more={"eval_dataset": held}, lr_scheduler_type="constant",
            logging_nan_inf_filter=False, **often,
        )  # fmt: skip
        made.train()
        runs.append((made, made.evaluate()["eval_loss"]))
    (made, at_average), (evaluated, also) = runs
    assert losses(evaluated) == pytest.approx(losses(made), rel=1e-4), "evaluation changes the training"
    said = [entry["eval_loss"] for entry in evaluated.state.log_history if "eval_loss" in entry]
    assert said[2] == pytest.approx(also)
    assert also == pytest.approx(at_average, rel=1e-4)
    assert all(group["averaged"] for group in inner(made).param_groups), "it has evaluated where gradients are taken"
    at, batch = [], {name: torch.stack([each[name] for each in held]).to(device) for name in held[0]}
    with torch.no_grad():
        for go in (lambda: None, inner(made).train, inner(made).eval):
            go()
            at.append(made.model(**batch).loss.item())
    assert at[0] == pytest.approx(at[2], rel=1e-5)
    assert abs(at[1] - at[0]) > 1e-3 * at[0], "the average is where gradients are taken"


@clients.on_cuda
def test_fp16(tmp_path: Path, device: str, place: str) -> None:
    """`fp16=True` with `fused=True`: Trainer unscales and clips, the step skips what is infinite."""
    beside_torch(tmp_path, device, place, 2e-2, ours={"fused": True}, fp16=True)


@clients.on_cuda
def test_fp16_clipped_inside(tmp_path: Path, device: str, place: str) -> None:
    """`fp16=True`, `max_grad_norm=0`: the step divides by the scale and clips, with `fused=True, max_grad_norm=0.5`."""
    ends = []
    (ours, options), theirs = clients.kinds(place)
    for kind, clip in (((ours, {**options, "fused": True, "max_grad_norm": 0.5}), 0.0), (theirs, 0.5)):
        made = trainer(tmp_path, device, kind=kind, fp16=True, max_grad_norm=clip)
        made.train()
        ends.append((losses(made), values(made.model), inner(made)))
    clients.agree(ends, STEPS, 2e-2, values(gpt2()), skips=True)


#: Of a model loaded in bfloat16: the class's options, and bytes of state a parameter.
SIXTEEN: dict[str, tuple[dict[str, Any], int]] = {
    "stochastic": ({"param_rounding": "stochastic"}, 4),
    "+8": ({"param_format": "bfloat16+8", "state_format": "int8"}, 9),
    "+16": ({"param_format": "bfloat16+16"}, 10),
}


def in_bfloat16(folder: Path, device: str, stored: str, **arguments: Any) -> Any:
    """A Trainer of a model that is loaded in bfloat16 from ``folder``."""
    net = transformers.GPT2LMHeadModel.from_pretrained(str(folder / "gpt2"), dtype=torch.bfloat16)
    options = {"lr": 1e-4, **SIXTEEN[stored][0], "device_budget": 0}
    torch.manual_seed(0)
    return trainer(folder / "made", device, net, (PagedAdamW, options), **{"max_steps": 200, **arguments})


@on_devices
@pytest.mark.parametrize("stored", SIXTEEN)
def test_a_model_loaded_in_bfloat16(tmp_path: Path, device: str, stored: str) -> None:
    """A model loaded in bfloat16, `param_rounding` or `param_format`: 200 steps, killed and resumed, to the bit."""
    gpt2().save_pretrained(str(tmp_path / "gpt2"))
    saving = {"save_strategy": "steps", "save_steps": 100}
    whole = in_bfloat16(tmp_path, device, stored)
    whole.train()
    code = f"import test_trainer; test_trainer.train_until_killed({str(tmp_path)!r}, {device!r}, {stored!r})"
    done = run("-c", code, timeout=110)
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = in_bfloat16(tmp_path, device, stored, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "made" / "checkpoint-100"))
    assert again.state.global_step == 200
    assert digest(again.model, inner(again)) == digest(whole.model, inner(whole))
    opt, net = inner(again), again.model
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    masters = opt.master_state_dict(net.named_parameters())
    lost = sum(int((masters[name] != p).sum()) for name, p in net.named_parameters())
    assert (lost > 0) is ("param_format" in SIXTEEN[stored][0])
    state = sum(t.nbytes for entry in opt.state.values() for name, t in entry.items() if name != "step")
    assert state <= SIXTEEN[stored][1] * sum(p.numel() for p in net.parameters())


def train_until_killed(folder: str, device: str, stored: str) -> None:
    """In a process of its own, which ends amid its way from a checkpoint to the next."""

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 130:
                os.kill(os.getpid(), signal.SIGKILL)

    clients.exact()
    made = in_bfloat16(Path(folder), device, stored, save_strategy="steps", save_steps=100)
    made.add_callback(Kill())
    made.train()


@everywhere
def test_gradient_checkpointing(tmp_path: Path, device: str, place: str) -> None:
    """`gradient_checkpointing=True`."""
    beside_torch(tmp_path, device, place, 1e-5, gradient_checkpointing=True)


@everywhere
def test_optimizers(tmp_path: Path, device: str, place: str) -> None:
    """`optimizers=(optimizer, scheduler)`, made by the user before Trainer moves the model."""
    ends = []
    for make in clients.both(place):
        net = gpt2()
        opt = make(net.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=STEPS)
        made = trainer(tmp_path, device, net, more={"optimizers": (opt, schedule)})
        made.train()
        ends.append((losses(made), values(made.model), opt))
    clients.agree(ends, STEPS, 1e-5, values(gpt2()))


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}], ids=str)
def test_attached(tmp_path: Path, more: dict[str, Any]) -> None:
    """`attach(model)`, with accumulation, gradient checkpointing, evaluation and checkpoints amid the training."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.5, **SAVING}

    def run(make: Any) -> Any:
        net = gpt2()
        opt = make(net)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=STEPS)
        own = {"optimizers": (opt, schedule), "eval_dataset": data()[:4]}
        made = trainer(tmp_path, "cpu", net, more=own, **evaluated, **more)
        made.train()
        return [entry[k] for entry in made.state.log_history for k in ("loss", "eval_loss") if k in entry], net

    clients.alike_when_attached(run)


@on_devices
def test_resume_in_a_new_process(tmp_path: Path, device: str) -> None:
    """`resume_from_checkpoint`: resumed, also in another place."""

    def run(place: str) -> str:
        made = trainer(tmp_path / place, device, kind=(PagedAdamW, {**ADAMW, **PLACES[place]}), **SAVING)
        made.train()
        return digest(made.model, inner(made))

    clients.goes_on(__file__, tmp_path, device, run)


def go_on(folder: Path, device: str, before: str, after: str) -> str:
    made = trainer(folder / "again", device, kind=(PagedAdamW, {**ADAMW, **PLACES[after]}), **SAVING)
    made.train(resume_from_checkpoint=str(folder / before / "checkpoint-3"))
    return digest(made.model, inner(made))


@everywhere
def test_the_class_changes_at_a_checkpoint(tmp_path: Path, device: str, place: str) -> None:
    """Ours loads a checkpoint of torch's AdamW, and torch's one of ours."""
    ours, theirs = clients.kinds(place)
    whole = trainer(tmp_path / "whole", device, kind=theirs)
    whole.train()
    for name, before, after in (("to ours", theirs, ours), ("to torch's", ours, theirs)):
        trainer(tmp_path / name, device, kind=before, **SAVING).train()
        made = trainer(tmp_path / name, device, kind=after, **SAVING)
        made.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-3"))
        assert losses(made) == pytest.approx(losses(whole), rel=1e-5)
        moved_alike(values(made.model), values(whole.model), values(gpt2()), 1e-5)
        assert getattr(inner(made), "watched", 3) == 3


class Crowded(torch.nn.Module):
    """A model that runs out of memory with more than two texts, in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = gpt2(), 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.calls += 1
        if len(input_ids) > 2 and self.calls > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
        return self.net(input_ids=input_ids, labels=labels)


@everywhere
def test_auto_find_batch_size(tmp_path: Path, device: str, place: str) -> None:
    """`auto_find_batch_size=True`: a failed try leaves nothing in memory but the state that is still used."""
    made = trainer(tmp_path, device, Crowded(), (Watched, PLACES[place]), auto_find_batch_size=True)
    left: list[Any] = []

    class Look(transformers.TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            left.extend(weakref.ref(p.grad) for p in made.model.parameters())

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            assert not [ref for ref in left if ref() is not None], "gradients of the failed try are still there"
            left.clear()

    made.add_callback(Look())
    made.train()
    assert made.state.train_batch_size <= 2
    assert made.state.global_step == STEPS
    state, pages = 8 * sum(p.numel() for p in made.model.parameters()), 4 << 20 if device == "cuda" else 0
    assert state <= sum(inner(made).memory_report().by_place.values()) <= 1.5 * state + pages


if __name__ == "__main__":
    clients.child(go_on)
