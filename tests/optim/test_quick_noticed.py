"""What quick steps notice of what else has changed: rules, formats, tables that a step the long way has written."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from edits import give, groups_of, parameters
from edits_check import World
from looks import compiled_alone, look
from optim_support import ADAMW
from quick_twins import Rooted, Warm, is_quick, nothing_is_queued, python_s, same, train, with_hook
from support import default_dtype
from torch.nn import Parameter

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.rules.sgd import sgd
from pagedopt.system import look as build

__all__ = ["look", "nothing_is_queued"]  # fixtures
pytestmark = compiled_alone


def test_a_dict_of_formats_that_is_edited() -> None:
    found = []
    for python in (False, True):
        params, formats = parameters(), {"exp_avg": "float32"}
        optimizer = PagedAdamW(params, state_format=formats)
        if python:
            python_s(optimizer)
        train(optimizer, params, lambda *_: None)
        optimizer.state_format["exp_avg"] = "bfloat16"
        give(params, 20)
        try:
            optimizer.step()
            found.append(None)
        except Exception as error:
            found.append(str(error))
    assert found[0] == found[1]


LONG: dict[str, Callable[[Any], object]] = {
    "a closure": lambda optimizer: optimizer.step(lambda: 0),
    "a closure by name": lambda optimizer: optimizer.step(closure=lambda: 0),
    "a hook": lambda optimizer: with_hook(optimizer),
    "a function mode": lambda optimizer: in_mode(optimizer),
    "torch.compile": lambda optimizer: torch.compile(lambda: optimizer.step(), backend="eager")(),
}


def in_mode(optimizer: Any) -> None:
    with torch.overrides.BaseTorchFunctionMode():
        optimizer.step()


@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("edit", ["absent", "present", "elsewhere", "none"])
def test_a_step_the_long_way_between_may_write_the_table(long: str, edit: str) -> None:
    """The record is of the table as it was: the long step has other rows in it."""
    both = []
    for python in (False, True):
        params = parameters()
        optimizer = PagedAdamW(params, **ADAMW)
        if python:
            python_s(optimizer)
        usual = (1,) if edit == "present" else ()
        for step in range(5):
            give(params, step, skip=usual)
            optimizer.step()
        assert python or is_quick(optimizer)
        memory = params[2].data
        give(params, 5, skip=(1,) if edit == "absent" else ())
        if edit == "elsewhere":
            params[2].data = memory.clone()
        LONG[long](optimizer)
        if edit == "elsewhere":
            params[2].data = memory
        for step in range(6, 12):
            give(params, step, skip=usual)
            optimizer.step()
        assert python or is_quick(optimizer)
        both.append(World(optimizer, params))
    if long == "torch.compile":  # a compiled function raises versions as it likes
        for a, b in zip(both[0].params, both[1].params, strict=True):
            assert torch.equal(a, b)
        return
    same(*both)


def test_a_rare_hook_does_not_wear_out_its_patience() -> None:
    params = parameters()
    optimizer = PagedAdamW(params)
    for step in range(200):
        give(params, step)
        if step % 20 == 10:
            with_hook(optimizer)
        else:
            optimizer.step()
    assert optimizer._quick.patience.wait <= 8


class Slow(PagedSGD):
    """A class whose rule may be set."""


OTHER_RULES: dict[str, Callable[[Any], object]] = {
    "of the object": lambda optimizer: setattr(optimizer, "rule_of", lambda group: sgd),
    "of the class": lambda optimizer: setattr(type(optimizer), "rule_of", lambda self, group: sgd),
}


@pytest.mark.parametrize("how", OTHER_RULES)
def test_another_rule_is_noticed(how: str) -> None:
    both = []
    for python in (False, True):
        cls = type("Own", (Slow,), {})
        params = parameters()
        optimizer = cls(params, lr=0.1, momentum=0.9)
        if python:
            python_s(optimizer)
        assert train(optimizer, params, lambda *_: None) >= 4 or python
        OTHER_RULES[how](optimizer)
        for step in range(3):
            give(params, 20 + step)
            optimizer.step()
        both.append(World(optimizer, params))
    same(*both)


def test_counts_whose_memory_goes_are_not_read() -> None:
    params = parameters()
    optimizer = PagedAdamW(params)
    give(params, 0)
    optimizer.step()
    flat = torch.zeros(40 << 20)
    for i, p in enumerate(params):
        optimizer.state[p]["step"] = flat[i + (20 << 20)]
        flat[i + (20 << 20)] = i
    for step in range(5):
        give(params, step)
        optimizer.step()
    assert is_quick(optimizer)
    flat.share_memory_()
    give(params, 6)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [6 + i for i in range(len(params))]


WRITES: dict[str, Callable[[list[Any]], object]] = {
    "one": lambda counts: counts[1].fill_(17),
    "all": lambda counts: [count.add_(2) for count in counts],
    "all to zero": lambda counts: [count.zero_() for count in counts],
    "the last, through NumPy": lambda counts: counts[-1].numpy().fill(40),  # which raises no version
    "what is no number": lambda counts: counts[0].fill_(float("nan")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("write", WRITES)
def test_counts_that_somebody_writes_are_read(write: str, dtype: torch.dtype) -> None:
    both = []
    for python in (False, True):
        params = parameters()
        with default_dtype(dtype):
            optimizer = PagedAdamW(groups_of(params), **ADAMW)
            train(optimizer, params, lambda *_: None, steps=1)
        if python:
            python_s(optimizer)
        for _ in range(2):
            train(optimizer, params, lambda *_: None, steps=6)
            assert python or is_quick(optimizer)
            WRITES[write]([entry["step"] for entry in optimizer.state.values()])
        train(optimizer, params, lambda *_: None, steps=3)
        assert {entry["step"].dtype for entry in optimizer.state.values()} == {dtype}
        both.append(World(optimizer, params))
    same(*both)


def of_its_own(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    """Replace each entry of state by another with the same tensors."""

    def act(optimizer: Any) -> None:
        for p, entry in list(optimizer.state.items()):
            optimizer.state[p] = change(dict(entry))

    return act


def count_last(entry: dict[str, Any]) -> Any:
    found = OrderedDict(entry)
    found.move_to_end("step")
    return found


class Getting(dict[str, Any]):
    """A dict whose items Python code gets."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)


