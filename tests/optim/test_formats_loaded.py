"""State saved in one format is loaded into any other, rounded once; and from memory that the load overwrites."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import int8_oracle as oracle
import pytest
import torch
from int8_support import flat, same
from int8_training import PLACES
from often import long_but
from optim_support import through_file

from pagedopt import PagedAdamW
from tests.outside.format import Int8Blocks

pytestmark = pytest.mark.usefixtures("folder")
NAMES = ("exp_avg", "exp_avg_sq")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FORMATS = [*DTYPES, "int8"]
ROOTS = {"exp_avg": 3, "exp_avg_sq": 4}


def encoded(values: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """The columns that NumPy makes of float32, the codes with the same strides."""
    root = ROOTS[name]
    codes, absmax = map(torch.from_numpy, oracle.encode(root, flat(values).numpy()))
    return {f"{name}.root{root}": codes.as_strided(values.shape, values.stride()), f"{name}.absmax": absmax}


def decoded(columns: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    codes, absmax = columns.values()
    values = torch.from_numpy(oracle.decode(ROOTS[name], flat(codes).numpy(), absmax.numpy()))
    return values.as_strided(codes.shape, codes.stride())


def moments(seed: int, shape: tuple[int, int], transposed: bool) -> dict[str, torch.Tensor]:
    """Of some rows 100 times as large as of others; where they can be 0 or infinite in 16 bits, they are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 3, shape[0]).view(-1, 1)
    made = [torch.randn(shape, generator=generator) * sizes, torch.rand(shape, generator=generator) * sizes**2]
    return {name: t.t().contiguous().t() if transposed else t for name, t in zip(NAMES, made, strict=True)}


