"""Formats from outside, of one column and of two, through all that an optimizer's state goes through.

``tests/kernels/test_kernels_formats.py`` plays the threads of their CUDA text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import DEVICES
from optim_support import bits, same

import pagedopt
from pagedopt import PagedAdamW
from tests.acts import GROUPS, add_group
from tests.loads import MOVES
from tests.specs import BF16, CASES, F32, F64
from tests.world import Params, Side, World, Worlds, numbers, one_group

from .element_format import Fixed16
from .format import BLOCK, Int8Blocks
from .rule import Tempered

INT8, FIXED = Int8Blocks(), {"exp_avg": Fixed16(), "exp_avg_sq": "float32"}
MIXED = {"exp_avg": INT8, "exp_avg_sq": "bfloat16"}
#: The largest has several pages, whose scales share a granule.
LARGE = {"cpu": 200_003, "cuda": 9_000_003}
SHAPES = {d: ((90, 257), (64,), (65,), (), (0,), (3, 700), (n,), (63,)) for d, n in LARGE.items()}
#: Bytes of one moment: a code each, and a scale for each block.
MOMENT = {d: sum(n + 4 * -(-n // BLOCK) for n in (torch.Size(s).numel() for s in SHAPES[d])) for d in SHAPES}
PLACES: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "resident": {},
        "file": {"placement": "file", "device_budget": 0},
        "half": {"placement": "file", "device_budget": MOMENT["cpu"]},
        "all": {"placement": "file", "device_budget": "1GiB"},
    },
    "cuda": {
        "resident": {},
        "mapped": {"device_budget": 0},
        "half": {"device_budget": MOMENT["cuda"]},
        "in place": {"device_budget": 0, "host_access": "in_place"},
        "managed": {"placement": "managed", "device_budget": 0},
        "driver": {"placement": "managed-driver"},
        "host": {"placement": "host"},
        "struct": {"transport": "struct"},
        "few blocks": {"blocks": 3},
    },
}


def tensors(device: str) -> list[torch.Tensor]:
    """Those of two dimensions lie in memory column by column."""
    made = [numbers(shape, i, device) for i, shape in enumerate(SHAPES[device])]
    return [p.t().contiguous().t() if p.dim() == 2 else p for p in made]


def parameters(dtype: torch.dtype = F32) -> Params:
    return [torch.nn.Parameter(t.to(dtype)) for t in tensors("cpu")]


def zeros_and_none(world: World) -> None:
    """One parameter in turn has no gradient, and some gradients have blocks of zeros."""
    for i, p in enumerate(world.params):
        if world.count and i == world.count % 8:
            p.grad = None
        elif p.dim() == 1:
            p.grad[64:200] = 0  # type: ignore[index]


def put(world: World) -> None:
    """Another tensor, and other values."""
    for name in world.moments(world.params[6])[:1]:
        world.state[world.params[6]][name] = world.state[world.params[6]][name].clone().fill_(3)
    for name in world.moments(world.params[0])[-1:]:
        world.state[world.params[0]][name].mul_(2)


ACTS: dict[str, Callable[[World], Any]] = {
    **{name: MOVES[name] for name in ("deepcopy", "pickle", "a new one", "a new one by a file", "spill", "unspill")},
    "half": lambda world: (
        world.side.options.get("device_budget") is None  # type: ignore[union-attr]
        or world.optimizer.set_device_budget("50%")
    ),
    "what the user puts": put,
    "a late one": add_group,
    "another late one": GROUPS["append"],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [("adamw", INT8, F32), ("lion", INT8, F32), ("adamw", FIXED, F32), ("adamw", MIXED, BF16)],
    ids=["adamw", "lion", "fixed", "mixed"],
)  # fmt: skip
def test_no_place_and_no_act_changes_a_bit(name: str, form: Any, dtype: torch.dtype, device: str) -> None:
    sides = [Side(place, {"state_format": form, **how}) for place, how in PLACES[device].items()]
    make = lambda device: [t.to(dtype) for t in tensors(device)]  # noqa: E731
    worlds = Worlds(CASES[name], *sides, make=make, groups=one_group, device=device).step(4, zeros_and_none)
    for act, do in ACTS.items():
        assert not worlds.do(do, act).step(2, zeros_and_none).over


EXACT: dict[str, float] = {"rtol": 0, "atol": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [("adamw", INT8, F32), ("lion", INT8, F32), *(("adamw", FIXED, dtype) for dtype in (F32, F64, BF16))],
    ids=["adamw", "lion", "fixed", "fixed-float64", "fixed-bfloat16"],
)
def test_a_step_is_that_of_decoded_state_and_stores_what_encode_makes_of_it(
    name: str, form: Any, dtype: torch.dtype, device: str
) -> None:
    """Until it is stored, state is as exact as float32.

    On a GPU torch divides by a number as it multiplies by its reciprocal: ``encode`` may be an ulp or a code away.
    """
    opt, twin = (
        World(CASES[name], Side("", how), device, make=lambda d: [t.to(dtype) for t in tensors(d)], groups=one_group)
        for how in ({"state_format": form}, {"state_format": "float32"})
    )
    for _ in range(5):
        if opt.count:
            for p, q in zip(opt.params, twin.params, strict=True):
                q.data.copy_(p)
            twin.optimizer.load_state_dict(opt.optimizer.decoded_state_dict())
        for world in (opt, twin):
            assert world.step(zeros_and_none) is None
        for p, q in zip(opt.params, twin.params, strict=True):
            assert torch.equal(p, q)
            for key in twin.moments(q):
                kind = form[key] if isinstance(form, dict) else form
                value = twin.state[q][key]
                if kind != "float32":
                    flat = (value.t() if value.dim() == 2 else value).reshape(-1)  # in the order of memory
                    for column, want in zip(kind.columns, kind.encode(flat), strict=True):
                        got = opt.state[p][f"{key}.{column.name}" if column.name else key]
                        got = (got.t() if got.dim() == 2 else got).reshape(-1)
                        near = {"rtol": 1e-6, "atol": float(not got.is_floating_point())} if device == "cuda" else EXACT
                        torch.testing.assert_close(got, want, **near)


def test_numbers_that_it_cannot_store_are_cut_off() -> None:
    p = torch.nn.Parameter(torch.zeros(4))
    opt = PagedAdamW([p], state_format=FIXED)
    p.grad = torch.tensor([1.0, 50.0, -50.0, 0.0])
    opt.step()
    assert opt.state[p]["exp_avg"].tolist() == [round(0.1 * 32768), 32767, -32767, 0]


def test_what_an_estimate_says_is_what_a_report_says() -> None:
    for options in PLACES["cpu"].values():
        report = run(**options)[0].memory_report()
        plan = pagedopt.estimate(parameters(), state_format=INT8, **options)
        assert dict(plan.by_place) == dict(report.by_place), options
    assert pagedopt.estimate(parameters(), state_format=INT8).state_bytes == 2 * MOMENT["cpu"]
    assert pagedopt.estimate("7B", state_format=INT8).state_bytes == 2 * (7_000_000_000 + 4 * 109_375_000)


def run(**options: Any) -> tuple[PagedAdamW, Params]:
    params = parameters()
    opt = PagedAdamW(params, state_format=INT8, **options)
    for p in params:
        p.grad = torch.sin(p.detach() * 9)
    opt.step()
    return opt, params


def test_state_of_torch_is_encoded_and_torch_takes_what_is_decoded() -> None:
    theirs = torch.optim.AdamW(params := parameters())
    for p in params:
        p.grad = torch.sin(p.detach() * 9)
    theirs.step()
    opt, back = PagedAdamW(params, state_format=INT8), torch.optim.AdamW(params)
    opt.load_state_dict(theirs.state_dict())
    back.load_state_dict(opt.decoded_state_dict())
    back.step()
    decoded = opt.decoded_state_dict()["state"]
    for i, p in enumerate(params):
        for key in ("exp_avg", "exp_avg_sq"):
            assert (decoded[i][key].shape, decoded[i][key].stride()) == (p.shape, p.stride())
            limit = 0.5001 * float(opt.state[p][f"{key}.scale"].max()) if p.numel() else 0
            torch.testing.assert_close(decoded[i][key], theirs.state_dict()["state"][i][key], rtol=0, atol=limit)


def test_columns_say_of_which_format_they_are() -> None:
    opt, params = run()
    plain = PagedAdamW(params)
    with pytest.raises(ValueError, match=r"parameter 0 has no exp_avg, .*another state_format.*decoded_state_dict"):
        plain.load_state_dict(opt.state_dict())
    assert not plain.state
    saved, want = copy.deepcopy(opt.state_dict()), bits(params, opt)
    saved["state"][0]["exp_avg.scale"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"loaded exp_avg.scale of parameter 0 has shape \(3,\)"):
        opt.load_state_dict(saved)
    assert same(bits(params, opt), want)


@pytest.mark.parametrize("place", ["resident", "file"])
@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (lambda entry: entry.update({"exp_avg.codes": entry["exp_avg.codes"].float()}), RuntimeError, "torch.float32"),
        (lambda entry: entry.update({"exp_avg.codes": entry["exp_avg.codes"][:-1]}), RuntimeError, "the parameter has"),
        (lambda entry: entry.pop("exp_avg.scale"), KeyError, r"exp_avg\.scale"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(edit: Any, error: type[Exception], text: str, place: str) -> None:
    opt, params = run(**PLACES["cpu"][place])
    edit(opt.state[params[6]])
    with pytest.raises(error, match=text):
        opt.step()


@pytest.mark.parametrize("place", ["resident", "file"])
def test_state_that_begins_at_one_begins_there_in_blocks_too(place: str) -> None:
    opt = Tempered(params := parameters(), decay=0.8, state_format=INT8, **PLACES["cpu"][place])
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()
    for entry in opt.state.values():
        assert (entry["scale.codes"] == 127).all()
        torch.testing.assert_close(entry["scale.scale"], torch.full_like(entry["scale.scale"], 0.4 / 127))


class Offset(Int8Blocks):
    """Its codes begin at 3."""

    def decode(self, *columns: torch.Tensor, numel: int) -> torch.Tensor:
        """The codes alone."""
        return columns[0].float() + 3


def test_what_cannot_be_is_refused_when_an_optimizer_is_made() -> None:
    with pytest.raises(ValueError, match=r"zeros in all columns are decoded as 3\.0"):
        PagedAdamW(parameters(), state_format={"exp_avg": Offset()})
    with pytest.raises(TypeError, match=r"give a name .* a pagedopt.formats.Format"):
        PagedAdamW(parameters(), state_format=Int8Blocks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no complex numbers of that kind"):
        PagedAdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))], state_format=INT8)
