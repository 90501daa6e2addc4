"""The options of a run: read from the command line or a checkpoint, completed with defaults, and checked."""

from __future__ import annotations

import argparse
import os
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch

from ...common.kind_of import kind_of
from ...common.units import text_of_bytes
from ...formats.names import full_name
from ...paging.budget import Budget
from ...placements.choose import ARENAS, Arena, check_placement, default_placement
from ...planning.estimate import estimate
from ...planning.sizes import DEFAULT_SIZE, SIZES, Size, shapes
from ...system.files import host
from ...system.files.state_file import state_folder
from ...system.machine import MAX_THREADS
from ..device import pick_device
from ..errors import UsageError

OPTIMIZERS = {"both": ("paged", "torch"), "paged": ("paged",), "torch": ("torch",)}
#: Bounds of options.
LOWER = {"batch": 1, "block": 1, "steps": 1, "threads": 1, "seed": 0, "checkpoint_every": 0, "lr": 0, "weight_decay": 0}
UPPER = {"seed": 2**63 - 1, "threads": MAX_THREADS}  # a seed of torch's generators
CHOICES: dict[str, Mapping[str, Any]] = {"size": SIZES, "optimizer": OPTIMIZERS}
#: Formats of PagedAdamW's state in which its losses are torch's but for rounding; None: as the parameters, float32.
AS_TORCH = (None, "float32", "float64")
EVERYTHING = "all"  # the --device-budget that limits nothing; None means that the option was not given


@dataclass(frozen=True)
class TrainOptions:
    """Everything a run depends on. All options but MAY_CHANGE decide its losses.

    Options with a default here are newer than the others: old checkpoints do not have them.
    """

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
    placement: str | None = None
    device_budget: str = EVERYTHING
    spill: bool = False
    state_format: str | None = None  # the full name
    overlap: str | None = None

    @property
    def shape(self) -> Size:
        """Shape of the model."""
        return SIZES[self.size]

    @property
    def budget(self) -> Budget:
        """``device_budget`` as a value; ValueError if the text is not a budget."""
        return Budget(self.device_budget)

    @property
    def state_bytes(self) -> int:
        """Bytes of AdamW's two moments in ``state_format``."""
        made: Any = self.state_format
        model = shapes(replace(self.shape, block=self.block))
        return estimate(model, state_format=made, placement="device", device="cpu").state_bytes


MAY_CHANGE = ("threads", "checkpoint_every", "out", "placement", "device_budget", "spill", "overlap")


def resolve(args: argparse.Namespace) -> TrainOptions:
    """Return the options of a new run, checked and with defaults."""
    check_ranges(vars(args))
    device = pick_device(args.device)
    size = args.size or DEFAULT_SIZE[device.type]
    placed = args.placement is not None or args.device_budget not in (None, EVERYTHING)
    defaults: dict[str, Any] = {
        **{name: getattr(SIZES[size], name) for name in ("batch", "block", "steps", "lr")},
        "size": size,
        "seed": 0,
        "optimizer": "both",
        "weight_decay": 0.1,
        "threads": torch.get_num_threads(),
        "checkpoint_every": 100,
        "out": "runs/train",
        # On a CPU this is the only way to see paging, unless the run itself spills.
        "spill": device.type == "cpu" and args.optimizer != "torch" and not placed,
    }
    options = TrainOptions(**{**defaults, **given(args), "device": str(device)})
    check_batch(options)
    check_state(options, given(args))
    return options


def resolve_resumed(args: argparse.Namespace, saved: dict[str, Any]) -> TrainOptions:
    """Return a checkpoint's options. Refuse options beside --resume that would change the losses."""
    check_ranges(vars(args))
    asked = given(args)
    try:
        check_saved({**saved, **asked} if isinstance(saved, dict) else saved)
    except UsageError as error:
        raise UsageError(f"--resume {args.resume}: wrong options in it: {error}") from error
    saved = {**{f.name: f.default for f in fields(TrainOptions) if f.default is not MISSING}, **saved}
    if "device" in asked:
        asked["device"] = str(pick_device(args.device))
    for name, value in asked.items():
        if name == "steps" and value != saved[name]:
            raise UsageError(
                f"--steps {value}: the checkpoint {args.resume} is of a run of {saved[name]} steps, and the learning "
                f"rate of each of them depends on their number. Leave out --resume to start a run of {value}."
            )
        if name not in MAY_CHANGE and value != saved[name]:
            flag = flag_of(name)
            how = f"without {flag}" if saved[name] is None else f"with {flag} {saved[name]}"
            raise UsageError(
                f"{flag} {value}: the checkpoint {args.resume} was made {how}. "
                "Leave the option out to go on with that run, or leave out --resume to start another."
            )
    pick_device(saved["device"])
    options = TrainOptions(**{**saved, "out": str(args.resume.parent), **asked})
    check_batch(options)
    check_state(options, given(args))
    return options


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given on the command line, by name."""
    passed = {f.name: value for f in fields(TrainOptions) if (value := getattr(args, f.name)) is not None}
    texts: dict[str, Callable[[Any], str]] = {"out": str, "state_format": full_name}
    return {name: texts[name](value) if name in texts else value for name, value in passed.items()}


def flag_of(name: str) -> str:
    """Return the option of the command line that sets a field."""
    return "--" + name.replace("_", "-")


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuse numbers that make no sense or exceed what the machine can do."""
    for name, least in LOWER.items():
        value, flag = values[name], flag_of(name)
        if value is not None and not least <= value < float("inf"):
            raise UsageError(f"{flag} {value}: must be a number of at least {least}")
        if value is not None and value > UPPER.get(name, value):
            cores = f" here, where there are {os.cpu_count()} cores" if name == "threads" else ""
            raise UsageError(f"{flag} {value}: must be at most {UPPER[name]}{cores}")