OTHER_DICTS: dict[str, tuple[Callable[[Any], object], bool]] = {
    "OrderedDict": (of_its_own(OrderedDict), True),
    "OrderedDict in another order": (of_its_own(count_last), True),
    "defaultdict": (of_its_own(lambda entry: defaultdict(dict, entry)), True),
    "Python code": (of_its_own(Getting), True),
    "no dict": (of_its_own(UserDict), False),
    "state": (lambda optimizer: setattr(optimizer, "state", OrderedDict(optimizer.state)), True),
}


@pytest.mark.parametrize("what", OTHER_DICTS)
@pytest.mark.parametrize("count", [2, 6])
def test_state_in_dicts_of_other_classes(what: str, count: int) -> None:
    act, is_one_call = OTHER_DICTS[what]
    both = []
    for python in (False, True):
        params = parameters()[:count]
        optimizer = PagedAdamW(params, **ADAMW)
        if python:
            python_s(optimizer)
        taken = train(optimizer, params, lambda *_: None)
        assert python or taken >= 4
        for _ in range(2):
            act(optimizer)
            taken = train(optimizer, params, lambda *_: None)
            assert python or (taken >= 4) == is_one_call
        both.append(World(optimizer, params))
    same(*both)


STALE: dict[str, Callable[[Any, list[Parameter]], object]] = {
    "groups": lambda optimizer, _: optimizer.param_groups[0].update(total=16.0),
    "counts": lambda optimizer, _: [entry["step"].zero_() for entry in optimizer.state.values()],
    "gradients": lambda _, params: [setattr(p, "grad", None) for p in params],
}


@pytest.mark.parametrize("edit", STALE)
def test_numbers_that_are_no_longer_right_raise_nothing(edit: str) -> None:
    both = []
    for python in (False, True):
        params = parameters()
        optimizer = Warm(params)
        if python:
            python_s(optimizer)
        train(optimizer, params, lambda *_: None, steps=7)
        assert python or is_quick(optimizer)
        give(params, 7)
        STALE[edit](optimizer, params)
        optimizer.step()
        both.append(World(optimizer, params))
    same(*both)


@pytest.mark.parametrize("cls", [Warm, Rooted])
def test_numbers_that_cannot_be_raise_what_the_long_way_raises(cls: type[Warm]) -> None:
    """A division by zero, and the root of a negative number, which Python returns."""
    both, errors = [], []
    for python in (False, True):
        params = parameters()
        optimizer = cls(params)
        if python:
            python_s(optimizer)
        with pytest.raises((ArithmeticError, RuntimeError)) as caught:
            train(optimizer, params, lambda *_: None, steps=9)
        errors.append((caught.type, str(caught.value)))
        both.append(World(optimizer, params))
    assert errors[0] == errors[1]
    same(*both)


def test_named_parameters_and_a_default_device_are_quick() -> None:
    net = torch.nn.Linear(3, 2)
    params = [*net.parameters()]
    optimizer = PagedAdamW(net.named_parameters())
    assert train(optimizer, params, lambda *_: None) >= 4
    with torch.device("cpu"):
        assert train(optimizer, params, lambda *_: None) >= 4


