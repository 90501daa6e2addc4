"""Keyword options of all optimizers: where state is, in which format, and how a step accesses it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from ..common.names import near
from ..formats.choice import Rounding
from ..formats.floating import StateFormat, check_format
from ..formats.names import ParamFormat, ParamRounding
from ..formats.sixteen import check_param_options
from ..paging.budget import Given
from ..placements.choose import HostAccess, Placement
from ..system.warn import warn_once
from ..transports.choose import DEFAULT, TransportOption, check_transport
from .average import Ema
from .foreign_options import OPTIONS, hint
from .rule_optimizer import Group, RuleOptimizer, checked_max_norm


@dataclass(frozen=True)
class Option:
    """An option: what it says, its default, and what its values mean, by how they are written in Python.

    Attributes:
        range: its values in words, where only some are listed.
    """

    what: str
    default: Any
    values: Mapping[str, str]
    range: str = ""

    @property
    def taken(self) -> list[str]:
        """The values without those that are refused."""
        return [value for value, meaning in self.values.items() if not meaning.startswith("refused")]

    @property
    def choice(self) -> str:
        """The values that it takes, in a line."""
        return self.range or ", ".join(self.taken)

    @property
    def written(self) -> str:
        """The default as it is written in Python."""
        return repr(self.default).replace("'", '"')


#: The options, of which ``notes/options.md``, docstrings and defaults are made.
TABLE = {
    "state_format": Option(
        "how state is stored; or an object of a `Format` of your own, or one of all these by the state's name. A "
        "parameter group may have one of its own, under the same key",
        None,
        {
            "None": "the parameter's dtype, as in torch. Float16 rounds squares below 3e-8 to zero: with a `beta2` of "
            "0.999 the second moment of gradients below 0.005 stays zero, and only `eps` divides the update",
            '"float32", "fp32", "float", torch.float32': "32 bits an element",
            '"bfloat16", "bf16", torch.bfloat16': "16 bits with the range of float32",
            '"float16", "fp16", "half", torch.float16': "16 bits with more digits than bfloat16 and less "
            "range. Refused for state that contains squares, as second moments do, unless the parameter is float16",
            '"float64", "fp64", "double", torch.float64': "64 bits; the step then computes in float64",
            '"int8", "8bit"': "a code of 8 bits an element, and a float32 for each 256: 2.03 bytes a parameter for "
            "AdamW. State of parameters below 4,096 elements is float32. Not for parameters in which neighbouring "
            "elements have very different gradients, as in an embedding narrower than 256: give it a group with "
            "'float32'. Refused for complex parameters, for DTensors and for first moments with a decay above 0.99",
            '{"exp_avg": "bfloat16"}': "one state; all others have the parameter's dtype",
        },
    ),
    "rounding": Option(
        "how int8 rounds, saved in the groups of a state dict; a parameter group may have its own",
        None,
        {
            "None": "first moments stochastically; second moments, too, where their decay (`beta2`) is 0.99 or more, "
            "else to nearest; the maximum of `amsgrad` always to nearest",
            '"nearest"': "to the nearest code. Without a gradient a first moment then never decays to zero, and still "
            "moves its parameter",
            '"stochastic"': "up or down at random, so that the mean is the number. The random bits depend on `seed`, "
            "the step and the element alone (without a step count, on the block's numbers): they are the same on every "
            "device, in every placement and after a resume",
        },
    ),
    "seed": Option(
        "the seed of stochastic rounding, saved in the groups of a state dict; a parameter group may have its own",
        0,
        {"0, 2097151": "the least and the largest; torch's generators are not used"},
        "whole numbers from 0 to 2,097,151",
    ),
    "param_format": Option(
        "how bfloat16 parameters are stored; parameters of float32 and float64 are as they are",
        None,
        {
            "None": "as they are: a step rounds them, by `param_rounding`",
            '"bfloat16+16"': "beside each, in state, the 16 bits that it has lost: together they are a float32, and a "
            "step computes what it would of float32 parameters, to the bit. `state_format=None` is then float32. The "
            "parameter is the nearest bfloat16 (ties away from zero). 2 bytes a parameter more, paged as state. "
            "Refused for float16",
            '"bfloat16+8"': "the upper 8 of these bits, rounded at random so that the mean is the number: 1 byte a "
            'parameter more; with `state_format="int8"` parameter and state are 5.03 bytes, of which 3.03 are paged',
        },
    ),
    "param_rounding": Option(
        "how bfloat16 and float16 parameters are rounded",
        "nearest",
        {
            '"nearest"': "to the nearest number, as in torch: an update below half of the parameter's last bit is lost",
            '"stochastic"': "up or down at random, so that the mean is the number. The random bits depend on `seed`, "
            "the step and the element alone: they are the same in every replica, on every device and after a resume. "
            "Optimizers whose state counts no steps (SGD, Lion) then count them, under the key `step`, and so they do "
            "with a `param_format`",
        },
    ),
    "placement": Option(
        "where state is stored; or a subclass of `pagedopt.placements.Arena`",
        None,
        {
            "None": "with a budget `mapped`, for parameters on a CPU `file`. Without one state begins in torch's own "
            "tensors, and `spill()`, `set_device_budget()` or `run_with_room()` moves it into pages when needed, if "
            "the GPU supports them",
            '"device"': "whole, where the parameters are",
            '"mapped"': "a range of device pages and page-locked host pages",
            '"managed"': "managed memory, with advice where each part stays; at most a quarter of free device memory",
            '"managed-driver"': "managed memory that the driver evicts and a step prefetches",
            '"host"': "whole on the host: page-locked, for parameters on a CPU ordinary memory",
            '"file"': "a file mapped into memory, for parameters on a CPU",
        },
    ),
    "device_budget": Option(
        "how much of the state stays on each device of parameters (of those on a CPU: in RAM); the rest is on the host "
        "(in the file)",
        None,
        {
            'None, "all"': "everything",
            '"2GiB", "500 MB", 2e9, 65536': "bytes: an integer, or a whole float above 1",
            "0": "nothing",
            '"50%", 0.5': "half; a float from 0 to 1 is a share. It applies to each arena, later ones too",
            "1.0": "everything: a share of 100 %",
            '1, "50"': "refused: a page has more than 4,095 bytes; a unit was forgotten",
            '"20 ms"': "refused: `pagedopt plan --time 20ms` prints the bytes whose transfer adds no more to a step",
            '"auto"': "what the device can spare beside model and activations, measured again during training",
        },
    ),
    "host_access": Option(
        "how a step accesses state off the device",
        None,
        {
            "None": "the placement's faster way",
            '"staged"': "through a ring of slots on the device, by copy engines",
            '"in_place"': "the kernel reads and writes over the link",
        },
    ),
    "blocks": Option(
        "the most thread blocks of a launch",
        None,
        {
            "None": "no limit",
            "8": "a few nearly fill the link, and leave multiprocessors to a backward that runs at the same time",
        },
        "None, or a whole number from 1 on",
    ),
    "transport": Option(
        "how the pointer table reaches the kernel; or a subclass of `pagedopt.transports.Transport`, of which each "
        "device gets an object",
        DEFAULT,
        {
            '"managed"': "managed memory, which the host writes and the kernel reads in place",
            '"mapped"': "page-locked memory of the host, read over the link",
            '"memcpy"': "one asynchronous copy before the launch",
            '"struct"': "kernel arguments, in as many launches as the table needs",
            '"hybrid"': "kernel arguments where one launch is enough, else as `memcpy`",
        },
    ),
    "max_grad_norm": Option(
        "the norm to which a step clips the gradients of all its parameters together; an attribute, too, which may be "
        "set between steps",
        None,
        {
            "None": "nothing is clipped",
            "1.0": "as after `torch.nn.utils.clip_grad_norm_(params, 1.0)`, but gradients are not written: the step "
            "multiplies them as it reads them. The norm is `optimizer.grad_norm`, on the device: that of this "
            "optimizer's parameters in this process (tensor or pipeline parallel, FSDP1 and ZeRO clip by parts). "
            "Shards of DTensors are added up",
            'float("inf")': "nothing is clipped; `optimizer.grad_norm` is computed",
        },
        "None, or a number above 0",
    ),
    "skip_nonfinite": Option(
        "whether a step is left out if the norm of its gradients is infinite or NaN; it needs `max_grad_norm`",
        False,
        {
            "False": "it makes parameters NaN, as in torch",
            "True": "it changes no parameter, state or step count; `optimizer.skipped` counts such steps. Where step "
            "counts are on the device (`fused`, `capturable`) nothing waits, otherwise the host, for the norm",
        },
    ),
    "after": Option(
        "what a step does behind each update, in the same sweep",
        None,
        {
            "None": "nothing",
            "pagedopt.ema(0.999)": "an exponential moving average of the weights: state `param_ema`, in float32 unless "
            "`state_format` names it. `with optimizer.averaged():` shows it. A group's `ema_decay` is the decay. Steps "
            "are counted. Refused with a `param_format`",
        },
        "None, or what `pagedopt.ema(decay)` returns",
    ),
    "preallocate": Option(
        "when state is made",
        False,
        {
            "False": "in the first step in which a parameter has a gradient, as in torch",
            "True": "with the optimizer, for all parameters that require gradients; kernels are compiled, too. So the "
            "first step may be captured into a CUDA graph, and state that does not fit is refused at once",
        },
    ),
}


#: Options that a group may have for itself.
OF_GROUPS = {"state_format", "rounding", "seed"}


class Options(TypedDict, total=False):
    """Keywords that every optimizer takes."""

    state_format: StateFormat
    rounding: Rounding
    seed: int
    param_format: ParamFormat
    param_rounding: ParamRounding
    placement: Placement | None
    device_budget: Given
    host_access: HostAccess | None
    blocks: int | None
    transport: TransportOption
    max_grad_norm: float | None
    skip_nonfinite: bool
    after: Ema | None
    preallocate: bool


DEFAULTS = cast(Options, {name: option.default for name, option in TABLE.items()})


def documented(kind: type, meanings: bool = False) -> type:
    """Add an example and the table of options to a class' docstring, each with its values; or their ``meanings``."""
    said = (
        "and what each value means" if meanings else "whose values help(pagedopt.Options) and notes/options.md explain"
    )
    lines = [f"Options, {said}:"]
    for name, option in TABLE.items():
        lines += _wrapped(f"{name} = {option.written}: {option.what}.", 4)
        if meanings:
            for value, meaning in option.values.items():
                lines += _wrapped(f"{value}: {meaning}.", 8)
        else:
            lines += _wrapped(f"{option.choice}.", 8)
    if any(getattr(kind, name, None) for name in ("rule", "rules")):
        made = f'{kind.__name__}(model.parameters(), device_budget="50%")'
        lines = ["Example:", f"    >>> optimizer = pagedopt.{made}", "", *lines]
    if kind.__doc__:  # python -OO leaves none
        kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__), "", *lines, ""])
    return kind


