"""Defaults that nothing reads are refused; groups may have any keys, and one that looks like a mistake is warned of."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from optim_support import ready
from torch.optim.lr_scheduler import CyclicLR

import pagedopt
from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD, Rule
from pagedopt.common.names import one_edit_apart
from pagedopt.rules import sgd, sgd_momentum
from pagedopt.system import warn


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_said", set())


@pagedopt.rule
def plain(param, grad, *, lr):  # type: ignore[no-untyped-def]
    return param - lr * grad


@pagedopt.rule
def carrying(param, grad, *, lr, beta1, beta2, decay, step):  # type: ignore[no-untyped-def]
    decay = decay / 2
    param = param - lr * (beta1 + beta2) * decay * grad / step
    return param, decay


class Own(PagedOptimizer):
    rule = plain

    def __init__(self, groups: Any, defaults: dict[str, Any], **options: Any) -> None:
        super().__init__(groups, defaults, **options)


class Carrying(Own):
    rule = carrying
    initial: ClassVar = {"decay": "first"}


class Chooses(Own):
    rules = (sgd, sgd_momentum)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return sgd_momentum if group["momentum"] else sgd


class ByFlag(Chooses):
    extra_defaults = ("heavy",)

    def rule_of(self, group: dict[str, Any]) -> Rule:
        return sgd_momentum if group["heavy"] else sgd


class Undeclared(Own):
    def rule_of(self, group: dict[str, Any]) -> Rule:
        return plain


CARRIED: dict[str, Any] = {"betas": (0.5, 0.25), "first": 1.0}
FLAGS = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)


# --- defaults


@pytest.mark.parametrize(
    ("kind", "more", "text"),
    [
        (Own, {"weight_decay": 0.1}, "^Own has 'weight_decay' among its defaults, .* its rules read lr. Leave it out"),
        (Own, {"nesterov": False}, r"'nesterov' .*write extra_defaults = \('nesterov',\) in the class$"),
        (Own, {"maximize": False, "mass": 1}, r"'maximize', 'mass' .* extra_defaults = \('maximize', 'mass'\)"),
        (Own, {"state_formt": None}, "; for 'state_formt' there is 'state_format'"),
        (Carrying, {**CARRIED, "decay": 0.5}, "'decay' .* read beta1, beta2, betas, first, lr"),
        (Chooses, {"momentum": 0.9, "amsgrad": False}, "'amsgrad' .* read dampening, lr, maximize, momentum, nesterov"),
        (ByFlag, {"momentum": 0.9, "heavy": True, "havy": True}, "; for 'havy' there is 'heavy'"),
    ],
)
def test_a_default_that_nothing_reads_is_refused(kind: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        kind([ready()], {"lr": 0.1, **more})


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Own, FLAGS),
        (Own, {"state_format": "bfloat16", "rounding": None, "seed": 3, "preallocate": False}),
        (Carrying, CARRIED),
        (Carrying, {"beta1": 0.5, "beta2": 0.25, "first": 1.0}),
        (Chooses, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": False}),
        (ByFlag, {"momentum": 0.9, "heavy": True}),
        (Undeclared, {"weight_decay": 0.1, "anything": 1}),
    ],
)
def test_a_default_that_is_read_is_taken(kind: Any, more: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kind([ready()], {"lr": 0.1, **more})
        optimizer.step()
    assert more.items() <= optimizer.param_groups[0].items()


def test_an_option_among_the_defaults_has_the_value_that_holds() -> None:
    assert Own([ready()], {"lr": 0.1, "blocks": 8}, blocks=8).blocks == 8
    with pytest.raises(ValueError, match=r"Own has the option 'blocks' among its defaults; write super\(\).__init__\("):
        Own([ready()], {"lr": 0.1, "blocks": 8})


def test_a_class_keeps_defaults_for_others() -> None:
    class Cycled(Own):
        extra_defaults = ("momentum",)

    with pytest.raises(ValueError, match="support momentum"):
        CyclicLR(Own([ready()], {"lr": 0.1}), 0.1, 0.3)
    optimizer = Cycled([ready()], {"lr": 0.1, "momentum": 0.9})
    schedule = CyclicLR(optimizer, 0.1, 0.3, step_size_up=2, base_momentum=0.5, max_momentum=0.7)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.6)


# --- groups


def said(kind: Any, *groups: dict[str, Any], later: bool = False) -> list[str]:
    """What an optimizer with these groups warns of."""
    defaults = ({"lr": 0.1},) if issubclass(kind, Own) else ()
    groups = tuple({"params": [ready()], **keys} for keys in groups)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = kind([{"params": [ready()]}] if later else [*groups], *defaults)
        for group in groups if later else ():
            optimizer.add_param_group(group)
    for group, given in zip(reversed(optimizer.param_groups), reversed(groups), strict=False):
        assert all(group[name] is value for name, value in given.items() if name != "params")
    return [str(each.message) for each in caught]


MISSPELT = "{}: a parameter group has {!r}, which nothing reads; did you mean {!r}?"
LACKED = "{}: a parameter group has {!r}, a hyperparameter that {} does not have"


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (PagedAdamW, "weigth_decay", "weight_decay"),
        (PagedSGD, "state-format", "state_format"),
        (PagedLion, "beta", "beta1"),
        (Own, "capturabel", "capturable"),
        (Undeclared, "lrs", "lr"),
    ],
)
def test_a_misspelt_key_is_warned_of(kind: Any, name: str, meant: str, later: bool) -> None:
    assert said(kind, {name: 0.0}, later=later) == [MISSPELT.format(kind.__name__, name, meant)]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (PagedAdamW, {"momentum": 0.9}), (PagedSGD, {"betas": (0.9, 0.99)}),
        (PagedLion, {"eps": torch.tensor([1e-8, 1e-6])}), (Own, {"betas": np.array([0, 0])}),
    ],
)  # fmt: skip
def test_a_hyperparameter_of_others_is_warned_of(kind: Any, keys: dict[str, Any], later: bool) -> None:
    (name,) = keys
    assert said(kind, keys, later=later) == [LACKED.format(kind.__name__, name, kind.__name__)]


#: Of schedulers, and of ones own.
KEPT: tuple[Any, ...] = (
    "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "lr_scale", "name", "wd_mult",
    "is_expert_parallel", "is_decoupled_lr", "default_config", "layer", "tag", "pre_lr_mult", "r", "k", "", 7,
)  # fmt: skip
OFF: tuple[Any, ...] = (0, 0.0, False, None, torch.tensor(0.0), np.float32(0))
SILENT: dict[str, tuple[Any, list[dict[Any, Any]]]] = {
    **{kind.__name__: (kind, [dict.fromkeys(KEPT, 0.3)]) for kind in (PagedAdamW, PagedSGD, PagedLion, Own)},
    "of others, and off": (Own, [{name: value} for name in ("weight_decay", "amsgrad") for value in OFF]),
    "a class whose rules only a step knows": (Undeclared, [{"weight_decay": 0.1, "betas": (0.9, 0.99), "tag": 3}]),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("kind", "groups"), SILENT.values(), ids=SILENT)
def test_other_keys_are_kept_in_silence(kind: Any, groups: list[dict[Any, Any]], later: bool) -> None:
    assert said(kind, *groups, later=later) == []


def test_a_key_is_warned_of_once_in_a_process_for_each_class() -> None:
    assert len(said(PagedAdamW, {"weigth_decay": 0.1}, {"weigth_decay": 0.2, "momentum": 0.9})) == 2
    assert said(PagedAdamW, {"weigth_decay": 0.1, "momentum": 0.9}) == []
    assert len(said(PagedSGD, {"weigth_decay": 0.1})) == 1
    assert len(said(Own, {"weight_decay": 0.0}, {"weight_decay": 0.1})) == 1


def test_a_warning_that_is_an_error_adds_no_group() -> None:
    optimizer = PagedAdamW([ready()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="did you mean 'weight_decay'"):
            optimizer.add_param_group({"params": [ready()], "weigth_decay": 0.1})
    assert len(optimizer.param_groups) == 1


# --- names


def test_one_edit_apart() -> None:
    letters = "abc"
    words = [""]
    for word in words:
        if len(word) < 4:
            words += [word + letter for letter in letters]
    for word in words:
        cuts = [(word[:i], word[i:]) for i in range(len(word) + 1)]
        edits = {a + letter + b for a, b in cuts for letter in letters}
        edits |= {a + letter + b[1:] for a, b in cuts if b for letter in ("", *letters)}
        edits |= {a + b[1] + b[0] + b[2:] for a, b in cuts if len(b) > 1}
        assert {other for other in words if one_edit_apart(word, other)} == edits.intersection(words) - {word}
