"""Optimizers of parameters in 16 bits with nothing lost: what a step leaves, and what around it changes no bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sixteen_training import KINDS, OPTIONS, alike, bits, master, parameters, set_gradients, train, trained
from support import BF16, F16

from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD, estimate, rule


@pytest.mark.parametrize("kind", KINDS)
def test_16_more_bits_take_the_steps_of_float32(kind: str) -> None:
    """To the bit, state too, over steps that are looked at in C++ as well."""
    made, hyper = KINDS[kind]
    ours, wide = parameters(), [torch.nn.Parameter(p.detach().float()) for p in parameters()]
    opt, reference = made(ours, **hyper, param_format="bfloat16+16"), made(wide, **hyper)
    train(opt, ours, range(30))
    train(reference, wide, range(30))
    for p, w in zip(ours, wide, strict=True):
        assert torch.equal(master(opt, p), w)
        assert ((p - w).abs() <= w.abs() * 2**-8).all()
        for name, value in reference.state[w].items():
            assert torch.equal(opt.state[p][name], value), name
    assert opt.state[ours[0]]["param.low16"].count_nonzero() > 5000


@pytest.mark.parametrize("options", OPTIONS)
def test_another_seed_draws_otherwise(options: str) -> None:
    one, other = (bits(*trained(**OPTIONS[options], seed=seed)) for seed in (0, 9))
    assert alike(one, other) is (options == "+16")


def test_8_more_bits_and_chance_lose_no_mean() -> None:
    """Updates far below half of a parameter's last bit, in one direction: to nearest nothing moves."""
    moved, shares = dict[str, float](), dict[str, float]()
    for name, options in {"nearest": {}, **OPTIONS}.items():
        p = torch.nn.Parameter(torch.full((4096,), 1.0, dtype=BF16))
        opt = PagedLion([p], lr=1e-5, **options)
        for _ in range(200):
            p.grad = torch.ones_like(p)
            opt.step()
        now = master(opt, p) if "param_format" in options else p.detach()
        moved[name] = float((1 - now.double()).mean())
        shares[name] = float((now != 1).double().mean())
    assert moved.pop("nearest") == 0
    # A bit of 1/256 is 391 updates: of 200, each element has drawn for itself and anew.
    assert shares["stochastic"] == pytest.approx(1 - (1 - 256e-5) ** 200, abs=0.03)
    assert moved == {name: pytest.approx(200e-5, rel=0.08 if name == "stochastic" else 5e-3) for name in moved}


def test_the_draws_follow_float32s_arithmetic() -> None:
    """Over steps of 1e-7 of the weight: a mean that were off by 6 % would show."""
    numel, steps = 1 << 18, 640
    p, w = torch.nn.Parameter(torch.ones(numel, dtype=BF16)), torch.nn.Parameter(torch.ones(numel))
    for each, options in ((p, {"param_rounding": "stochastic"}), (w, {})):
        opt = PagedSGD([each], lr=1.2e-7, **options)  # 2 float32 ulps below 1
        each.grad = torch.ones_like(each)
        for _ in range(steps):
            opt.step()
    drift, noise = float(w.detach().double().mean() - 1), 2**-8 * (steps * 1.2e-7 / 2**-8) ** 0.5 / numel**0.5
    assert abs(float(p.detach().double().mean() - 1) - drift) < 4 * noise < 0.06 * abs(drift)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_estimate_is_what_a_report_says_and_what_tensors_take(options: str) -> None:
    opt, params = trained(**OPTIONS[options])
    plan, report = estimate(params, state_format=opt.state_format, param_format=opt.param_format), opt.memory_report()
    live = sum(t.nbytes for p in params for name, t in opt.state[p].items() if name != "step")
    assert plan.by_place == report.by_place == report.measured == {"host": live}
    assert plan.param_bytes == sum(p.nbytes for p in params)


def test_all_in_five_bytes_a_parameter() -> None:
    """As planned for 7 billion, and as there are in the file of a large parameter."""
    p = torch.nn.Parameter(torch.ones(1 << 20, dtype=BF16))
    opt = PagedAdamW([p], **OPTIONS["+8 int8"], device_budget=0)
    train(opt, [p], range(1))
    state = sum(t.nbytes for name, t in opt.state[p].items() if name != "step")
    plan = estimate("7B", param_dtype="bfloat16", **OPTIONS["+8 int8"], device_budget=0)
    for (param, away), numel in (
        ((plan.param_bytes, plan.away_bytes), plan.parameters),
        ((p.nbytes, state), p.numel()),
    ):
        assert param / numel == 2
        assert away / numel == pytest.approx(3.03, abs=0.005)
    assert state <= opt.memory_report().measured["file"] <= 1.04 * state  # pages are whole


def test_float16_is_rounded_at_random_and_takes_no_remainder() -> None:
    p = torch.nn.Parameter(torch.full((4096,), 1.0, dtype=F16))
    opt = PagedSGD([p], lr=1e-5, param_rounding="stochastic")
    for _ in range(100):
        p.grad = torch.ones_like(p)
        opt.step()
    assert float(p.detach().double().mean()) == pytest.approx(1 - 1e-3, abs=5e-5)
    with pytest.raises(
        ValueError, match=r"a parameter is float16, whose 5 bits of exponent.*param_rounding='stochastic'"
    ):
        PagedSGD([p], lr=1e-5, param_format="bfloat16+8")


