"""State dicts, copies and pickles of int8 state: names that say the code, torch's state in and out, refusals."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import int8_oracle as oracle
import pytest
import torch
from int8_support import flat, same
from int8_training import Params, bits, parameters, train
from optim_support import step_on_ones, through_file
from paths import DATA

import pagedopt
from pagedopt import PagedAdamW, PagedLion
from pagedopt.system import warn

pytestmark = pytest.mark.usefixtures("folder")
PART = {"placement": "file", "device_budget": "70%"}
#: Of the parameters, those whose state is in 8 bits.
LARGE = [0, 1, 3, 4, 6]


def trained(**options: Any) -> tuple[PagedAdamW, Params]:
    """An optimizer with int8 state after three steps with all gradients."""
    params = parameters()
    opt = PagedAdamW(params, lr=1e-2, weight_decay=0.1, state_format="int8", seed=6, **options)
    train(opt, params, range(3), late=False)
    return opt, params


def test_columns_are_named_after_their_code_and_pass_through_file() -> None:
    opt, params = trained(**PART)
    saved = through_file(opt.state_dict())
    for i, p in enumerate(params):
        entry = saved["state"][i]
        said = {name: (value.dtype, value.shape) for name, value in entry.items() if name != "step"}
        if i in LARGE:
            absmax = torch.float32, torch.Size([-(-p.numel() // 256)])
            assert said == {
                "exp_avg.root3": (torch.int8, p.shape), "exp_avg.absmax": absmax,
                "exp_avg_sq.root4": (torch.uint8, p.shape), "exp_avg_sq.absmax": absmax,
            }  # fmt: skip
        else:
            assert said == dict.fromkeys(("exp_avg", "exp_avg_sq"), (torch.float32, p.shape))
        assert entry["step"] == 3
        assert same(list(entry.values()), list(opt.state[p].values()))
    (group,) = saved["param_groups"]
    assert (group["seed"], group["rounding"]) == (6, None)
    assert "state_format" not in group


def test_decoded_state_is_torch_s_and_on_the_host() -> None:
    """And encoded to the same codes again, whatever the seed of the optimizer that loads it, which stays."""
    opt, params = trained(**PART)
    before = opt.memory_report().by_place
    saved = opt.decoded_state_dict()
    decoded = saved["state"]
    assert opt.memory_report().by_place == before
    for i in LARGE:
        assert list(decoded[i]) == ["step", "exp_avg", "exp_avg_sq"]
        for name, root in (("exp_avg", 3), ("exp_avg_sq", 4)):
            value, entry = decoded[i][name], opt.state[params[i]]
            columns = (flat(entry[f"{name}.{column}"]).numpy() for column in (f"root{root}", "absmax"))
            want = torch.from_numpy(oracle.decode(root, *columns))
            assert same([flat(value)], [want])
            assert (value.shape, value.stride(), value.device.type) == (params[i].shape, params[i].stride(), "cpu")
    again = PagedAdamW(params, lr=1e-2, state_format="int8", seed=8)
    again.load_state_dict({**saved, "param_groups": torch.optim.AdamW(params).state_dict()["param_groups"]})
    assert again.param_groups[0]["seed"] == 8
    assert same(*([t for p in params for t in each.state[p].values()] for each in (again, opt)))


@pytest.mark.parametrize(("name", "block"), [("exp_avg", 128), ("exp_avg_sq", 2048)])
def test_a_file_of_another_block_size_is_refused_in_words(name: str, block: int) -> None:
    opt, params = trained()
    want = bits(opt, params)
    saved = opt.state_dict()
    count = -(-params[0].numel() // block)
    saved["state"][0] = {**saved["state"][0], f"{name}.absmax": torch.zeros(count)}
    text = rf"loaded {name}\.absmax of parameter 0 has shape \({count},\), format 'int8, root .*' has "
    with pytest.raises(ValueError, match=rf"{text}.* an entry for 256 elements; it was saved with blocks of another"):
        opt.load_state_dict(saved)
    assert same(bits(opt, params), want)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"seed {seed}": ({"seed": seed}, f"seed is {seed}; it must be a whole number from 0 to 2,097,151")
        for seed in (-1, 1 << 21, 1.5, None)
    },
    "too slow": ({"betas": (0.999, 0.999)}, r"cannot be stored in int8: its decay beta1 is 0\.999"),
}


@pytest.mark.parametrize(("wrong", "text"), WRONG.values(), ids=WRONG)
def test_a_group_that_int8_does_not_take_is_refused_by_a_load_and_by_a_step(wrong: dict[str, Any], text: str) -> None:
    """Nothing has changed then: kernels would draw from another seed's bits, and steps would reach into it."""
    opt, params = trained()
    want, saved, group = bits(opt, params), opt.state_dict(), opt.param_groups[0]
    saved["param_groups"][0] |= wrong
    kept = {name: group[name] for name in wrong}
    with pytest.raises(ValueError, match=text):
        opt.load_state_dict(saved)
    assert opt.param_groups[0].items() >= kept.items()
    opt.param_groups[0] |= wrong
    with pytest.raises(ValueError, match=text):
        opt.step()
    assert same(bits(opt, params), want)
    opt.param_groups[0] |= kept
    opt.step()