def into(values: torch.Tensor, name: str, target: str, large: bool, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a format makes of float32 or wider, for a parameter with the strides of ``like``."""
    if target == "int8" and large:
        return encoded(torch.empty_like(like, dtype=torch.float32).copy_(values), name)
    return {name: values.to(DTYPES.get(target, torch.float32))}


def is_often(case: tuple[str, Any, str, str]) -> bool:
    saved, own, param, place = case
    if place == "file":
        return "int8" in (saved, own) and param == "float32" and own is not None
    return param == "float32" or (saved == "int8" and own is None)


CASES = [
    case
    for case in itertools.product(FORMATS, [None, *FORMATS], DTYPES, ["resident", "file"])
    if case[1] != "float16" or case[2] == "float16"  # else refused for squares: test_squares_in_float16.py
]


@pytest.mark.parametrize("case", long_but(CASES, is_often), ids=str)
def test_each_format_loads_each_other_rounded_once(case: tuple[str, Any, str, str]) -> None:
    """Into new state and into that; in equal strides and in others; state of the third is too small for int8."""
    saved, own, param, place = case
    if own is None and saved == "float64" and param == "float32":
        return  # refused, and tested elsewhere: nobody has asked for the rounding
    params, state, want = [], {}, []
    for i, (shape, strides, others) in enumerate((((70, 90), 1, 1), ((90, 70), 0, 1), ((20, 30), 1, 0))):
        large = shape[0] * shape[1] >= 4096
        params.append(torch.nn.Parameter(moments(0, shape, bool(others))["exp_avg"].to(DTYPES[param])))
        state[i], expected = {"step": torch.tensor(3.0)}, {}
        for name, values in moments(i, shape, bool(strides)).items():
            columns = into(values, name, saved, large, values)
            exact = decoded(columns, name) if len(columns) == 2 else columns[name]
            state[i] |= columns
            expected |= into(exact, name, own or param, large, params[-1].detach())
            if own == saved == "int8" and strides == others:
                assert same([*expected.values()][-len(columns) :], [*columns.values()]), "NumPy gives the bits back"
        want.append(expected)
    opt = PagedAdamW(params, state_format=own, **PLACES[place])
    for loaded in (through_file({**opt.state_dict(), "state": state}), {**opt.state_dict(), "state": state}):
        opt.load_state_dict(loaded)
        for p, expected in zip(params, want, strict=True):
            assert list(opt.state[p]) == ["step", *expected]
            assert same([flat(opt.state[p][key]) for key in expected], [*map(flat_of(p), expected.values())])


def flat_of(p: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The elements in the order of memory of a parameter; of what has another shape as they are."""
    return lambda t: flat(torch.empty_like(p, dtype=t.dtype, requires_grad=False).copy_(t)) if t.shape == p.shape else t


def test_what_cannot_be_read_is_still_refused_in_words() -> None:
    p = torch.nn.Parameter(torch.ones(70, 90))
    opt = PagedAdamW([p], state_format=Int8Blocks())
    opt.load_state_dict({**opt.state_dict(), "state": {0: {"step": 1, **moments(0, (70, 90), False)}}})
    for other in (None, "bfloat16", "int8"):
        fresh = PagedAdamW([p], state_format=other)
        with pytest.raises(ValueError, match=r"parameter 0 has no exp_avg.*another state_format.*decoded_state_dict"):
            fresh.load_state_dict(opt.state_dict())
        assert not fresh.state
        fresh.load_state_dict(opt.decoded_state_dict())
    columns = {
        key: t for name, values in moments(0, (70, 90), False).items() for key, t in encoded(values, name).items()
    }
    opt.load_state_dict({**opt.state_dict(), "state": {0: {"step": 1, **columns}}})
    fresh, saved = PagedAdamW([p]), opt.state_dict()
    for harm, text in (
        (
            {"exp_avg_sq.absmax": torch.ones(7)},
            r"exp_avg_sq\.absmax of .* has shape \(7,\), format 'int8, root 4",
        ),
        ({"exp_avg.absmax": None}, r"parameter 0 has no exp_avg; it has step, exp_avg\.root3, "),
        ({"exp_avg.root3": torch.ones(70, 90)}, r"exp_avg\.root3 of parameter 0 is torch\.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            fresh.load_state_dict({**saved, "state": {0: {"step": 1, **columns, **harm}}})
        assert not fresh.state


def test_torch_s_optimizer_says_the_key_that_our_page_names() -> None:
    """It loads codes without a word, and raises in its step; it loads and uses what is decoded."""
    assert "``KeyError: 'exp_avg'``" in str(PagedAdamW.state_dict.__doc__)
    p = torch.nn.Parameter(torch.ones(70, 90))
    opt, theirs = PagedAdamW([p], state_format="int8"), torch.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    opt.load_state_dict({**opt.state_dict(), "state": {0: {"step": 1, **moments(0, (70, 90), False)}}})
    theirs.load_state_dict(opt.state_dict())
    with pytest.raises(KeyError, match="'exp_avg'"):
        theirs.step()
    theirs.load_state_dict(opt.decoded_state_dict())
    theirs.step()


def world() -> tuple[PagedAdamW, list[torch.nn.Parameter]]:
    """Squares with state in int8, float32 and bfloat16, and two rows that fit into one of a square's."""
    shapes = [(70, 70)] * 6 + [(10,), (10,)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    kinds = ("int8", "int8", "int8", "float32", "float32", "bfloat16", "float32", "bfloat16")
    groups = [{"params": [p], "state_format": kind} for p, kind in zip(params, kinds, strict=True)]
    opt = PagedAdamW(groups, **PLACES["resident"])
    state = {}
    for i, p in enumerate(params):
        values = moments(i, (70, 70), bool(i % 2))
        state[i] = {
            "step": torch.tensor(float(i)),
            **{name: t.reshape(-1)[: p.numel()].view(p.shape) for name, t in values.items()},
        }
    opt.load_state_dict({**opt.state_dict(), "state": state})
    return opt, params


#: How a value may be taken from live state; of a matrix.
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t, lambda t: t, lambda t: t.detach().view(t.shape), torch.t,
    lambda t: torch.from_numpy(t.numpy()) if t.dtype is not torch.bfloat16 else t[:],
]  # fmt: skip


def taken(entry: dict[str, Any], chance: random.Random, row: bool) -> dict[str, Any]:
    """An entry of views of another; a row of one that has no blocks, also beginning amid its memory."""
    if not row:
        view = chance.choice(VIEWS)
        return {key: view(t) if t.dim() == 2 else t for key, t in entry.items()}
    at = chance.randrange(70)
    rows = {key: torch.from_numpy(t.numpy()) if t.dtype is torch.float32 and at % 2 else t for key, t in entry.items()}
    return {key: t[at][at % 60 : at % 60 + 10] if t.dim() == 2 else t for key, t in rows.items()}


@pytest.mark.parametrize("seed", long_but(range(40), lambda seed: seed < 8))
def test_live_state_may_be_loaded_in_any_permutation(seed: int) -> None:
    """As if the dict had been copied before: codes into floats, floats into codes, transposed, in parts."""
    chance = random.Random(seed)
    opt, params = world()
    twin, twins = copy.deepcopy((opt, params))
    saved = opt.state_dict()
    order = chance.sample(range(6), 6)
    state = {i: taken(saved["state"][j], chance, row=False) for i, j in enumerate(order)}
    state |= {i: taken(saved["state"][chance.choice([3, 4, 5])], chance, row=True) for i in (6, 7)}
    given = {**saved, "state": dict(chance.sample(sorted(state.items()), 8))}
    twin.load_state_dict(copy.deepcopy(given))
    opt.load_state_dict(given)
    for p, q in zip(params, twins, strict=True):
        assert list(opt.state[p]) == list(twin.state[q])
        assert same([*opt.state[p].values()], [*twin.state[q].values()])


@pytest.mark.parametrize(
    ("before", "after", "there"), [("int8", "float32", "exp_avg.root3"), (None, "int8", "exp_avg")]
)
def test_a_format_that_changes_between_steps_is_named_and_a_load_follows_it(
    before: str | None, after: str, there: str
) -> None:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 5000))
    opt = PagedAdamW([{"params": [p], "state_format": before}])
    for step in range(2):
        p.grad = torch.linspace(step, 1, 5000)
        opt.step()
    opt.param_groups[0]["state_format"] = after
    with pytest.raises(
        KeyError, match=rf"is stored as '{re.escape(there)}', in another state_format; optimizer\.load_"
    ):
        opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert there not in opt.state[p]
