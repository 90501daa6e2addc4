"""What a class of one's own says of itself is checked where an optimizer is made, and not in a step."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from optim_support import ready
from paths import ROOT

import pagedopt
from pagedopt import PagedOptimizer, Rule, RuleError, multi_tensor_apply
from pagedopt.commands.main import main
from pagedopt.optim import registry
from pagedopt.optim.options import DEFAULTS, Options
from pagedopt.optim.registry import OPTIMIZERS, RULE_NAMES, Entry
from pagedopt.rules import RULES, UPDATES
from tests.specs import SPECS, Spec, spec_of

LR: dict[str, Any] = {"lr": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


@pagedopt.rule
def kept(param, grad, buf, *, lr, momentum):  # type: ignore[no-untyped-def]
    grad = grad + 0.1 * param
    buf = momentum * buf + grad
    param = param - lr * buf
    return param, buf


@pagedopt.rule
def lost(param, grad, buf, *, lr, momentum):  # type: ignore[no-untyped-def]
    buf = momentum * buf + grad
    return param - lr * buf


@pagedopt.rule
def lost_one(param, grad, buf, second, *, lr, momentum, scale):  # type: ignore[no-untyped-def]
    scale = scale / 2
    buf = momentum * buf + grad
    second = second + grad * grad
    param = param - lr * scale * buf
    return param, second, scale


@pagedopt.rule
def mixed_up(g, p, m, *, lr):  # type: ignore[no-untyped-def]
    m = m + g
    p = p - lr * m
    return p, m


@pagedopt.rule
def changes_gradient(param, grad, *, lr):  # type: ignore[no-untyped-def]
    grad = 0.9 * grad
    param = param - lr * grad
    return param, grad


@pagedopt.rule
def without_gradient(param, *, lr):  # type: ignore[no-untyped-def]
    return param * (1 - lr)


@pagedopt.rule
def read_only(param, grad, mask, *, lr):  # type: ignore[no-untyped-def]
    return param - lr * mask * grad


@pagedopt.rule
def starless(param, grad, lr):  # type: ignore[no-untyped-def]
    return param - lr * grad


@pagedopt.rule
def two_betas(param, grad, buf, *, lr, beta1, beta2):  # type: ignore[no-untyped-def]
    buf = beta1 * buf + beta2 * grad
    param = param - lr * buf
    return param, buf


@pagedopt.rule
def counted(param, grad, buf, *, lr, step, decay, eps=1e-8):  # type: ignore[no-untyped-def]
    decay = decay / 2
    buf = buf + grad / step
    param = param - lr * decay * buf / (1 + eps)
    return param, buf, decay


def undecorated(param: float, grad: float, *, lr: float) -> float:
    return param - lr * grad


def of(chosen: Any, defaults: dict[str, Any], start: dict[str, Any] | None = None) -> PagedOptimizer:
    """An optimizer of a class of one's own."""

    class Own(PagedOptimizer):
        rule = chosen
        initial: ClassVar = start or {}

        def __init__(self) -> None:
            super().__init__([ready()], defaults)

    return Own()


# ---- the rule ----


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        (lost, "rule 'lost' .*its state 'buf' and does not return it.*'param = …' and 'return param, buf', or use"),
        (lost_one, "rule 'lost_one' .*state 'buf' .* write 'return param, buf, second, scale'"),
        (mixed_up, "rule 'mixed_up' .*does not return 'g', .*the parameter comes first, then the gradient"),
        (changes_gradient, "rule 'changes_gradient' .*returns 'grad', .*the parameter comes first, then the gradient"),
        (without_gradient, ".*takes 'param' alone: the parameter comes first, then the gradient"),
    ],
)  # fmt: skip
def test_a_rule_that_would_not_train_is_refused(subject: Rule, text: str) -> None:
    here = rf"test_class_checks\.py:{subject.function.__code__.co_firstlineno}: "

    class Chooses(PagedOptimizer):
        def rule_of(self, group: dict[str, Any]) -> Rule:
            return subject

    class Declares(Chooses):
        rules = (kept, subject)

    with pytest.raises(RuleError, match=here + text):
        of(subject, {**MOMENTUM, "scale": 1.0})
    with pytest.raises(RuleError, match=text):
        Declares([ready()], MOMENTUM)
    chooses = Chooses([ready()], MOMENTUM)
    with pytest.raises(RuleError, match=text):
        chooses.step()


def test_without_an_optimizer_such_a_rule_does_as_it_says() -> None:
    params, grads, buffers = ([torch.ones(3)] for _ in range(3))
    multi_tensor_apply(lost, [params, grads, buffers], MOMENTUM)
    torch.testing.assert_close(params[0], torch.full((3,), 1 - 0.1 * 1.9))
    assert torch.equal(buffers[0], torch.ones(3))