def _wrapped(text: str, indent: int) -> list[str]:
    first, later = " " * indent, " " * (indent + 4)
    return textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


documented(Options, meanings=True)


def check_hyperparameters(**given: Any) -> None:
    """Raise TypeError for hyperparameters that are texts, and for a learning rate that is None."""
    for name, value in given.items():
        if name == "lr" and value is None:
            raise TypeError("lr is None; give a number, or leave it out")
        if isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, a text; write the number, as {name}={value or 0}")


def complete(options: Options, kind: type, states: Collection[str] | None) -> Options:
    """Return ``options`` of class ``kind``, completed with defaults.  The store checks placement, budget and access.

    Args:
        states: names of state that ``state_format`` may name; None: any.

    Raises:
        TypeError: there is no such option.
        ValueError, TypeError: an option has a bad value.
    """
    for unknown in options.keys() - DEFAULTS.keys():
        meant = hint(OPTIONS, unknown) or near(unknown, [*DEFAULTS, *inspect.signature(kind.__init__).parameters])  # type: ignore[misc]
        raise TypeError(f"{kind.__name__}.__init__() got an unexpected keyword argument {unknown!r}{meant}")
    chosen: Options = {**DEFAULTS, **options}
    check_group_options(chosen, states)
    check_param_options(chosen["param_format"], chosen["param_rounding"])
    check_transport(chosen["transport"])
    blocks = chosen["blocks"]
    if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1):
        raise ValueError(f"blocks is {blocks!r}; it must be a number of thread blocks from 1 on, or None")
    for name in ("skip_nonfinite", "preallocate"):
        if not isinstance(chosen[name], bool):
            raise TypeError(f"{name} is {chosen[name]!r}; it must be True or False")
    checked_max_norm(chosen["max_grad_norm"], chosen["skip_nonfinite"])
    return chosen


def checked_after(options: Options) -> Ema | None:
    """Return the option ``after``.

    Raises:
        TypeError: it is something else.
        ValueError: there is a ``param_format``, too.
    """
    after, form = options.get("after"), options.get("param_format")
    if after is not None and not isinstance(after, Ema):
        raise TypeError(f"after is {after!r}; give pagedopt.ema(decay), or None")
    if after is not None and form is not None:
        raise ValueError(
            f"after=pagedopt.ema({after.decay}) averages parameters as they are stored, and param_format={form!r} "
            "stores them in two parts: leave one of them out"
        )
    return after


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
    for name in ("seed", "rounding", "ema_decay"):
        if name in old:
            group.setdefault(name, old[name])


def drop_formats(_: object, state_dict: dict[str, Any]) -> None:
    """Drop from the groups of a new state dict how state is stored: the names of its columns say it."""
    for group in state_dict["param_groups"]:
        group.pop("state_format", None)
