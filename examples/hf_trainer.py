"""Hugging Face's Trainer: a small GPT-2, made here, learns to count; train, save, and go on where the last run ended.

    pip install -e '.[clients]'  # first
    python examples/hf_trainer.py

On all devices: where there are two GPUs, Trainer divides each batch between them; CUDA_VISIBLE_DEVICES=0 leaves one.
Run twice: the second run goes on with the first one's checkpoint, in runs/examples.
"""

from pathlib import Path

import torch

from pagedopt import PagedAdamW

try:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}; first: pip install -e '.[clients]'") from None

FOLDER = Path("runs/examples/trainer")
STEPS = 30


def main() -> None:
    starts = torch.randint(0, 100, (2048,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [torch.arange(start, start + 16) % 100 for start in starts]
    data = [{"input_ids": text, "labels": text} for text in texts]
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=16, vocab_size=100))

    last = get_last_checkpoint(str(FOLDER)) if FOLDER.exists() else None
    done = int(last.rpartition("-")[2]) if last else 0
    trainer = Trainer(
        model,
        TrainingArguments(
            str(FOLDER),
            max_steps=done + STEPS,
            per_device_train_batch_size=16,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_steps=STEPS,
            report_to=[],
        ),
        train_dataset=data,
        # The learning rate stands here: of its own arguments Trainer gives such a class weight_decay alone.
        optimizer_cls_and_kwargs=(PagedAdamW, {"lr": 3e-3, "device_budget": "50%"}),
    )
    trainer.train(resume_from_checkpoint=last)
    print(trainer.optimizer.optimizer.memory_report())


if __name__ == "__main__":
    main()