def test_a_rule_that_keeps_its_state_trains() -> None:
    optimizer = of(kept, MOMENTUM)
    optimizer.step()
    (p,) = optimizer.param_groups[0]["params"]
    torch.testing.assert_close(optimizer.state[p]["buf"], torch.full((3,), 1.1))
    masked = of(read_only, LR, {"mask": 0.5})
    masked.step()
    torch.testing.assert_close(masked.param_groups[0]["params"][0].detach(), torch.full((3,), 0.95))


def test_what_ships_loses_nothing() -> None:
    assert {name for name in UPDATES if set(RULES[name].lost) - {"grad"}} == set()
    assert kept.lost == ("grad",)
    assert lost.lost == ("buf",)


class ChoosesAFunction(PagedOptimizer):
    def rule_of(self, group: dict[str, Any]) -> Any:
        return undecorated


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: of(undecorated, LR), "rule is the function 'undecorated'; .*pagedopt.rule"),
        (lambda: of(None, LR), "Own has no rule; .*pagedopt.rule"),
        (lambda: of("sgd", LR), "rule is 'sgd'; .*pagedopt.rule"),
        (lambda: PagedOptimizer([ready()], LR), "PagedOptimizer has no rule; "),
        (lambda: ChoosesAFunction([ready()], LR).step(), "rule is the function 'undecorated'; "),
    ],
)
def test_what_is_no_rule_is_to_be_decorated(make: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


# ---- its hyperparameters ----


def test_a_missing_hyperparameter_is_named_with_what_is_near() -> None:
    with pytest.raises(TypeError, match=r"Own: rule 'kept' takes 'momentum', .*for 'momentum' there is 'momentun'$"):
        of(kept, {"lr": 0.1, "momentun": 0.9})
    with pytest.raises(TypeError, match=r"takes 'lr', 'momentum', neither in the defaults .* nor in the group$"):
        of(kept, {})
    of(kept, MOMENTUM)
    of(two_betas, {"lr": 0.1, "betas": (0.9, 0.99)})
    of(counted, LR)  # the step, what has a default, and what each parameter has for itself


def test_a_group_may_have_what_there_is_no_default_of() -> None:
    class Own(PagedOptimizer):
        rule = kept

    first = {"params": [ready()], "momentum": 0.9}
    optimizer = Own([first], LR)
    with pytest.raises(TypeError, match="rule 'kept' takes 'momentum'"):
        optimizer.add_param_group({"params": [ready()]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [ready()], "momentum": 0.5})
    optimizer.step()


@pytest.mark.parametrize("value", ["0.1", None])
def test_a_hyperparameter_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"lr is .*; give a number"):
        of(kept, {"lr": value, "momentum": 0.9})


def test_a_hyperparameter_before_the_star_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Own has 'lr' among its defaults, and in rule 'starless' 'lr' is before"):
        of(starless, LR)


# ---- what state starts with ----


