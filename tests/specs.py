"""What the tests know of each optimizer, one entry each, as torch's ``OptimizerInfo``; they go over these entries.

To add an optimizer, add its :class:`Spec` to :data:`SPECS`, and record its trajectories: ``tests/optim/golden.py``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedopt import (
    PagedAdadelta,
    PagedAdagrad,
    PagedAdam,
    PagedAdamax,
    PagedAdamW,
    PagedLion,
    PagedNAdam,
    PagedRAdam,
    PagedRMSprop,
    PagedSGD,
)  # fmt: skip
from pagedopt.optim.registry import OPTIMIZERS, Entry
from pagedopt.rules import RULES
from tests import references

Hyper = dict[str, Any]
#: dtype of the parameters and ``state_format``.
Stored = tuple[torch.dtype, str | None]
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
#: Each dtype and each rounding of state to 16 bits, once.
USUAL: tuple[Stored, ...] = ((F32, None), (BF16, None), (BF16, "float32"), (F64, None))
EVERY: tuple[Stored, ...] = (*USUAL, (F32, "bfloat16"), (F16, None), (F16, "float32"))
INT8: tuple[Stored, ...] = ((F32, "int8"), (BF16, "int8"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to use a class.

    Attributes:
        name: no other case of any class has it.
        ours: the class.
        theirs: torch's class, or what stands in for it.
        rule: the name of the rule that its groups choose; one that the package does not have is the class's own.
        options: all hyperparameters.
        other: what a second group sets.
        in_groups: what only a group can be given, not the constructor.
        recorded: how parameters and state are stored where ``tests/optim/test_golden.py`` has its trajectories.
    """

    name: str
    ours: Any
    theirs: Any
    rule: str
    options: Hyper
    other: Hyper
    in_groups: Hyper = field(default_factory=dict)
    recorded: tuple[Stored, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its state tensors."""
        return (RULES.get(self.rule) or self.ours.rule).inputs[2:]  # type: ignore[no-any-return]

    @property
    def in_8_bits(self) -> bool:
        """Whether codes of 8 bits can stand for all its state."""
        return not any(moment.exact for moment in RULES[self.rule].moments.values())

    @property
    def has_step(self) -> bool:
        return bool(self.ours.has_step)

    @property
    def known(self) -> set[str]:
        """Hyperparameters that a group has."""
        return set(self.theirs([torch.nn.Parameter(torch.ones(1))]).defaults)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Hyperparameters that are numbers, each of the betas by itself."""
        switches = [name for name, value in self.options.items() if isinstance(value, bool)]
        betas = [f"beta{i}" for i, _ in enumerate(self.options.get("betas", ()), 1)]
        found = (betas if name == "betas" else [name] for name in self.options if name not in switches)
        return tuple(name for names in found for name in names)

    def make(self, theirs: bool, groups: list[dict[str, Any]], **ours: Any) -> Any:
        """An optimizer of groups: torch's loop, or ours with options of ours."""
        groups = [{**group, **self.in_groups} for group in groups]
        if theirs:
            return self.theirs(groups, foreach=False, **self.options)
        return self.ours(groups, **self.options, **ours)


@dataclass(frozen=True)
class Bad:
    """Hyperparameters that no constructor takes, and what ours says of them, as a regular expression."""

    hyper: Hyper
    words: str
    error: type[Exception] = ValueError


@dataclass(frozen=True)
class Difference:
    """A difference from torch.

    Attributes:
        kind: ``"beyond"`` (ours does what torch refuses, or does better), ``"refused"`` (ours refuses what torch
            does) or ``"differs"``.
        scenario, labels: where it shows: a label, or several, which may end in ``*``.
        words: what ours does, what torch does, and why.
        optimizers: names of the classes it holds for; empty: all.
        devices: those it holds on.
        error: what ours raises, if it is refused.
        older: whether it is one from older versions of torch alone, which raise there.
    """

    kind: str
    scenario: str
    labels: str | tuple[str, ...]
    words: str
    optimizers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    error: type[Exception] | None = None
    older: bool = False


@dataclass(frozen=True, kw_only=True)
class Spec:
    """An optimizer of the registry.

    Attributes:
        cases: the ways to use it; in the first nothing is at its default and nothing is zero, so that a dropped term
            shows.
        bad: what is refused.
        decoupled: whether weight decay is a part of the parameter that is subtracted from it.
        conjugated: whether torch's loop takes parameters and gradients that are conjugated views.
        views_gradients: if not, whether it views gradients as real before it adds weight decay, which makes new ones.
        differences: from its reference, that no other class has.
        ulp: by device and by what is compared: how far one step may end from torch's default, in ulp.  What is not
            named has torch's bits.  The largest ulp counts of a parameter and its update, as a small one may be what
            two large numbers leave.
        unmeasured: (device, torch's way, state) that is no measure over many steps.
        most: bound on the largest error over many steps, as a multiple of that of the best of torch's ways.
        often: whether `make test` runs what goes over all optimizers for it, too; else it runs one in 25 of that.
        least_beta: stands for a first one of 0 where that is refused.
    """

    entry: Entry
    cases: tuple[Case, ...]
    bad: tuple[Bad, ...]
    decoupled: bool = False
    conjugated: bool = True
    views_gradients: bool = False
    differences: tuple[Difference, ...] = ()
    ulp: Mapping[str, Mapping[str, int]]
    unmeasured: frozenset[tuple[str, str, str]] = frozenset()
    most: float = 1.1
    often: bool = True
    least_beta: float = 0.0

    def __str__(self) -> str:
        return self.entry.name

    @property
    def reference(self) -> Any:
        """torch's class, or the same in plain torch."""
        return self.cases[0].theirs

    @property
    def hyper(self) -> Hyper:
        """Those of its first case."""
        return dict(self.cases[0].options)

    @property
    def capturable(self) -> Hyper:
        """What lets a CUDA graph capture its steps."""
        kind, takes = self.entry.optimizer, inspect.signature(self.entry.optimizer).parameters
        flag = "capturable" if "capturable" in takes else "fused"  # Adagrad's step lies on a GPU with fused alone
        return {flag: True} if flag == "capturable" or kind.has_step else {}


ENTRIES = {entry.name: entry for entry in OPTIMIZERS}
TWO = torch.tensor([0.5, 0.5])
TWO_RATES = Bad({"lr": TWO}, "Tensor lr must be 1-element")
#: What torch calls it where it refuses it.
CALLED = {"lr": "learning rate", "eps": "epsilon value"}


def negative(*names: str) -> tuple[Bad, ...]:
    """Hyperparameters below zero, as torch's constructors refuse them."""
    return tuple(Bad({name: -1.0}, f"Invalid {CALLED.get(name, f'{name} value')}: -1.0") for name in names)


_ADAMW: Hyper = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
_OF_ADAMW: Hyper = {
    "ours": PagedAdamW, "theirs": torch.optim.AdamW,
    "other": {"lr": 0.01, "betas": (0.7, 0.9), "eps": 3e-3, "weight_decay": 0.05},
}  # fmt: skip
_OF_COUPLED: Hyper = {**_OF_ADAMW, "theirs": torch.optim.Adam, "in_groups": {"decoupled_weight_decay": False}}
ADAMW = Spec(
    entry=ENTRIES["PagedAdamW"],
    cases=(
        Case(name="adamw", rule="adamw", options=_ADAMW, recorded=(*EVERY, *INT8), **_OF_ADAMW),
        Case(
            name="amsgrad", rule="adamw_amsgrad", options={**_ADAMW, "amsgrad": True}, recorded=USUAL, **_OF_ADAMW
        ),
        Case(name="maximize", rule="adamw", options={**_ADAMW, "maximize": True}, recorded=EVERY, **_OF_ADAMW),
        Case(name="coupled", rule="adam", options=_ADAMW, **_OF_COUPLED),
        Case(name="coupled amsgrad", rule="adam_amsgrad", options={**_ADAMW, "amsgrad": True}, **_OF_COUPLED),
    ),
    bad=(
        *negative("lr", "eps", "weight_decay"),
        Bad({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        Bad({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        TWO_RATES,
    ),
    decoupled=True,
    conjugated=False,  # torch's loop views complex numbers as real ones
    views_gradients=True,
    # torch's kernel for a CPU computes (c * g) * g, as ours; that for a GPU c * (g * g), at most a rounding further.
    ulp={
        "cpu": {"parameter": 5, "exp_avg_sq": 1, "max_exp_avg_sq": 1},
        "cuda": {"parameter": 5, "exp_avg_sq": 2, "max_exp_avg_sq": 2},
    },
    # torch's fused kernel for CUDA averages squares by two fma: nearer to float64 than its default for some betas
    # (twice at 0.95), and further for others (1.4 times at 0.999).  Ours is held to the default.
    unmeasured=frozenset({("cuda", "fused", "exp_avg_sq"), ("cuda", "fused", "max_exp_avg_sq")}),
)  # fmt: skip

_OF_ADAM: Hyper = {**_OF_ADAMW, "ours": PagedAdam, "theirs": torch.optim.Adam}
_OF_DECOUPLED: Hyper = {**_OF_ADAM, "in_groups": {"decoupled_weight_decay": True}, "theirs": torch.optim.AdamW}
ADAM = dataclasses.replace(
    ADAMW,
    entry=ENTRIES["PagedAdam"],
    cases=(
        Case(name="adam", rule="adam", options=_ADAMW, recorded=(*USUAL, *INT8), **_OF_ADAM),
        Case(
            name="adam amsgrad", rule="adam_amsgrad", options={**_ADAMW, "amsgrad": True}, recorded=USUAL[:1],
            **_OF_ADAM,
        ),
        Case(name="decoupled", rule="adamw", options=_ADAMW, **_OF_DECOUPLED),
        Case(name="decoupled amsgrad", rule="adamw_amsgrad", options={**_ADAMW, "amsgrad": True}, **_OF_DECOUPLED),
    ),
    decoupled=False,
    views_gradients=False,
    often=False,
)  # fmt: skip

_SGD: Hyper = {"lr": 0.03, "momentum": 0.7, "dampening": 0.4, "weight_decay": 0.2}
_OTHER_SGD: Hyper = {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.05}
_OF_SGD: Hyper = {"ours": PagedSGD, "theirs": torch.optim.SGD}
SGD = Spec(
    entry=ENTRIES["PagedSGD"],
    cases=(
        Case(
            name="momentum", rule="sgd_momentum", options=_SGD, other=_OTHER_SGD, recorded=(*USUAL, *INT8), **_OF_SGD
        ),
        Case(
            name="sgd", rule="sgd", options={**_SGD, "momentum": 0.0, "dampening": 0.0}, other={"lr": 0.01},
            recorded=USUAL[:2], **_OF_SGD,
        ),
        Case(
            name="nesterov", rule="sgd_momentum", options={**_SGD, "dampening": 0.0, "nesterov": True},
            other={**_OTHER_SGD, "dampening": 0.0, "momentum": 0.8}, recorded=USUAL, **_OF_SGD,
        ),
        Case(
            name="momentum, maximize", rule="sgd_momentum", options={**_SGD, "maximize": True}, other=_OTHER_SGD,
            **_OF_SGD,
        ),
    ),
    bad=(
        *negative("lr", "momentum", "weight_decay"),
        Bad({"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        Bad(
            {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
            "Nesterov momentum requires a momentum and zero dampening",
        ),
    ),
    ulp={"cpu": {"parameter": 5}, "cuda": {"parameter": 5}},
)  # fmt: skip

_LION: Hyper = {"lr": 0.03, "betas": (0.8, 0.95), "weight_decay": 0.2}
_OF_LION: Hyper = {
    "ours": PagedLion, "theirs": references.written(PagedLion, references.lion), "rule": "lion",
    "other": {"lr": 0.01, "betas": (0.7, 0.9), "weight_decay": 0.05},
}  # fmt: skip
LION = Spec(
    entry=ENTRIES["PagedLion"],
    cases=(
        Case(name="lion", options=_LION, recorded=(*USUAL, *INT8), **_OF_LION),
        Case(name="lion, maximize", options={**_LION, "maximize": True}, **_OF_LION),
    ),
    bad=(
        Bad({"lr": -1.0}, "lr=-1.0, .* none is negative"),
        Bad({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\), .* betas are below 1"),
        Bad({"betas": (0.9, -0.1)}, r"betas=\(0.9, -0.1\)"),
        Bad({"weight_decay": -1.0}, "weight_decay=-1.0: none is negative"),
        Bad({"lr": TWO}, "lr is a tensor of 2 elements; a hyperparameter has one"),
    ),
    decoupled=True,
    ulp={"cpu": {"parameter": 5}, "cuda": {"parameter": 5}},
)

_RMSPROP: Hyper = {"lr": 0.03, "alpha": 0.9, "eps": 1e-2, "weight_decay": 0.2, "momentum": 0.7}
_OF_RMSPROP: Hyper = {
    "ours": PagedRMSprop, "theirs": torch.optim.RMSprop,
    "other": {"lr": 0.01, "alpha": 0.8, "eps": 3e-2, "weight_decay": 0.05},
}  # fmt: skip
RMSPROP = Spec(
    entry=ENTRIES["PagedRMSprop"],
    cases=(
        Case(
            name="rmsprop momentum", rule="rmsprop_momentum", options=_RMSPROP, recorded=(*USUAL, *INT8), **_OF_RMSPROP
        ),
        Case(name="rmsprop", rule="rmsprop", options={**_RMSPROP, "momentum": 0.0}, recorded=USUAL[:1], **_OF_RMSPROP),
        Case(
            name="rmsprop centered", rule="rmsprop_centered",
            options={**_RMSPROP, "momentum": 0.0, "centered": True}, recorded=USUAL[:1], **_OF_RMSPROP,
        ),
        Case(
            name="rmsprop centered momentum", rule="rmsprop_centered_momentum",
            options={**_RMSPROP, "centered": True}, recorded=USUAL, **_OF_RMSPROP,
        ),
    ),
    bad=(*negative("lr", "alpha", "eps", "momentum", "weight_decay"), TWO_RATES),
    conjugated=False,
    # A momentum is a sum, which may leave little of two large terms; on a CPU torch rounds them as its vectors do.
    ulp={
        "cpu": {"parameter": 32, "momentum_buffer": 4096, "square_avg": 1},
        "cuda": {"parameter": 32, "momentum_buffer": 4096, "square_avg": 2},
    },
    most=1.25,
    often=False,
)  # fmt: skip


_NADAM: Hyper = {**_ADAMW, "momentum_decay": 0.1}
_OF_NADAM: Hyper = {
    "ours": PagedNAdam, "theirs": torch.optim.NAdam, "rule": "nadam",
    "other": {"lr": 0.01, "betas": (0.7, 0.9), "eps": 3e-3, "weight_decay": 0.05, "momentum_decay": 0.2},
}  # fmt: skip
NADAM = dataclasses.replace(
    ADAMW,
    entry=ENTRIES["PagedNAdam"],
    cases=(
        Case(name="nadam", options=_NADAM, recorded=(*USUAL, *INT8), **_OF_NADAM),
        Case(name="nadam decoupled", options={**_NADAM, "decoupled_weight_decay": True}, **_OF_NADAM),
    ),
    bad=(*ADAMW.bad, *negative("momentum_decay")),
    decoupled=False,
    differences=(
        Difference(
            "beyond", "betas that are tensors", "0-dim on cuda*",
            "Betas that are tensors on a GPU are followed; torch's NAdam multiplies a product on the CPU by them, and "
            "raises RuntimeError.",
            ("PagedNAdam",), devices=("cuda",),
        ),
        Difference(
            "differs", "extreme parameters", ("torch.float32, 0.9, step 2", "torch.float32, 0.9, step 3"),
            "A huge parameter is rounded once; torch's foreach, its default on a GPU, rounds it twice, and weight "
            "decay carries that into the squares.",
            ("PagedNAdam",), devices=("cuda",),
        ),
    ),
    # torch adds the two terms of an update to the parameter one behind the other, and rounds twice.
    ulp={device: {**limits, "parameter": 16} for device, limits in ADAMW.ulp.items()},
    often=False,
)  # fmt: skip

_OF_RADAM: Hyper = {**_OF_ADAMW, "ours": PagedRAdam, "theirs": torch.optim.RAdam, "rule": "radam"}
RADAM = dataclasses.replace(
    NADAM,
    entry=ENTRIES["PagedRAdam"],
    cases=(
        Case(name="radam", options=_ADAMW, recorded=(*USUAL, *INT8), **_OF_RADAM),
        Case(name="radam decoupled", options={**_ADAMW, "decoupled_weight_decay": True}, **_OF_RADAM),
    ),
    bad=ADAMW.bad,
    differences=(
        Difference(
            "refused", "values changed between steps", ("eps=None", "eps=None: trained"),
            "eps=None put into a group is refused with TypeError; torch's RAdam does not read it in its first steps.",
            ("PagedRAdam",),
        ),
        Difference(
            "beyond", "extreme values", ("torch.float16, 0.9*", "infinite parameters, torch.float16, 0.9*"),
            "A mean in float16 that overflows as it is divided by its bias correction is finite here, in float32.",
            ("PagedRAdam",), devices=("cpu",),
        ),
        *(
            Difference(
                "differs", scenario, labels,
                "Ours is finite where torch's loop is. torch's foreach, its default on a GPU, divides by zero until "
                "steps are rectified, and makes NaN where squares have overflowed; and it divides the learning rate by "
                "the bias correction, where the loop and ours divide the mean, which may overflow.",
                ("PagedRAdam",), devices=("cuda",),
            )
            for scenario, labels in {
                "extreme values": tuple(
                    f"torch.{dtype}, 0.0, step {step}"
                    for dtype in ("float32", "bfloat16", "float16") for step in (1, 2)
                ),
                "extreme parameters": tuple(
                    f"{where}torch.{dtype}, {decay}, step {step}"
                    for dtype in ("float32", "bfloat16")
                    for where, decay, steps in (
                        ("", 0.0, (2, 3)), ("", 0.9, (1, 2, 3)), ("infinite parameters, ", 0.9, (2, 3)),
                    )
                    for step in steps
                ),
                "odd values at construction": ("lr=inf: trained",),
            }.items()
        ),
    ),
)  # fmt: skip

_OF_ADAMAX: Hyper = {**_OF_ADAMW, "ours": PagedAdamax, "theirs": torch.optim.Adamax, "rule": "adamax"}
ADAMAX = dataclasses.replace(
    NADAM,
    entry=ENTRIES["PagedAdamax"],
    cases=(Case(name="adamax", options=_ADAMW, recorded=USUAL, **_OF_ADAMAX),),
    bad=ADAMW.bad,
    views_gradients=False,
    differences=(),
)

ADAGRAD = Spec(
    entry=ENTRIES["PagedAdagrad"],
    cases=(
        Case(
            name="adagrad", rule="adagrad", ours=PagedAdagrad, theirs=references.Adagrad, recorded=USUAL,
            options={"lr": 0.03, "lr_decay": 0.1, "weight_decay": 0.2, "initial_accumulator_value": 0.3, "eps": 1e-2},
            other={"lr": 0.01, "lr_decay": 0.2, "weight_decay": 0.05, "eps": 3e-2},
        ),
    ),
    bad=(*negative("lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay"), TWO_RATES),
    conjugated=False,
    differences=(
        Difference(
            "beyond", "values of each group", "step *",
            "A group's own initial_accumulator_value is followed; torch's has that of the constructor in all.",
            ("PagedAdagrad",),
        ),
        Difference(
            "beyond", "moved to another device", ("to cpu, before*", "to cuda, before*"),
            "A parameter may move before its first step, which makes its state; torch's Adagrad has made it, where the "
            "parameter was.",
            ("PagedAdagrad",), devices=("cuda",),
        ),
        Difference(
            "refused", "sparse without state", "a step",
            "Sparse gradients are refused with RuntimeError by every Paged class, and nothing is updated; torch's "
            "Adagrad accepts them without weight decay.",
            ("PagedAdagrad",), error=RuntimeError,
        ),
        *(
            Difference(
                "beyond", scenario, labels,
                "fused=True is accepted on a GPU, where every step is one launch; older versions of torch refuse it "
                "in a step, with RuntimeError.",
                ("PagedAdagrad",), devices=("cuda",), older=True,
            )
            for scenario, labels in {
                "steps with flags": ("{'foreach': None, 'fused': True}*", "{'foreach': False, 'fused': True}*"),
                "flags with tensors set between steps": (
                    "{'foreach': None, 'fused': True}*", "{'foreach': False, 'fused': True}*",
                ),
                "complex parameters and fused": "{'fused': True}: no gradient",
            }.items()
        ),
    ),
    ulp={"cpu": {"parameter": 5, "sum": 1}, "cuda": {"parameter": 5, "sum": 1}},
    often=False,
)  # fmt: skip

ADADELTA = Spec(
    entry=ENTRIES["PagedAdadelta"],
    cases=(
        Case(
            name="adadelta", rule="adadelta", ours=PagedAdadelta, theirs=torch.optim.Adadelta,
            recorded=(*USUAL, *INT8), options={"lr": 0.3, "rho": 0.8, "eps": 1e-2, "weight_decay": 0.2},
            other={"lr": 0.1, "rho": 0.7, "eps": 3e-2, "weight_decay": 0.05},
        ),
    ),
    bad=(*negative("lr", "rho", "eps", "weight_decay"), TWO_RATES),
    ulp={
        "cpu": {"parameter": 5, "square_avg": 1, "acc_delta": 8},
        "cuda": {"parameter": 5, "square_avg": 2, "acc_delta": 16},
    },
    most=1.4,  # one large square of one large update
    often=False,
)  # fmt: skip

OF_TORCH = (RMSPROP, NADAM, RADAM, ADAMAX, ADAGRAD, ADADELTA)

NUMERALS = {2: "two", 3: "three"}


def _written(
    name: str,
    update: Any,
    options: Hyper,
    other: Hyper,
    *more: Hyper,
    begin: Hyper | None = None,
    often: bool = False,
    least_beta: float = 0.0,
    far: int = 5,
    **about: Any,
) -> Spec:
    """A class that torch does not have; its reference is ``update``, the lines of the paper.

    Args:
        options, other: its hyperparameters, and others that a group may have.
        more: arguments to run it with, too, beside ``options``.
        begin, least_beta: see :func:`references.written`.
        far: ulp of the parameter between a step and the reference's.
        often, about: fields of :class:`Spec`; what is refused follows from ``options``.
    """
    entry = ENTRIES[name]
    theirs = references.written(entry.optimizer, update, least_beta, **(begin or {}))
    of: Hyper = {"ours": entry.optimizer, "theirs": theirs, "rule": entry.rules[0], "other": other}
    title, betas = entry.rules[0].replace("_", " "), options.get("betas")
    decays = (
        (Bad({"momentum": 1.0}, "momentum=1.0, .* momentum is below 1"),)
        if betas is None
        else (
            Bad({"betas": (1.0, *betas[1:])}, r"betas=\(1.0, .* betas are below 1"),
            Bad({"betas": betas[:1]}, f"give {NUMERALS[len(betas)]} numbers"),
        )
    )
    return Spec(
        entry=entry,
        cases=(
            Case(name=title, options=options, recorded=USUAL[:2], **of),
            *(Case(name=f"{title}, {', '.join(each)}", options={**options, **each}, **of) for each in more),
        ),
        bad=(
            Bad({"lr": -1.0}, "lr=-1.0, .* none is negative"),
            *decays,
            Bad({"weight_decay": -1.0}, "weight_decay=-1.0.*: none is negative"),
            Bad({"weight_decay": None}, "weight_decay is None; give a number", TypeError),
            Bad({"lr": TWO}, "lr is a tensor of 2 elements; a hyperparameter has one"),
        ),
        # State near zero may be what two large numbers leave; the parameter tells.
        ulp={device: {"parameter": far, **dict.fromkeys(entry.states, 1 << 16)} for device in ("cpu", "cuda")},
        often=often,
        least_beta=least_beta,
        most=1.25,  # than one way's, not than the best of three
        **about,
    )


_OTHER = _OF_ADAMW["other"]
_ADAN: Hyper = {**_ADAMW, "betas": (0.8, 0.7, 0.95)}
WRITTEN = (
    _written(
        "PagedAdEMAMix", references.ademamix, {**_ADAMW, "betas": (0.8, 0.95, 0.97), "alpha": 3.0},
        {**_OTHER, "betas": (0.7, 0.9, 0.96), "alpha": 5.0}, {"alpha_warmup": 5, "beta3_warmup": 7}, {"maximize": True},
        decoupled=True,
    ),
    _written(
        "PagedScheduleFreeAdamW", references.schedule_free_adamw, {**_ADAMW, "warmup_steps": 3},
        {**_OTHER, "warmup_steps": 2}, {"maximize": True}, begin={"weight_sum": 0.0},
        least_beta=0.1,  # eval() divides by the first
        far=32,  # the two terms of an update may cancel
    ),
    _written("PagedCautiousAdamW", references.cautious_adamw, _ADAMW, _OTHER, {"maximize": True}, decoupled=True),
    _written(
        "PagedCautiousLion", references.cautious_lion, _LION, _OF_LION["other"], {"maximize": True}, decoupled=True
    ),
    # The two terms of an update may cancel.
    _written(
        "PagedAdan", references.adan, _ADAN, {**_OTHER, "betas": (0.7, 0.8, 0.9)}, {"maximize": True}, far=32
    ),
    _written("PagedADOPT", references.adopt, {**_ADAMW, "eps": 0.1}, _OTHER, {"maximize": True}),
    _written("PagedLaProp", references.laprop, _ADAMW, _OTHER, {"maximize": True}, decoupled=True),
    _written(
        "PagedSignum", references.signum, {"lr": 0.03, "momentum": 0.7, "weight_decay": 0.2},
        {"lr": 0.01, "momentum": 0.8}, {"maximize": True}, decoupled=True,
    ),
)  # fmt: skip

#: By the name of the class.
SPECS = {spec.entry.name: spec for spec in (ADAMW, ADAM, SGD, LION, *OF_TORCH, *WRITTEN)}
CASES = {case.name: case for spec in SPECS.values() for case in spec.cases}
#: Of each class those that have state, and not the same as an earlier one: what becomes of state is as there.
BY_STATE = {
    case.name: case
    for spec in SPECS.values()
    for i, case in enumerate(spec.cases)
    if case.names and case.names not in [earlier.names for earlier in spec.cases[:i]]
}

_SELDOM = {str(each) for spec in SPECS.values() if not spec.often for each in (spec, *spec.cases)}


def is_seldom(given: Any) -> bool:
    """Whether what a test is given is an optimizer that is not run often, or a case of one, or the name of either."""
    return getattr(given, "name", str(given) if isinstance(given, str | Spec) else None) in _SELDOM


def spec_of(entry: Entry) -> Spec:
    """The entry of an optimizer here.

    Raises:
        LookupError: there is none.
    """
    if entry.name not in SPECS:
        raise LookupError(f"tests/specs.py has no Spec of {entry.name}, which is in the registry; add one")
    return SPECS[entry.name]