def check_batch(options: TrainOptions) -> None:
    """Refuse a batch whose tokens exceed the host's memory; otherwise the kernel would kill the process."""
    needed = 3 * 8 * options.batch * (options.block + 1)  # int64: indices, tokens, and a copy of the tokens
    room = host.available()
    if needed > room:
        raise UsageError(
            f"--batch {options.batch} of --block {options.block}: the tokens of one step take {text_of_bytes(needed)}, "
            f"and {text_of_bytes(room)} are free; use a smaller one"
        )


def check_saved(saved: Any) -> None:
    """Refuse options in a checkpoint that no run can have had."""
    if not isinstance(saved, dict):
        raise UsageError(f"they are {kind_of(saved)}, not a dict")
    types = typing.get_type_hints(TrainOptions)
    optional = {f.name for f in fields(TrainOptions) if f.default is not MISSING}
    if wrong := sorted(map(str, saved.keys() ^ types.keys() - (optional - saved.keys()))):
        raise UsageError(f"{', '.join(wrong)[:60]} should not be there, or is missing")
    for name, value in saved.items():
        if not isinstance(value, types[name]) or (isinstance(value, bool) and types[name] is not bool):
            raise UsageError(f"{name} is {kind_of(value)}, not {getattr(types[name], '__name__', types[name])}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UsageError(f"{name} is none of {', '.join(CHOICES[name])}")
    check_ranges(saved)


def check_state(options: TrainOptions, typed: Collection[str]) -> None:
    """Refuse options about optimizer state that cannot work, before anything is allocated.

    Args:
        options: of the run.
        typed: names of the options on the command line. If --spill is not among them (it is a default, or from a
            checkpoint), messages name it only if no other option is about state.
    """
    check_state_format(options)
    if options.overlap not in (None, "forward"):
        raise UsageError(f"--overlap {options.overlap!r}: there is only forward")
    if options.overlap is not None and options.optimizer == "torch":
        raise UsageError(f"--overlap {options.overlap}: only PagedAdamW has it; use --optimizer both or paged")
    asked = {"--placement": options.placement, "--device-budget": options.device_budget, "--spill": options.spill}
    flags = [flag for flag, value in asked.items() if value not in (None, EVERYTHING, False)]
    flags = [flag for flag in flags if flag != "--spill" or "spill" in typed] or flags
    text = " ".join(flag if flag == "--spill" else f"{flag} {asked[flag]}" for flag in flags)
    if flags and options.optimizer == "torch":
        raise UsageError(f"{text}: only PagedAdamW keeps its state elsewhere; use --optimizer both or paged")
    device = torch.device(options.device)
    known = ARENAS[device.type]
    if options.placement is not None and options.placement not in known:
        raise UsageError(f"{text}: for parameters on {device} there are {', '.join(sorted(known))}")
    try:
        budget = options.budget
        budget.check_unit()
        check_placement(options.placement, budget, None)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from error
    kind = known[options.placement or default_placement(device, Budget(0) if options.spill else budget)]
    if options.spill:
        check_act(options, kind, text)
    if kind.name == "file":
        try:
            state_folder()
        except ValueError as error:
            raise UsageError(f"{text}: {error}" + ("; --no-spill needs none" if options.spill else "")) from error


def check_state_format(options: TrainOptions) -> None:
    """Refuse a format that is unknown or unfit, and one for an optimizer that has none."""
    if options.state_format is None:
        return
    text, given = f"--state-format {options.state_format}", options.state_format
    if options.optimizer == "torch":
        raise UsageError(f"{text}: only PagedAdamW stores its state in it; use --optimizer both or paged")
    try:
        estimate([(1,)], state_format=given)  # type: ignore[arg-type]  # refuses what PagedAdamW does
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from error


def check_act(options: TrainOptions, kind: type[Arena], text: str) -> None:
    """Refuse a second act that would spill nothing."""
    if not (kind.away and kind.keeps_budget):
        raise UsageError(f"{text}: no budget sends state of placement {kind.name} away; use another, or --no-spill")
    budget = options.budget
    if not (budget.everything or budget.auto) and budget.of(options.state_bytes) == options.state_bytes:
        size = text_of_bytes(options.state_bytes)
        raise UsageError(f"{text}: all state stays, it is {size}; use a smaller --device-budget, or --no-spill")