@pytest.mark.parametrize(
    ("start", "error", "text"),
    [
        ({"bof": 1.0}, ValueError, r"Own.initial has 'bof'; its state is \['buf', 'step'\]; for 'bof' there is 'buf'"),
        ({"param": 1.0}, ValueError, "Own.initial has 'param'"),
        ({"buf": None}, TypeError, r"Own.initial\['buf'\] is None; give a number"),
        ({"buf": torch.ones(3)}, TypeError, r"Own.initial\['buf'\] is tensor"),
        ({"buf": "momentun"}, ValueError, r"Own.initial\['buf'\] is 'momentun', .*for 'momentun' there is 'momentum'"),
        ({"buf": "kind"}, TypeError, "kind is 'fast', a text; give a number"),
    ],
)
def test_a_first_value_that_no_state_takes_is_refused(start: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        of(kept, {**MOMENTUM, "kind": "fast"}, start)


@pytest.mark.parametrize("start", [{"buf": 2}, {"buf": "momentum"}, {"buf": True}, {}])
def test_a_first_value_that_is_a_number_is_taken(start: dict[str, Any]) -> None:
    optimizer = of(kept, MOMENTUM, start)
    optimizer.step()
    (p,) = optimizer.param_groups[0]["params"]
    first = {"momentum": 0.9}.get(start.get("buf", 0), start.get("buf", 0))
    torch.testing.assert_close(optimizer.state[p]["buf"], torch.full((3,), 0.9 * first + 1.1))


# --- what is said of each optimizer, once; and their options ----------------------------------------------------------


BY_NAME = [pytest.param(entry, id=entry.name) for entry in OPTIMIZERS]


@pytest.mark.parametrize("entry", BY_NAME)
def test_an_entry_is_what_its_class_is(entry: Entry) -> None:
    made = entry.optimizer
    assert made is getattr(pagedopt, entry.name)
    assert entry.name in pagedopt.__all__
    rules = made.rules or (made.rule,)
    assert [rule.name for rule in rules] == list(entry.rules)
    assert all(RULES[rule.name] is rule for rule in rules)
    ours, *theirs = made.__bases__
    assert issubclass(ours, pagedopt.PagedOptimizer)
    assert theirs == ([] if entry.torch is None else [entry.torch])


@pytest.mark.parametrize("entry", BY_NAME)
def test_states_and_rules_are_those_of_steps(entry: Entry) -> None:
    found: set[str] = set()
    for case in spec_of(entry).cases:
        optimizer = case.make(False, [{"params": [p := torch.nn.Parameter(torch.ones(3))]}])
        assert optimizer.rule_of(optimizer.param_groups[0]) is RULES[case.rule]
        p.grad = torch.ones(3)
        optimizer.step()
        found |= optimizer.state[p].keys() - optimizer.numbers
    assert found == set(entry.states)
    assert {case.rule for case in spec_of(entry).cases} == set(entry.rules)


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_what_is_bad_is_refused_as_the_reference_refuses_it(spec: Spec) -> None:
    assert spec.bad
    for bad in spec.bad:
        params = [torch.nn.Parameter(torch.ones(2))]
        with pytest.raises(bad.error):
            spec.reference(params, **bad.hyper)
        with pytest.raises(bad.error, match=bad.words):
            spec.entry.optimizer(params, **bad.hyper)


@pytest.mark.parametrize("spec", SPECS.values(), ids=str)
def test_nothing_of_a_first_case_is_at_its_default_or_zero(spec: Spec) -> None:
    defaults = spec.reference([torch.nn.Parameter(torch.ones(2))]).defaults
    for name, value in spec.hyper.items():
        assert value != defaults[name], name
        assert all(value) if isinstance(value, tuple) else value, name
    numbers = {name for name, value in defaults.items() if type(value) in (int, float, tuple)}
    assert numbers == spec.hyper.keys()


def test_every_optimizer_has_its_entry_and_no_other_has() -> None:
    assert [spec.entry for spec in SPECS.values()] == list(OPTIMIZERS)


def test_type_checkers_and_the_import_contract_are_told_of_every_class() -> None:
    text = Path(str(registry.__file__)).read_text()
    names = {entry.name for entry in OPTIMIZERS}
    imported = {found[1] for found in re.finditer(r"^    from \.\w+ import (Paged\w+) as ", text, re.M)}
    exported = set(re.findall(r'"(Paged\w+)"', text[text.index("__all__") :]))
    assert imported - {"PagedOptimizer"} == exported == names
    layers = (ROOT / "pyproject.toml").read_text()
    assert [e.module for e in OPTIMIZERS if not re.search(rf"[ \"]{e.module}( \||\")", layers)] == []
    names = [case.name for spec in SPECS.values() for case in spec.cases]
    assert len(set(names)) == len(names)


def test_there_is_no_other_rule_of_an_optimizer() -> None:
    assert sorted(RULE_NAMES) == sorted(UPDATES)


def test_the_command_line_knows_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in RULE_NAMES)


def test_the_registry_and_the_names_of_the_package_cost_no_torch() -> None:
    program = (
        "import sys, pagedopt; from pagedopt.optim.registry import RULE_NAMES; assert 'PagedSGD' in dir(pagedopt); "
        "assert 'adamw' in RULE_NAMES; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_option_has_a_default_and_is_kept() -> None:
    assert set(DEFAULTS) == set(Options.__annotations__)
    given: dict[str, Any] = {
        "state_format": "bfloat16", "rounding": "nearest", "seed": 3, "placement": "file", "device_budget": "1MiB",
        "host_access": None, "blocks": 3, "transport": "struct", "max_grad_norm": 2.5, "preallocate": True,
        "param_format": None, "param_rounding": "stochastic", "skip_nonfinite": True, "after": pagedopt.ema(0.9),
    }  # fmt: skip
    assert given.keys() == DEFAULTS.keys()
    optimizer = pagedopt.PagedAdamW([torch.nn.Parameter(torch.ones(3))], **given)
    again = pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, again):
        options = each.__getstate__()["_options"]
        assert options == given


def test_a_warmup_of_no_steps_is_none_and_one_from_zero_is_refused() -> None:
    found = []
    for warmup in (None, 0):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 9))
        optimizer = pagedopt.PagedAdEMAMix([param], alpha_warmup=warmup, beta3_warmup=warmup)
        for step in range(3):
            param.grad = torch.sin(param.detach() * (step + 2))
            optimizer.step()
        found.append(param)
    assert torch.equal(*found)
    for betas in ((0.0, 0.9, 0.99), (0.9, 0.9, 0.0)):
        with pytest.raises(ValueError, match=r"with beta3_warmup=5: the third grows from the first, both above 0"):
            pagedopt.PagedAdEMAMix([param], betas=betas, beta3_warmup=5)


def test_betas_may_be_an_iterator() -> None:
    for spec in SPECS.values():
        betas, names = spec.cases[0].options.get("betas"), inspect.signature(spec.entry.optimizer.__init__).parameters
        if betas is not None:
            more = {"beta3_warmup": 3} if "beta3_warmup" in names else {}
            optimizer = spec.entry.optimizer([torch.nn.Parameter(torch.ones(2))], betas=iter(betas), **more)
            assert optimizer.param_groups[0]["betas"] == betas