def test_the_choice_of_a_look_outlives_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(build.VARIABLE, "python")
        optimizer = PagedAdamW(params := parameters())
    train(optimizer, params, lambda *_: None)
    optimizer.load_state_dict(optimizer.state_dict())
    assert train(optimizer, params, lambda *_: None) == 0


def test_values_that_convert_themselves_are_asked_each_time() -> None:
    class Rate(float):
        now = 0.5

        def __float__(self) -> float:
            return Rate.now

    both = []
    for python in (False, True):
        Rate.now = 0.5
        params = parameters()
        optimizer = PagedAdamW(params, lr=Rate(1.0))
        if python:
            python_s(optimizer)
        train(optimizer, params, lambda *_: setattr(Rate, "now", Rate.now / 2))
        both.append(World(optimizer, params))
    same(*both)


@pytest.mark.parametrize("of", ["parameter", "state"])
def test_a_lazy_clone_keeps_its_values(of: str, look: str) -> None:
    """It shares memory until somebody writes through ``data_ptr()``."""
    params = parameters()
    optimizer = PagedAdamW(params)
    train(optimizer, params, lambda *_: None)
    assert is_quick(optimizer) == (look == "compiled")
    tensor = params[2].detach() if of == "parameter" else optimizer.state[params[2]]["exp_avg"]
    before, clone = tensor.clone(), torch._lazy_clone(tensor)
    train(optimizer, params, lambda *_: None, steps=3)
    assert torch.equal(clone, before)
    assert not torch.equal(optimizer.state[params[2]]["exp_avg"] if of == "state" else params[2], before)


def test_a_gradient_far_behind_in_a_freed_storage_is_refused(look: str) -> None:
    """Its offset is its address, and looks like one of memory."""
    params = parameters()
    optimizer = PagedAdamW(params)
    train(optimizer, params, lambda *_: None)
    assert is_quick(optimizer) == (look == "compiled")
    try:
        whole = torch.empty(9 << 30, dtype=torch.uint8)  # of which nothing is touched
    except RuntimeError:
        pytest.skip("no address space for 9 GiB")
    params[1].grad = whole.view(torch.float32)[-params[1].numel() :].view_as(params[1])
    whole.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="tensor 1 of grad has no memory"):
        optimizer.step()


class Names(list[str]):
    """A list that edits groups when it dies."""

    def __del__(self) -> None:
        for group in self.groups:  # type: ignore[attr-defined]
            group["lr"] = 0.5
        self.groups.append({"params": []})  # type: ignore[attr-defined]
        self.groups.pop()  # type: ignore[attr-defined]


def test_what_edits_groups_as_it_dies_in_a_look_is_followed() -> None:
    """The look holds the last of it: it dies while values of groups are taken."""
    both = []
    for python in (False, True):
        params = parameters()
        optimizer = PagedAdamW(groups_of(params), **ADAMW)
        if python:
            python_s(optimizer)
        for group in optimizer.param_groups:
            group["param_names"] = Names()
            group["param_names"].groups = optimizer.param_groups
        train(optimizer, params, lambda *_: None)
        assert python or is_quick(optimizer)
        for group in optimizer.param_groups:
            group["param_names"] = []
        give(params, 20)
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
        train(optimizer, params, lambda *_: None)
        both.append(World(optimizer, params))
    same(*both)


LAYOUTS: dict[str, Callable[[torch.Tensor], object]] = {
    "t_": lambda state: state.t_(),
    "data": lambda state: setattr(state, "data", state.data.t()),
}


@pytest.mark.parametrize("edit", LAYOUTS)
@pytest.mark.parametrize("again", [1, 2])
def test_state_in_another_layout_over_its_memory(edit: str, again: int, look: str) -> None:
    """As torch, which reads elements by their indices."""
    if (look, edit) == ("python", "data"):
        pytest.skip("goes unseen")
    both = []
    for make in (PagedAdamW, torch.optim.AdamW):
        params = [parameters()[0], Parameter(torch.linspace(-1, 1, 36).view(6, 6))]
        optimizer = make(params, lr=0.1)
        for number in range(again):
            train_any(optimizer, params)
            if make is PagedAdamW and not number:  # behind it strides of state and parameter differ
                assert is_quick(optimizer) == (look == "compiled")
            LAYOUTS[edit](optimizer.state[params[1]]["exp_avg"])
        train_any(optimizer, params)
        both.append(params)
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def train_any(optimizer: Any, params: list[Parameter]) -> None:
    for step in range(6):
        give(params, step)
        optimizer.step()
