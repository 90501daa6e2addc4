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
from int8_training import PLACES, Params, bits, made, train
from optim_support import through_file
from paths import DATA

import pagedopt
from pagedopt import PagedAdamW, PagedLion, PagedOptimizer
from pagedopt.system import warn

pytestmark = pytest.mark.usefixtures("folder")
SOME = ["resident", "file", "part", "spill()"]
#: Of the parameters, those whose state is in 8 bits.
LARGE = [0, 1, 3, 4, 6]


def trained(place: str = "resident", steps: int = 3, **changes: Any) -> tuple[PagedOptimizer, Params]:
    """An AdamW with int8 state after some steps with all gradients; state that ``spill()`` sends away is away."""
    opt, params = made({"kind": "stochastic", "place": place, "seed": 6, "own": False, **changes})
    train(opt, params, range(steps), late=False, place=place)
    return opt, params


@pytest.mark.parametrize("place", SOME)
def test_columns_are_named_after_their_code_and_pass_through_file(place: str) -> None:
    opt, params = trained(place)
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


@pytest.mark.parametrize("place", SOME)
def test_a_load_gives_all_bits_back_and_goes_on_by_the_saved_seed(place: str) -> None:
    opt, params = trained()
    saved = through_file({"params": [p.detach() for p in params], "state": opt.state_dict()})
    train(opt, params, range(3, 5))
    other, theirs = made({"kind": "stochastic", "place": place, "seed": 1, "own": False})
    with torch.no_grad():
        for p, value in zip(theirs, saved["params"], strict=True):
            p.copy_(value)
    other.load_state_dict(saved["state"])
    assert other.param_groups[0]["seed"] == 6
    assert other.seed == 1
    train(other, theirs, range(3, 5))
    assert same(bits(other, theirs), bits(opt, params))


@pytest.mark.parametrize("place", SOME)
def test_decoded_state_is_torch_s_and_on_the_host(place: str) -> None:
    """And encoded to the same codes again, whatever the seed of the optimizer that loads it, which stays."""
    opt, params = trained(place)
    before = dict(opt.memory_report().by_place)
    saved = opt.decoded_state_dict()
    decoded = saved["state"]
    assert dict(opt.memory_report().by_place) == before
    for i in LARGE:
        assert list(decoded[i]) == ["step", "exp_avg", "exp_avg_sq"]
        for name, root in (("exp_avg", 3), ("exp_avg_sq", 4)):
            value, entry = decoded[i][name], opt.state[params[i]]
            columns = (flat(entry[f"{name}.{column}"]).numpy() for column in (f"root{root}", "absmax"))
            want = torch.from_numpy(oracle.decode(root, *columns))
            assert same([flat(value)], [want])
            assert (value.shape, value.stride(), value.device.type) == (params[i].shape, params[i].stride(), "cpu")
    back = torch.optim.AdamW(params, lr=1e-2)
    of_torch = {**saved, "param_groups": back.state_dict()["param_groups"]}
    back.load_state_dict(through_file(saved))
    back.step()
    again = PagedAdamW(params, lr=1e-2, state_format="int8", seed=8)
    again.load_state_dict(of_torch)
    assert again.param_groups[0]["seed"] == 8
    assert same(*([t for p in params for t in each.state[p].values()] for each in (again, opt)))


@pytest.mark.parametrize("block", [128, 512, 2048])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
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


def test_a_group_stores_what_it_loads_in_its_own_format() -> None:
    """A state dict does not say how groups store state, as the optimizer that loads it does; but how they round."""
    other, theirs = made({"kind": "stochastic", "place": "resident", "seed": 1, "own": True})
    other.param_groups[0]["rounding"] = "nearest"
    train(other, theirs, range(2), late=False)
    third, _ = made({"kind": "stochastic", "place": "resident", "seed": 2, "own": True})
    third.load_state_dict(through_file(other.state_dict()))
    assert [group.get("state_format") for group in third.param_groups] == [None, "float32"]
    assert [group.get("rounding") for group in third.param_groups] == ["nearest", None]
    assert [group.get("seed") for group in third.param_groups] == [1, None]
    order = [p for group in third.param_groups for p in group["params"]]
    assert list(third.state[order[-1]]) == ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("place", SOME)
