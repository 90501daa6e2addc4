"""Options that a group of parameters may have for itself: ``state_format``, ``rounding`` and ``seed``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ...formats.floating import check_format
from ...system.warn import warn_once
from .rule_optimizer import Group, RuleOptimizer

#: The most that a seed may be: kernels get it beside a step count of 32 bits, in a double.
MAX_SEED = 2**21 - 1
#: What the option ``rounding`` was called when second moments alone were rounded at random.
OLD_ROUNDING = "v_rounding"


def check_group_options(given: Mapping[str, Any], states: Collection[str] | None = None) -> None:
    """Check those options that are in ``given``.

    Raises:
        ValueError, TypeError: one has a bad value.
    """
    if "state_format" in given:
        check_format(given["state_format"], states)
    if (rounding := given.get("rounding")) not in (None, "nearest", "stochastic"):
        raise ValueError(f"rounding is {rounding!r}; it must be 'nearest', 'stochastic' or None (by the state)")
    _check_seed(given.get("seed", 0))


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed!r}; it must be a whole number from 0 to {MAX_SEED:,}")


def seed_word(optimizer: RuleOptimizer, group: int) -> float:
    """Return a group's seed where kernels expect it, beside a step in the lower 32 bits: below 2**53, so exact.

    Raises:
        ValueError: it is none: users may have set it since the group was added.
    """
    seed = optimizer.param_groups[group].get("seed", optimizer.seed)
    _check_seed(seed)
    return float(seed * 2**32)


def rename_rounding(given: Any, warn: bool = True) -> None:
    """Replace the option ``v_rounding`` of before, of a group or an optimizer, by ``rounding``; warn of it once."""
    if OLD_ROUNDING not in given:
        return
    said = given.pop(OLD_ROUNDING)
    given.setdefault("rounding", said)
    if warn:
        warn_once(OLD_ROUNDING, f"v_rounding={said!r}: the option is called rounding now, and is of first moments, too")


def keep_own(group: Group, old: Group) -> None:
    """Give a loaded group the format that it had before; seed and rounding are the loaded ones, if there are any."""
    group.pop("state_format", None)
    if "state_format" in old:
        group["state_format"] = old["state_format"]
    rename_rounding(group, warn=False)
    for name in ("seed", "rounding"):
        if name in old:
            group.setdefault(name, old[name])


def drop_formats(_: object, state_dict: dict[str, Any]) -> None:
    """Drop from the groups of a new state dict how state is stored: the names of its columns say it."""
    for group in state_dict["param_groups"]:
        group.pop("state_format", None)
