"""What was before: first moments in root 2, of files and of pickles, and the option ``v_rounding``."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import int8_oracle as oracle
import pytest
import torch
from int8_support import flat, same
from int8_training import PLACES
from paths import DATA

import pagedopt
from pagedopt import PagedAdamW, PagedLion
from pagedopt.system import warn

pytestmark = pytest.mark.usefixtures("folder")
SHAPES = ((70, 90), (5,), (4500,))
KINDS: dict[str, Any] = {"adamw": PagedAdamW, "lion": PagedLion}


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    """By name of the optimizer, what pagedopt at d61212d wrote."""
    found: dict[str, Any] = torch.load(DATA / "pagedopt-d61212d-int8.pt", weights_only=True)
    return found


def numpy_of(entry: dict[str, torch.Tensor], column: str) -> Any:
    return flat(entry[f"exp_avg.{column}"]).numpy()


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


@pytest.mark.parametrize("place", ["resident", "file", "part"])
@pytest.mark.parametrize("name", KINDS)
def test_root_2_is_decoded_and_encoded_once(name: str, place: str, before: dict[str, Any]) -> None:
    params, saved = parameters(), before[name]["state_dict"]
    opt = KINDS[name](params, state_format="int8", **PLACES[place])
    for state in (saved, copy.deepcopy(saved)):  # into new state, then into that
        opt.load_state_dict(state)
        for i in (0, 2):
            entry, mine = saved["state"][i], opt.state[params[i]]
            values = oracle.decode2(numpy_of(entry, "root2"), numpy_of(entry, "absmax"))
            want = oracle.encode(3, values)
            assert same([numpy_of(mine, "root3"), numpy_of(mine, "absmax")], want)
            assert "exp_avg.root2" not in mine
            rest = [key for key in entry if not key.startswith("exp_avg.")]
            assert same([mine[key] for key in rest], [entry[key] for key in rest])
        assert torch.equal(opt.state[params[1]]["exp_avg"], saved["state"][1]["exp_avg"])
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()


def test_root_2_is_loaded_into_floats(before: dict[str, Any]) -> None:
    params, saved = parameters(), before["adamw"]["state_dict"]
    opt = PagedAdamW(params, state_format="float32")
    opt.load_state_dict(saved)
    for i in (0, 2):
        entry = saved["state"][i]
        values = oracle.decode2(numpy_of(entry, "root2"), numpy_of(entry, "absmax"))
        assert same([flat(opt.state[params[i]]["exp_avg"])], [torch.from_numpy(values)])


def test_root_2_of_another_optimizer_is_refused_in_words(before: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"it is of another optimizer"):
        PagedLion(parameters(), state_format="int8").load_state_dict(before["adamw"]["state_dict"])
    wrong = copy.deepcopy(before["lion"]["state_dict"])
    wrong["state"][0]["exp_avg.root2"] = torch.zeros(70, 90)
    with pytest.raises(ValueError, match=r"exp_avg\.root2 of parameter 0 is torch\.float32.* as format 'int8, root 2'"):
        PagedLion(parameters(), state_format="int8").load_state_dict(wrong)


@pytest.mark.parametrize("name", KINDS)
def test_a_pickle_of_before_goes_on(name: str, before: dict[str, Any]) -> None:
    """As the state dict of then in an optimizer of today."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = pickle.loads(before[name]["pickle"])
    theirs = opt.param_groups[0]["params"]
    params = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    other = KINDS[name](params, state_format="int8")
    other.load_state_dict(before[name]["state_dict"])
    assert opt.rounding == ("stochastic" if name == "adamw" else None)
    for group in (opt.param_groups[0], other.param_groups[0]):
        assert group["rounding"] == opt.rounding
        assert "v_rounding" not in group
    for p, q in zip(theirs, params, strict=True):
        p.grad, q.grad = torch.full_like(p, 0.1), torch.full_like(q, 0.1)
    opt.step()
    other.step()
    for p, q in zip(theirs, params, strict=True):
        assert same([p.detach(), *opt.state[p].values()], [q.detach(), *other.state[q].values()])


def with_old_option(where: str, p: torch.nn.Parameter) -> PagedAdamW:
    old: dict[str, Any] = {"v_rounding": "nearest"}
    if where == "optimizer":
        return PagedAdamW([p], state_format="int8", **old)
    if where == "group":
        return PagedAdamW([{"params": [p], **old}], state_format="int8")
    opt = PagedAdamW([torch.nn.Parameter(torch.ones(4096))], state_format="int8")
    opt.add_param_group({"params": [p], **old})
    return opt


@pytest.mark.parametrize("where", ["optimizer", "group", "later"])
def test_v_rounding_is_rounding_and_says_so_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_said", set())
    p = torch.nn.Parameter(torch.ones(4096))
    with pytest.warns(RuntimeWarning, match="v_rounding='nearest': the option is called rounding now") as said:
        opt = with_old_option(where, p)
    assert opt.rounding == ("nearest" if where == "optimizer" else None)
    assert len(said) == 1
    group = opt.param_groups[-1]
    assert (group["rounding"], group.get("v_rounding", "none")) == ("nearest", "none")
    assert opt.format_of("exp_avg", p, group).name == "int8, root 3, nearest"
    with pytest.raises(ValueError, match="rounding is 'up'; it must be"):
        PagedAdamW([p], state_format="int8", **{"v_rounding": "up"})  # type: ignore[arg-type]


def test_a_group_that_is_loaded_with_v_rounding_has_rounding() -> None:
    p = torch.nn.Parameter(torch.ones(4096))
    saved = PagedAdamW([p], state_format="int8", rounding="nearest").state_dict()
    saved["param_groups"][0]["v_rounding"] = saved["param_groups"][0].pop("rounding")
    opt = PagedAdamW([p], state_format="int8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["rounding"] == "nearest"
    assert "v_rounding" not in opt.param_groups[0]
    assert "v_rounding" in saved["param_groups"][0], "the dict of the caller stays as it is"
    assert pagedopt.Options.__annotations__.keys() >= {"rounding"}