def test_copies_and_pickles_are_the_same_and_apart(place: str) -> None:
    opt, params = trained(place, own=True)
    opt.param_groups[0]["rounding"] = "nearest"
    want = bits(opt, params)
    copies: list[Any] = [copy.deepcopy((opt, params)), pickle.loads(pickle.dumps((opt, params)))]
    for twin, twins in copies:
        assert same(bits(twin, twins), want)
        assert (twin.seed, twin.state_format, twin.rounding) == (6, "int8", None)
        assert [group.get("rounding") for group in twin.param_groups] == ["nearest", None]
        train(twin, twins, range(3, 5))
    assert same(bits(opt, params), want)
    train(opt, params, range(3, 5))
    for twin, twins in copies:
        assert same(bits(twin, twins), bits(opt, params))


@pytest.mark.long
def test_amsgrad_s_maximum_is_a_column_of_its_own_and_rounded_to_nearest() -> None:
    """A maximum of numbers that are rounded at random would climb: of the same number two seeds make the same."""
    found = []
    for seed in (0, 1):
        opt, params = made({"kind": "amsgrad", "place": "resident", "seed": seed, "own": False})
        opt.rounding = "stochastic"
        train(opt, params, range(1), late=False)
        found.append(opt.state[params[0]])
    one, other = found
    assert list(one)[-2:] == ["max_exp_avg_sq.root4", "max_exp_avg_sq.absmax"]
    assert torch.equal(one["max_exp_avg_sq.root4"], other["max_exp_avg_sq.root4"])
    assert not torch.equal(one["exp_avg_sq.root4"], other["exp_avg_sq.root4"])


@pytest.mark.parametrize("seed", [-1, 1 << 21, 1.5, None])
def test_a_bad_seed_is_refused_by_a_load_and_by_a_step_and_changes_nothing(seed: Any) -> None:
    """Kernels would draw from another seed's bits, and steps would reach into it."""
    opt, params = trained()
    want = bits(opt, params)
    saved = opt.state_dict()
    saved["param_groups"][0]["seed"] = seed
    with pytest.raises(ValueError, match=f"seed is {seed}; it must be a whole number from 0 to 2,097,151"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["seed"] == 6
    opt.param_groups[0]["seed"] = seed
    with pytest.raises(ValueError, match=f"seed is {seed}; it must be"):
        opt.step()
    assert same(bits(opt, params), want)
    opt.param_groups[0]["seed"] = 6
    opt.step()


def test_a_loaded_decay_that_is_too_slow_is_refused_and_changes_nothing() -> None:
    opt, params = trained()
    want = bits(opt, params)
    saved = opt.state_dict()
    saved["param_groups"][0]["betas"] = (0.999, 0.999)
    with pytest.raises(ValueError, match=r"cannot be stored in int8: its decay beta1 is 0\.999"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["betas"] == (0.9, 0.999)
    train(opt, params, range(3, 4))
    again, theirs = trained()
    assert same(bits(again, theirs), want)
    train(again, theirs, range(3, 4))
    assert same(bits(again, theirs), bits(opt, params))


def test_the_rounding_is_saved_and_loaded_with_the_seed() -> None:
    """A run goes on as it began, whatever its new optimizer was made with; an old dict says nothing of the rounding."""
    p = torch.nn.Parameter(torch.ones(4096))
    saver = PagedAdamW([p], state_format="int8", rounding="nearest", seed=3)
    saved = saver.state_dict()
    assert (saved["param_groups"][0]["rounding"], saved["param_groups"][0]["seed"]) == ("nearest", 3)
    loader = PagedAdamW([p], state_format="int8", rounding="stochastic")
    loader.load_state_dict(saved)
    assert (loader.param_groups[0]["rounding"], loader.param_groups[0]["seed"]) == ("nearest", 3)
    loader.load_state_dict(PagedAdamW([p], state_format="int8").state_dict())
    assert loader.param_groups[0]["rounding"] is None
    old = {**saved, "param_groups": [{k: v for k, v in saved["param_groups"][0].items() if k != "rounding"}]}
    loader.param_groups[0]["rounding"] = "stochastic"
    loader.load_state_dict(old)
    assert loader.param_groups[0]["rounding"] == "stochastic"
    torch.optim.AdamW([p]).load_state_dict(saved)


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


@pytest.mark.parametrize("place", ["resident", "file", "part"])
@pytest.mark.parametrize("name", KINDS)
def test_root_2_is_decoded_and_encoded_once(name: str, place: str, before: dict[str, Any]) -> None:
    params, saved = of_before(), before[name]["state_dict"]
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
    params, saved = of_before(), before["adamw"]["state_dict"]
    opt = PagedAdamW(params, state_format="float32")
    opt.load_state_dict(saved)
    for i in (0, 2):
        entry = saved["state"][i]
        values = oracle.decode2(numpy_of(entry, "root2"), numpy_of(entry, "absmax"))
        assert same([flat(opt.state[params[i]]["exp_avg"])], [torch.from_numpy(values)])


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
