"""From the command line to a checked set of options."""

from __future__ import annotations

import argparse
import os
import typing
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import torch

from ...common.units import text_of_bytes
from ...paging.budget import Budget
from ...placements.choose import ARENAS, Arena, check_placement, default_placement
from ...planning.affordable import Affordable
from ...system.files import host
from ...system.files.state_file import state_folder
from ...system.machine import MOST_THREADS
from ..device import pick_device
from ..errors import UsageError
from .sizes import DEFAULT_SIZE, SIZES, Size, parameter_count

OPTIMIZERS = {"both": ("paged", "torch"), "paged": ("paged",), "torch": ("torch",)}
LEAST = {"batch": 1, "block": 1, "steps": 1, "threads": 1, "seed": 0, "checkpoint_every": 0, "lr": 0, "weight_decay": 0}
MOST = {"seed": 2**63 - 1, "threads": MOST_THREADS}  # a seed of torch's generators
CHOICES: dict[str, Mapping[str, Any]] = {"size": SIZES, "optimizer": OPTIMIZERS}
EVERYTHING = "all"  # the --device-budget that is none; None stands for an option that was not given


@dataclass(frozen=True)
class TrainOptions:
    """Everything a run depends on. All but those that MAY_CHANGE decide its losses.

    Those with a default came later: a checkpoint may have been written without them.
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

    @property
    def shape(self) -> Size:
        """The model's shape."""
        return SIZES[self.size]

    @property
    def budget(self) -> Budget:
        """What ``device_budget`` says.

        Raises:
            ValueError: the text is no budget.
        """
        return Budget(self.device_budget)

    @property
    def state_bytes(self) -> int:
        """Bytes of AdamW's two moments, in float32 as the parameters are."""
        return 2 * 4 * parameter_count(self.shape, self.block)


MAY_CHANGE = ("threads", "checkpoint_every", "out", "placement", "device_budget", "spill")


def resolve(args: argparse.Namespace) -> TrainOptions:
    """Check the options of a new run and fill in the defaults."""
    check_ranges(vars(args))
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
        # Without a GPU it is the one way to see paging; beside a state that is spilled anyway it shows nothing new.
        "spill": device.type == "cpu"
        and args.optimizer != "torch"
        and args.placement is None
        and args.device_budget in (None, EVERYTHING),
    }
    options = TrainOptions(**{**defaults, **given(args), "device": str(device)})
    check_batch(options)
    check_state(options, given(args))
    return options


def resolve_resumed(args: argparse.Namespace, saved: dict[str, Any]) -> TrainOptions:
    """Take a checkpoint's options; refuse any given beside --resume that would change the run."""
    check_ranges(vars(args))
    asked = given(args)
    try:
        check_saved({**saved, **asked} if isinstance(saved, dict) else saved)
    except UsageError as error:
        raise UsageError(f"--resume {args.resume}: wrong options in it: {error}") from error
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
    options = TrainOptions(**{**saved, "out": str(args.resume.parent), **asked})
    check_batch(options)
    check_state(options, given(args))
    return options


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were passed, by name."""
    names = TrainOptions.__dataclass_fields__
    passed = {name: value for name, value in vars(args).items() if name in names and value is not None}
    if "out" in passed:
        passed["out"] = str(passed["out"])
    return passed


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuse numbers that mean nothing, or more than the machine can do."""
    for name, least in LEAST.items():
        value, flag = values[name], "--" + name.replace("_", "-")
        if value is not None and not least <= value < float("inf"):
            raise UsageError(f"{flag} {value}: must be a number of at least {least}")
        if value is not None and value > MOST.get(name, value):
            cores = f" here, where there are {os.cpu_count()} cores" if name == "threads" else ""
            raise UsageError(f"{flag} {value}: must be at most {MOST[name]}{cores}")


def check_batch(options: TrainOptions) -> None:
    """Refuse a batch whose tokens alone do not fit into the host's memory, before the system kills who asks for it."""
    needed, room = 3 * 8 * options.batch * (options.block + 1), host.available()  # indices, tokens, and a copy of them
    if needed > room:
        raise UsageError(
            f"--batch {options.batch} of --block {options.block}: the tokens of one step take {text_of_bytes(needed)}, "
            f"and {text_of_bytes(room)} are free; use a smaller one"
        )


def check_saved(saved: Any) -> None:
    """Refuse options that no run can have had: a checkpoint may hold anything."""
    if not isinstance(saved, dict):
        raise UsageError(f"they are a {type(saved).__name__}, not a dict")
    kinds = typing.get_type_hints(TrainOptions)
    optional = {field.name for field in fields(TrainOptions) if field.default is not MISSING}
    if wrong := sorted(map(str, saved.keys() ^ kinds.keys() - (optional - saved.keys()))):
        raise UsageError(f"{', '.join(wrong)[:60]} should not be there, or is missing")
    for name, value in saved.items():
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and kinds[name] is not bool):
            raise UsageError(f"{name} is a {type(value).__name__}, not {getattr(kinds[name], '__name__', kinds[name])}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UsageError(f"{name} is none of {', '.join(CHOICES[name])}")
    check_ranges(saved)


def check_state(options: TrainOptions, typed: Collection[str]) -> None:
    """Refuse a place for optimizer state that cannot be had, before anything is allocated.

    Args:
        options: of the run.
        typed: names of those that were given.  A --spill that was not, a default or a checkpoint's, is named only where
            it is the one that speaks of state.
    """
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
        Affordable().load(budget)
    except ValueError as error:
        raise UsageError(f"{text}: {error}") from error
    try:
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


def check_act(options: TrainOptions, kind: type[Arena], text: str) -> None:
    """Refuse a second act in which nothing would be spilled."""
    if not (kind.away and kind.keeps_budget):
        raise UsageError(f"{text}: no budget sends state of placement {kind.name} away; use another, or --no-spill")
    budget = options.budget
    if not (budget.everything or budget.measured) and budget.of(options.state_bytes) == options.state_bytes:
        size = text_of_bytes(options.state_bytes)
        raise UsageError(f"{text}: all state stays, it is {size}; use a smaller --device-budget, or --no-spill")


def as_saved(options: TrainOptions) -> dict[str, Any]:
    """The options as plain values, for a checkpoint or a JSON file."""
    return asdict(options)
