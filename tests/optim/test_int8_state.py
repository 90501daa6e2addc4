"""A step on int8 state is the step of float32 on decoded state, encoded again: NumPy's bits, over many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import int8_oracle as oracle
import pytest
import torch
from int8_oracle import Array, Draw
from int8_support import flat, same
from int8_training import KINDS, PLACES, bits, give, parameters, train
from support import threads

import pagedopt
from pagedopt import PagedAdamW, PagedLion
from pagedopt.optim.optimizer import PagedOptimizer

pytestmark = pytest.mark.usefixtures("folder")
F32, BF16 = torch.float32, torch.bfloat16
CASES: list[Any] = [
    ("stochastic", F32, {}), ("stochastic", F32, {"seed": 77, **PLACES["part"]}),
    ("stochastic", F32, {"rounding": "nearest"}), ("nearest", F32, {"rounding": "stochastic", "seed": 2}),
    ("nearest", F32, {}), ("amsgrad", F32, {"seed": 5}), ("lion", BF16, {}),
    pytest.param("momentum", F32, {"seed": 3}, marks=pytest.mark.long),
]  # fmt: skip

#: What a group may have for itself; the rest goes to the float32 optimizer.
OWN = ("state_format", "rounding", "seed")


class Twin:
    """What ``kind(groups, state_format="int8", …)`` should do to copies of its parameters.

    Attributes:
        params: copies of the parameters, group by group.
        columns: by index of the parameter and name of the state, the columns (codes, absmax).
    """

    def __init__(self, kind: Any, groups: Sequence[dict[str, Any]], **options: Any) -> None:
        own = {name: options.pop(name) for name in OWN if name in options}
        self.params = [torch.nn.Parameter(p.detach().clone()) for group in groups for p in group["params"]]
        self.own: list[dict[str, Any]] = []
        plain, copies = [], iter(self.params)
        for group in groups:
            mine = {**own, **{name: group[name] for name in OWN if name in group}}
            plain.append({name: value for name, value in group.items() if name not in OWN})
            plain[-1]["params"] = [next(copies) for _ in group["params"]]
            self.own += [mine] * len(group["params"])
        self.opt = kind(plain, state_format="float32", **options)
        self.columns: dict[tuple[int, str], tuple[Array, Array]] = {}

    def step(self) -> None:
        """One step: decode, update, encode."""
        for (i, name), (codes, absmax) in self.columns.items():
            values = oracle.decode(4 if "sq" in name else 3, codes, absmax)
            flat(self.opt.state[self.params[i]][name]).copy_(torch.from_numpy(values))
        self.opt.step()
        groups = [group for group in self.opt.param_groups for _ in group["params"]]
        for i, (p, group) in enumerate(zip(self.params, groups, strict=True)):
            if p.grad is None or p.numel() < 4096 or self.own[i].get("state_format") == "float32":
                continue
            names = self.opt.rule_of(group).inputs
            for name in names[2:]:
                values = flat(self.opt.state[p][name]).numpy()
                self.columns[i, name] = self._encode(values, i, name, names.index(name), group)

    def _encode(self, values: Array, i: int, name: str, index: int, group: dict[str, Any]) -> tuple[Array, Array]:
        root, own = 4 if "sq" in name else 3, self.own[i]
        usual = "stochastic" if root == 3 or group["betas"][1] >= 0.99 else "nearest"
        if name == "max_exp_avg_sq" or (own.get("rounding") or usual) == "nearest":
            return oracle.encode(root, values)
        step = self.opt.state[self.params[i]].get("step")
        return oracle.encode(root, values, Draw(own.get("seed", 0), None if step is None else int(step), i, index))

    def differences(self, opt: Any) -> list[str]:
        """Where an optimizer's parameters and state have other bits than these."""
        found = []
        params = [p for group in opt.param_groups for p in group["params"]]
        for i, (mine, p) in enumerate(zip(self.params, params, strict=True)):
            want: dict[str, Any] = {"parameter": mine.detach()}
            for name, value in self.opt.state.get(mine, {}).items():
                if (i, name) in self.columns:
                    codes, absmax = self.columns[i, name]
                    kind = "root4" if "sq" in name else "root3"
                    want |= {f"{name}.{kind}": torch.from_numpy(codes), f"{name}.absmax": torch.from_numpy(absmax)}
                else:
                    want[name] = value
            got = {"parameter": p.detach(), **opt.state.get(p, {})}
            if want.keys() != got.keys():
                found.append(f"parameter {i} has {list(got)}, not {list(want)}")
            found += [
                f"{name} of parameter {i}" for name in want.keys() & got.keys()
                if not same([flat(want[name])], [flat(got[name])])
            ]  # fmt: skip
        return sorted(found)