def test_how_a_group_rounds_is_loaded_and_not_how_it_stores() -> None:
    """A run goes on as it began, whatever its new optimizer was made with; an old dict says nothing of the rounding."""
    p, q = (torch.nn.Parameter(torch.ones(4096)) for _ in range(2))
    groups = [{"params": [p]}, {"params": [q], "state_format": "float32"}]
    saver, loader = (
        PagedAdamW([*map(dict, groups)], state_format="int8", rounding=rounding, seed=seed)
        for rounding, seed in (("nearest", 3), ("stochastic", 2))
    )
    step_on_ones(saver)
    saved = through_file(saver.state_dict())
    loader.load_state_dict(saved)
    said = [[group.get(name) for name in ("state_format", "rounding", "seed")] for group in loader.param_groups]
    assert said == [[None, "nearest", 3], ["float32", None, None]]
    assert loader.seed == 2
    assert list(loader.state[q]) == ["step", "exp_avg", "exp_avg_sq"]
    loader.param_groups[0]["rounding"] = "stochastic"
    del saved["param_groups"][0]["rounding"]
    loader.load_state_dict(saved)
    assert loader.param_groups[0]["rounding"] == "stochastic"


# --- what was before: first moments in root 2, of files and of pickles, and the option ``v_rounding`` -----------------


SHAPES = ((70, 90), (5,), (4500,))
KINDS: dict[str, Any] = {"adamw": PagedAdamW, "lion": PagedLion}


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    """By name of the optimizer, what pagedopt at d61212d wrote."""
    found: dict[str, Any] = torch.load(DATA / "pagedopt-d61212d-int8.pt", weights_only=True)
    return found


def numpy_of(entry: dict[str, torch.Tensor], column: str) -> Any:
    return flat(entry[f"exp_avg.{column}"]).numpy()


def of_before() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


@pytest.mark.parametrize("state_format", ["int8", "float32"])
@pytest.mark.parametrize("name", KINDS)
def test_root_2_is_decoded_and_encoded_once(name: str, state_format: Any, before: dict[str, Any]) -> None:
    params, saved = of_before(), before[name]["state_dict"]
    opt = KINDS[name](params, state_format=state_format, **PART)
    for state in (saved, copy.deepcopy(saved)):  # into new state, then into that
        opt.load_state_dict(state)
        for i in (0, 2):
            entry, mine = saved["state"][i], opt.state[params[i]]
            values = oracle.decode2(numpy_of(entry, "root2"), numpy_of(entry, "absmax"))
            if state_format == "float32":
                assert same([flat(mine["exp_avg"])], [values])
                continue
            assert same([numpy_of(mine, "root3"), numpy_of(mine, "absmax")], oracle.encode(3, values))
            assert "exp_avg.root2" not in mine
            rest = [key for key in entry if not key.startswith("exp_avg.")]
            assert same([mine[key] for key in rest], [entry[key] for key in rest])
        assert torch.equal(opt.state[params[1]]["exp_avg"], saved["state"][1]["exp_avg"])
    step_on_ones(opt)


def test_root_2_of_another_optimizer_is_refused_in_words(before: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"it is of another optimizer"):
        PagedLion(of_before(), state_format="int8").load_state_dict(before["adamw"]["state_dict"])
    wrong = copy.deepcopy(before["lion"]["state_dict"])
    wrong["state"][0]["exp_avg.root2"] = torch.zeros(70, 90)
    with pytest.raises(ValueError, match=r"exp_avg\.root2 of parameter 0 is torch\.float32.* as format 'int8, root 2'"):
        PagedLion(of_before(), state_format="int8").load_state_dict(wrong)


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


@pytest.mark.parametrize("where", ["optimizer", "group"])
def test_v_rounding_is_rounding_and_says_so_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_said", set())
    p, old = torch.nn.Parameter(torch.ones(4096)), {"v_rounding": "nearest"}
    of_all, of_group = (old, {}) if where == "optimizer" else ({}, old)
    with pytest.warns(RuntimeWarning, match="v_rounding='nearest': the option is called rounding now") as said:
        opt = PagedAdamW([{"params": [p], **of_group}], state_format="int8", **of_all)  # type: ignore[arg-type]
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
