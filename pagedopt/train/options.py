"""From the command line to a checked set of options."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pagedopt.cli import UsageError
from pagedopt.train.sizes import DEFAULT_SIZE, SIZES, Size

OPTIMIZERS = {"both": ("paged", "torch"), "paged": ("paged",), "torch": ("torch",)}
LEAST = {"batch": 1, "block": 1, "steps": 1, "threads": 1, "seed": 0, "checkpoint_every": 0, "lr": 0, "weight_decay": 0}
LARGEST_SEED = 2**63 - 1  # of torch's generators


@dataclass(frozen=True)
class Options:
    """Everything a run depends on. All but the last three decide its losses."""

    size: str
    batch: int
    block: int
    steps: int
    seed: int
    optimizer: str
    lr: float
    weight_decay: float
    device: str
    threads: int
    checkpoint_every: int
    out: str

    @property
    def shape(self) -> Size:
        """The model's shape."""
        return SIZES[self.size]


MAY_CHANGE = ("threads", "checkpoint_every", "out")


def resolve(args: argparse.Namespace) -> Options:
    """Check the options of a new run and fill in the defaults."""
    check_ranges(args)
    device = pick_device(args.device)
    size = args.size or DEFAULT_SIZE[device.type]
    shape = SIZES[size]
    defaults: dict[str, Any] = {
        "size": size,
        "batch": shape.batch,
        "block": shape.block,
        "steps": shape.steps,
        "seed": 0,
        "optimizer": "both",
        "lr": shape.lr,
        "weight_decay": 0.1,
        "threads": torch.get_num_threads(),
        "checkpoint_every": 100,
        "out": "runs/train",
    }
    return Options(**{**defaults, **given(args), "device": str(device)})


def resolve_resumed(args: argparse.Namespace, saved: dict[str, Any]) -> Options:
    """Take a checkpoint's options; refuse any given beside --resume that would change the run."""
    check_ranges(args)
    asked = given(args)
    if "device" in asked:
        asked["device"] = str(pick_device(args.device))
    for name, value in asked.items():
        if name not in MAY_CHANGE and value != saved[name]:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {value}: the checkpoint {args.resume} was made with {flag} {saved[name]}. "
                "Leave the option out to go on with that run, or leave out --resume to start another."
            )
    pick_device(saved["device"])
    return Options(**{**saved, "out": str(args.resume.parent), **asked})


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were passed, by name."""
    names = Options.__dataclass_fields__
    passed = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if "out" in passed:
        passed["out"] = str(passed["out"])
    return passed


def check_ranges(args: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing."""
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and not least <= value < float("inf"):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value}: must be a number of at least {least}")
    if args.seed is not None and args.seed > LARGEST_SEED:
        raise UsageError(f"--seed {args.seed}: must be at most {LARGEST_SEED}")


def pick_device(name: str | None) -> torch.device:
    """Return the device asked for, or the best there is; refuse one that is not there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEFAULT_SIZE:
        raise UsageError(f"--device {name}: must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"torch {torch.__version__} sees {count} GPU{'' if count == 1 else 's'}"
            raise UsageError(f"--device {name}: {found} here. Use another device, or --device cpu.")
    return device


def as_saved(options: Options) -> dict[str, Any]:
    """Return the options as plain values, for a checkpoint or a JSON file."""
    return asdict(options)