def pair(kind: Any, groups: list[dict[str, Any]], **options: Any) -> tuple[PagedOptimizer, Twin]:
    """An optimizer and its oracle, which knows no places."""
    where = {name: options.pop(name) for name in ("placement", "device_budget") if name in options}
    opt = kind([dict(group) for group in groups], **{"state_format": "int8", **options, **where})
    return opt, Twin(kind, groups, **options)


def hold(opt: PagedOptimizer, twin: Twin, count: int = 8, wild: bool = True, **values: Sequence[Any]) -> None:
    """Steps of both on the same gradients; ``values``: of the first group, one for each step."""
    params = [p for group in opt.param_groups for p in group["params"]]
    for number in range(count):
        for first in (opt.param_groups[0], twin.opt.param_groups[0], *twin.own):
            first.update({name: each[number] for name, each in values.items()})
        for mine in (params, twin.params):
            give(mine, number, wild=wild)
        opt.step()
        twin.step()
        assert twin.differences(opt) == [], f"step {number}"


@pytest.mark.parametrize(("kind", "dtype", "options"), CASES, ids=str)
def test_state_is_what_numpy_makes_of_a_step_on_decoded_state(
    kind: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """With gradients that come late or never, zeros, 1e-18 and 1e12, NaN, infinities, and squares beyond float32; and
    without a generator of torch's."""
    made, hyper = KINDS[kind]
    opt, twin = pair(made, [{"params": parameters(dtype)}], **hyper, **options)
    before = torch.get_rng_state()
    hold(opt, twin)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(twin.columns) == {"lion": 5, "momentum": 5, "amsgrad": 15}.get(kind, 10)


@pytest.mark.parametrize(
    "values", [{"betas": [(0.9, beta) for beta in (0.999, 0.999, 0.9, 0.9, 0.999)]}, {"seed": (0, 0, 9, 9, 0)}], ids=str
)
def test_values_of_a_group_that_change_are_followed_in_the_same_columns(values: dict[str, Sequence[Any]]) -> None:
    opt, twin = pair(PagedAdamW, [{"params": parameters()}], lr=1e-2)
    hold(opt, twin, 1, **values)
    entry = opt.state[opt.param_groups[0]["params"][0]]
    address = entry["exp_avg_sq.root4"].data_ptr()
    hold(opt, twin, 5, **values)
    assert entry["exp_avg_sq.root4"].data_ptr() == address


@pagedopt.rule(moments={"exp_avg_sq": pagedopt.Moment(signed=False, decay="beta2")})
def squares(param, grad, exp_avg_sq, *, lr, beta2):  # type: ignore[no-untyped-def]
    """A mean of squares without bias correction."""
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    param = param - lr * grad * exp_avg_sq
    return param, exp_avg_sq


class Squares(PagedOptimizer):
    """Its state counts steps, of which its rule knows nothing."""

    rule = squares

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas}, **options)


def test_a_rule_that_takes_no_step_is_rounded_by_each_parameter_s_own_count() -> None:
    opt, twin = pair(Squares, [{"params": parameters()[:5]}], seed=1)
    hold(opt, twin, wild=False)
    assert sorted({float(entry["step"]) for entry in opt.state.values()}) == [2, 5, 6, 8]


def test_what_is_not_finite_is_where_torch_has_it() -> None:
    """A gradient whose square is infinite holds its parameter still, apart from decay, and later gradients, too."""
    p, q = (torch.nn.Parameter(torch.ones(4096)) for _ in range(2))
    ours = PagedAdamW([p], lr=0.1, weight_decay=0, state_format="int8")
    theirs = torch.optim.AdamW([q], lr=0.1, weight_decay=0)
    for number in range(3):
        for each in (p, q):
            each.grad = torch.ones(4096)
            if number == 0:
                each.grad[:3] = torch.tensor([torch.nan, 1e25, -torch.inf])
        ours.step()
        theirs.step()
        assert torch.equal(p.isnan(), q.isnan())
        assert p[1] == q[1] == 1
    assert (p[256:] < 0.8).all(), "other blocks go on"
    decoded = ours.decoded_state_dict()["state"][0]
    assert decoded["exp_avg"].isfinite().tolist()[:4] == [False, True, False, True]
    assert decoded["exp_avg_sq"].isfinite().tolist()[:4] == [False, False, False, True]