def test_other_parameters_are_as_they_are() -> None:
    """Float32 parameters beside bfloat16 ones, as norms often are: the numbers and the state of before."""
    results = []
    for options in (OPTIONS["+16"], OPTIONS["stochastic"], {}):
        wide, sixteen = torch.nn.Parameter(torch.ones(100)), torch.nn.Parameter(torch.ones(100, dtype=BF16))
        opt = PagedAdamW([wide, sixteen], lr=1e-4, **options)
        train(opt, [wide, sixteen], range(5))
        results.append(bits(opt, [wide]))
    assert alike(results[0], results[1])
    assert alike(results[0], results[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"param_format": "float32"}, "param_format is 'float32'; there are 'bfloat16+16', 'bfloat16+8', or None"),
        ({"param_format": ["bfloat16+8"]}, "param_format is ['bfloat16+8']; there are"),
        ({"param_rounding": None}, "param_rounding is None; it must be 'nearest' or 'stochastic'"),
        (
            {"param_format": "bfloat16+8", "param_rounding": "stochastic"},
            "param_rounding is 'stochastic', and param_format is 'bfloat16+8': leave one of them out",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PagedAdamW(parameters(), **options)


def test_the_options_hold_for_good() -> None:
    opt, _ = trained()
    for name in ("param_format", "param_rounding"):
        with pytest.raises(AttributeError, match=f"property '{name}' of 'PagedAdamW' object has no setter"):
            setattr(opt, name, "bfloat16+16")


@rule
def named_alike(p, grad, param, *, lr):  # type: ignore[no-untyped-def]
    param = 0.9 * param + grad
    return p - lr * param, param


def test_a_state_may_be_called_param() -> None:
    class Named(PagedOptimizer):
        rule = named_alike

    p = torch.nn.Parameter(torch.ones(5))
    opt = Named([p], {"lr": 0.5})
    train(opt, [p], range(2))
    opt.load_state_dict(opt.decoded_state_dict())
    assert opt.state[p]["param"].any()
    with pytest.raises(ValueError, match="keeps in state 'param' what parameters have lost: the rule has a state of"):
        Named([p], {"lr": 0.5}, param_format="bfloat16+8")


# ---- DTensors ----

Placed = Callable[..., torch.nn.Parameter]


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes a parameter of this process's part: of rank 2 of 4, none of which is there."""
    tensors = pytest.importorskip("torch.distributed.tensor")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=2, world_size=4)
    mesh = init_device_mesh("cpu", (4,))

    def make(whole: torch.Tensor, placement: Any) -> torch.nn.Parameter:
        part = whole.chunk(4, placement.dim)[2].clone() if placement.is_shard() else whole.clone()
        made = tensors.DTensor.from_local(
            part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return torch.nn.Parameter(made)

    yield make
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("where", ["Shard(0)", "Replicate()", "Shard(1)"])
def test_shards_are_parts_of_the_whole(where: str, options: str, placed: Placed) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement = {"Shard(0)": Shard(0), "Replicate()": Replicate(), "Shard(1)": Shard(1)}[where]
    whole = parameters()[0].detach()[:, :77].contiguous()  # rows of an odd length
    if options == "+8 int8":
        with pytest.raises(
            ValueError, match=r"shards have formats of single elements only|random bits are of elements"
        ):
            PagedAdamW([placed(whole, placement)], **OPTIONS[options])
        return
    if where == "Shard(1)" and options != "+16":
        with pytest.raises(
            ValueError, match=r"random bits are of elements of the whole parameter.*'bfloat16\+16' takes"
        ):
            PagedAdamW([placed(whole, placement)], **OPTIONS[options])
        return
    p, q = placed(whole, placement), torch.nn.Parameter(whole)
    opts = [PagedAdamW([each], lr=1e-3, **OPTIONS[options]) for each in (p, q)]
    for step in range(3):
        set_gradients([q], step)
        p.grad = placed(q.grad, placement).detach()
        for opt in opts:
            opt.step()
    state, wanted = (opt.state[each] for opt, each in zip(opts, (p, q), strict=True))
    for name in ("param", *(name for name in wanted if name != "step")):
        mine, theirs = (p, q) if name == "param" else (state[name], wanted[name])
        assert isinstance(mine, DTensor)
        part = theirs.chunk(4, placement.dim)[2] if placement.is_shard() else theirs
        assert torch.equal(mine.to_local(), part), name
    masters = opts[0].master_state_dict({"p": p})
    opts[0].reset_master(p)
    opts[0].load_master(masters, {"p": p})
    whole = q.detach().float() if options == "stochastic" else master(opts[1], q)
    for mine in (masters["p"], opts[0].master(p)):
        assert isinstance(mine, DTensor)
        assert torch.equal(mine.to_local(), placed(whole, placement).to_local())  # type: ignore[attr-defined]
