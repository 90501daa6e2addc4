"""What is said of each optimizer, once; and their options."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import pagedopt
from pagedopt.commands.main import main
from pagedopt.optim.as_torch import AsTorch
from pagedopt.optim.options import DEFAULTS, Options
from pagedopt.optim.registry import OPTIMIZERS, RULE_NAMES, Entry
from pagedopt.rules import RULES, UPDATES
from tests.specs import SPECS, Spec, spec_of

BY_NAME = [pytest.param(entry, id=entry.name) for entry in OPTIMIZERS]


@pytest.mark.parametrize("entry", BY_NAME)
def test_an_entry_is_what_its_class_is(entry: Entry) -> None:
    made = entry.optimizer
    assert made is getattr(pagedopt, entry.name)
    assert entry.name in pagedopt.__all__
    rules = made.rules or (made.rule,)
    assert [rule.name for rule in rules] == list(entry.rules)
    assert all(RULES[rule.name] is rule for rule in rules)
    assert made.__bases__[0] in (pagedopt.PagedOptimizer, AsTorch)
    assert made.__bases__[1:] == (() if entry.torch is None else (entry.torch,))


@pytest.mark.parametrize("entry", BY_NAME)
def test_states_and_rules_are_those_of_steps(entry: Entry) -> None:
    found: set[str] = set()
    for case in spec_of(entry).cases:
        optimizer = case.make(False, [{"params": [p := torch.nn.Parameter(torch.ones(3))]}])
        assert optimizer.rule_of(optimizer.param_groups[0]) is RULES[case.rule]
        p.grad = torch.ones(3)
        optimizer.step()
        found |= optimizer.state[p].keys() - {"step"}
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


@pytest.mark.parametrize("entry", BY_NAME)
def test_an_unknown_option_is_named_as_python_names_it(entry: Entry) -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match=rf"{entry.name}.__init__\(\) got an unexpected keyword argument 'budget'"):
        entry.optimizer(params, budget=0)


def test_every_option_has_a_default_and_is_kept() -> None:
    assert set(DEFAULTS) == set(Options.__annotations__)
    given: dict[str, Any] = {
        "state_format": "bfloat16", "rounding": "nearest", "seed": 3, "placement": "file", "device_budget": "1MiB",
        "host_access": None, "blocks": 3, "transport": "struct", "max_grad_norm": 2.5, "preallocate": True,
        "param_format": "bfloat16+8", "param_rounding": "nearest",
    }  # fmt: skip
    assert given.keys() == DEFAULTS.keys()
    optimizer = pagedopt.PagedAdamW([torch.nn.Parameter(torch.ones(3))], **given)
    again = pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, again):
        options = each.__getstate__()["_options"]
        assert options == given