#: Of each group what is its own, and what holds for the others: an embedding in float32, groups that round otherwise or
#: by another seed; and one that alone is in int8.
OWNS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    (
        [{}, {"state_format": "float32", "lr": 3e-3}, {"rounding": "nearest"}, {"seed": 8}],
        {"seed": 6, **PLACES["part"]},
    ),
    ([{"state_format": "8bit", "seed": 5}, {}], {"state_format": "float32"}),
]


@pytest.mark.parametrize(("owns", "options"), OWNS, ids=["some of their own", "one alone"])
def test_a_group_has_its_own_format_rounding_and_seed(owns: list[dict[str, Any]], options: dict[str, Any]) -> None:
    params = [parameters()[i] for i in (0, 1, 3, 4)]
    groups = [{"params": [p], **own} for p, own in zip(params, owns, strict=False)]
    hold(*pair(PagedAdamW, groups, lr=1e-2, **options))


@pytest.mark.parametrize("place", ["resident", "file"])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_small_parameters_stay_in_float32_and_an_estimate_knows(rule: str, place: str) -> None:
    """In the optimizer, in its report and in ``estimate``, per group, too."""
    kind, states = {"adamw": (PagedAdamW, 2), "lion": (PagedLion, 1)}[rule]
    params = [p for p in parameters(BF16 if rule == "lion" else F32) if p.numel()]
    groups = [{"params": params[1:]}, {"params": params[:1], "state_format": "float32"}]
    for model, own in ((params, 0), (groups, 1)):
        said = pagedopt.estimate(model, rule=rule, state_format="int8", **PLACES[place])
        opt = kind([dict(g) for g in groups] if own else params, state_format="int8", **PLACES[place])
        give(params, 0, late=False)
        opt.step()
        assert dict(said.by_place) == dict(opt.memory_report().by_place)
        wide = [p.numel() < 4096 or (own == 1 and p is params[0]) for p in params]
        sizes = [
            4 * p.numel() if w else p.numel() + 4 * -(-p.numel() // 256) for p, w in zip(params, wide, strict=True)
        ]
        if place == "resident":
            assert said.state_bytes == states * sum(sizes)
        assert all(("exp_avg" in opt.state[p]) is w for p, w in zip(params, wide, strict=True))


def test_an_estimate_of_shapes_knows_small_ones() -> None:
    assert pagedopt.estimate([(4095,), (4096,)], state_format="int8").state_bytes == 2 * (4 * 4095 + 4096 + 4 * 16)
    assert pagedopt.estimate("7B", state_format="8bit").state_bytes == 2 * (7_000_000_000 + 4 * 27_343_750)


def test_one_state_may_be_in_int8_and_another_in_float32() -> None:
    formats: Any = {"exp_avg": "int8", "exp_avg_sq": "float32"}
    assert pagedopt.estimate([(4096,)], state_format=formats).state_bytes == 4096 + 64 + 4 * 4096
    (p, *_) = parameters()
    opt = PagedAdamW([p], state_format=formats)
    names = [opt.format_of(name, p, opt.param_groups[0]).name for name in ("exp_avg", "exp_avg_sq")]
    assert names == ["int8, root 3, stochastic by step", "float32"]


def test_parameters_that_join_later_change_no_draw_of_the_others() -> None:
    both = [parameters()[:2] for _ in range(2)]
    alone, joined = (PagedAdamW(params, lr=1e-2, state_format="int8") for params in both)
    for number in range(3):
        if number == 1:
            joined.add_param_group({"params": [torch.nn.Parameter(torch.ones(5000))]})
        for params, opt in zip(both, (alone, joined), strict=True):
            train(opt, params, range(number, number + 1))
    assert same(bits(alone, both[0]), bits(joined, both[1]))


@pytest.mark.parametrize(
    "options", [{"param_rounding": "stochastic"}, {"param_format": "bfloat16+8", "state_format": "int8"}], ids=str
)
def test_the_number_of_threads_changes_no_bit(options: dict[str, Any]) -> None:
    results = []
    for count in (1, 5):
        with threads(count):
            params = parameters(BF16)
            opt = PagedAdamW(params, lr=1e-2, **options, **PLACES["part"])
            train(opt, params, range(3))
            results.append(bits(opt, params))
    assert same(*results)
