"""Optimizers of parameters in 16 bits with nothing lost: what a step leaves, and what around it changes no bit."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from optim_support import through_file
from support import BF16, F16, F32

from pagedopt import PagedAdamW, PagedLion, PagedOptimizer, PagedSGD, estimate, rule
from pagedopt.formats.sixteen import SPLIT
from pagedopt.optim.registry import OPTIMIZERS
from pagedopt.system import warn

SHAPES = ((70, 80), (13,), (5000,), (0,), ())
KINDS: dict[str, tuple[type[PagedOptimizer], dict[str, Any]]] = {
    "AdamW": (PagedAdamW, {"lr": 1e-4, "weight_decay": 0.1}),
    "Lion": (PagedLion, {"lr": 1e-5}),
    "SGD": (PagedSGD, {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5}),
    "plain SGD": (PagedSGD, {"lr": 1e-3}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "stochastic": {"param_rounding": "stochastic"},
    "+16": {"param_format": "bfloat16+16"},
    "+8": {"param_format": "bfloat16+8"},
    "+8 int8": {"param_format": "bfloat16+8", "state_format": "int8"},
}
Params = list[torch.nn.Parameter]


def parameters(dtype: torch.dtype = BF16) -> Params:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)) for shape in SHAPES]


def set_gradients(params: Params, step: int) -> None:
    """The same for parameters of any dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def train(opt: torch.optim.Optimizer, params: Params, steps: Sequence[int] | range) -> None:
    for step in steps:
        set_gradients(params, step)
        opt.step()


def bits(opt: torch.optim.Optimizer, params: Params) -> list[torch.Tensor]:
    """Parameters and all their state."""
    return [t.detach().clone() for p in params for t in (p, *opt.state[p].values())]


def alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def master(opt: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor:
    (form,) = [form for form in SPLIT.values() if form.columns[1].key("param") in opt.state[p]]
    lost = opt.state[p][form.columns[1].key("param")]
    return form.decode(p.detach().reshape(-1), lost.reshape(-1), numel=p.numel()).view(p.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_16_more_bits_take_the_steps_of_float32(kind: str) -> None:
    """To the bit, state too, over steps that are looked at in C++ as well; of torch's class within a few roundings."""
    made, hyper = KINDS[kind]
    ours, wide = parameters(), parameters()
    wide = [torch.nn.Parameter(p.detach().float()) for p in wide]
    opt, reference = made(ours, **hyper, param_format="bfloat16+16"), made(wide, **hyper)
    train(opt, ours, range(30))
    train(reference, wide, range(30))
    theirs = [torch.nn.Parameter(p.detach().float()) for p in parameters()]
    torchs: Any = next(entry.torch for entry in OPTIMIZERS if entry.optimizer is made)
    if torchs:
        train(torchs(theirs, **hyper), theirs, range(30))
    for p, w, t in zip(ours, wide, theirs, strict=True):
        assert torch.equal(master(opt, p), w)
        if torchs:
            torch.testing.assert_close(w, t, rtol=1e-5, atol=1e-7)
        assert ((p - w).abs() <= w.abs() * 2**-8).all()
        for name, value in reference.state[w].items():
            assert torch.equal(opt.state[p][name], value), name
    assert opt.state[ours[0]]["param.low16"].count_nonzero() > 5000


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
    """Over 10,000 steps of 1e-7 of the weight: a mean that were off by 6 % would show."""
    numel, steps = 1 << 14, 10_000
    p, w = torch.nn.Parameter(torch.ones(numel, dtype=BF16)), torch.nn.Parameter(torch.ones(numel))
    for each, options in ((p, {"param_rounding": "stochastic"}), (w, {})):
        opt = PagedSGD([each], lr=1.2e-7, **options)  # 2 float32 ulps below 1
        each.grad = torch.ones_like(each)
        for _ in range(steps):
            opt.step()
    drift, noise = float(w.detach().double().mean() - 1), 2**-8 * (steps * 1.2e-7 / 2**-8) ** 0.5 / numel**0.5
    assert abs(float(p.detach().double().mean() - 1) - drift) < 4 * noise < 0.06 * abs(drift)


PLACES: dict[str, dict[str, Any]] = {
    "resident": {}, "away": {"device_budget": 0}, "half": {"device_budget": 0.5}, "preallocated": {"preallocate": True},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["AdamW", "Lion"])
def test_place_replica_and_resume_change_no_bit(kind: str, options: str) -> None:
    made, hyper = KINDS[kind]

    def fresh(**more: Any) -> tuple[Any, Params]:
        params = parameters()
        return made(params, **hyper, **{**OPTIONS[options], **more}), params

    results = []
    for place in PLACES.values():
        opt, params = fresh(**place)
        train(opt, params, range(8))
        results.append(bits(opt, params))
    opt, params = fresh()
    train(opt, params, range(4))
    again, resumed = fresh(seed=9, device_budget=0)  # the seed is that of the checkpoint
    saved = through_file({"params": params, "state": opt.state_dict()})
    for p, q in zip(resumed, saved["params"], strict=True):
        p.data.copy_(q)
    again.load_state_dict(saved["state"])
    twin, copies = copy.deepcopy((opt, params))
    for each, its in ((again, resumed), (twin, copies)):
        train(each, its, range(4, 8))
        results.append(bits(each, its))
    assert all(alike(results[0], other) for other in results[1:])
    other, its = fresh(seed=9)
    train(other, its, range(8))
    assert alike(results[0], bits(other, its)) is (options == "+16")


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("options", ["stochastic", "+8 int8"])
def test_a_hidden_update_changes_no_bit(overlap: str, options: str) -> None:
    """And is no write of somebody else's."""
    results = []
    for attached in (None, overlap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)).bfloat16()
        opt = PagedAdamW(model.parameters(), lr=1e-3, device_budget=0, **OPTIONS[options])
        if attached:
            opt.attach(model, overlap=attached)
        for step in range(5):
            model(torch.full((4, 64), 0.1 * step, dtype=BF16)).square().mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                opt.step()
            opt.zero_grad()
        opt.wait()
        results.append(bits(opt, [*model.parameters()]))
    assert alike(*results)


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


# ---- checkpoints ----


def trained(**options: Any) -> tuple[PagedAdamW, Params]:
    params = parameters()
    opt = PagedAdamW(params, **KINDS["AdamW"][1], **options)
    train(opt, params, range(3))
    return opt, params


def loaded(saved: dict[str, Any], params: Params, **options: Any) -> PagedAdamW:
    opt = PagedAdamW(params, **options)
    opt.load_state_dict(saved)
    return opt


def test_a_remainder_is_loaded_into_the_other_format() -> None:
    opt, params = trained(param_format="bfloat16+16")
    exact = [master(opt, p) for p in params]
    narrow = loaded(opt.state_dict(), params, param_format="bfloat16+8")
    for p, want in zip(params, exact, strict=True):
        assert ((master(narrow, p) - want).abs() <= want.abs() * 2**-15).all()
    coarse = [master(narrow, p) for p in params]
    wide = loaded(narrow.state_dict(), params, param_format="bfloat16+16")
    assert alike([master(wide, p) for p in params], coarse)


def test_state_that_was_saved_without_a_remainder_has_lost_nothing_so_far() -> None:
    opt, params = trained(state_format="float32")
    kept, _ = trained(param_format="bfloat16+16")
    kept.load_state_dict(opt.state_dict())  # over a remainder that is there
    for each, its in (
        (loaded(opt.state_dict(), params, param_format="bfloat16+16"), params),
        (kept, kept.param_groups[0]["params"]),
    ):
        assert not any(each.state[p]["param.low16"].any() for p in its)


def test_a_remainder_is_not_dropped_in_silence() -> None:
    opt, params = trained(param_format="bfloat16+8")
    with pytest.raises(ValueError, match=r"has param\.low8.*param_format='bfloat16\+8', or load decoded_state_dict"):
        loaded(opt.state_dict(), params)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(opt.decoded_state_dict())
    assert set(theirs.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    loaded(opt.decoded_state_dict(), params)
    for p in params:
        p.data = p.data.float()
    with pytest.raises(ValueError, match=r"Here it is torch.float32 with param_format='bfloat16\+8', and keeps none"):
        opt.load_state_dict(opt.state_dict())
    opt.load_state_dict(opt.decoded_state_dict())


@pytest.mark.parametrize("kind", ["Lion", "SGD"])
def test_state_without_a_count_goes_on_as_it_would(kind: str) -> None:
    """Torch's SGD counts no steps: with a momentum that is there, the next step is not the first."""
    made, hyper = KINDS[kind]
    params = parameters()
    before = made(params, **hyper, state_format="float32")
    train(before, params, range(3))
    opt = made(params, **hyper, param_format="bfloat16+16")
    opt.load_state_dict(before.state_dict())
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    reference = made(wide, **hyper)
    reference.load_state_dict(before.state_dict())
    train(opt, params, range(3, 6))
    train(reference, wide, range(3, 6))
    assert all(torch.equal(master(opt, p), w) for p, w in zip(params, wide, strict=True))


def test_a_model_that_is_cast_between_steps_begins_to_keep_what_it_loses() -> None:
    params = parameters(F32)
    opt = PagedAdamW(params, lr=1e-4, param_format="bfloat16+16")
    train(opt, params, range(2))
    assert "param.low16" not in opt.state[params[0]]
    for p in params:
        p.data = p.data.bfloat16()
    train(opt, params, range(2, 4))
    assert opt.state[params[0]]["param.low16"].any()


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


# ---- masters ----


def test_masters_go_out_and_in() -> None:
    opt, params = trained(param_format="bfloat16+16")
    named = {f"p{i}": p for i, p in enumerate(params)} | {"frozen": torch.ones(3, dtype=BF16)}
    masters = opt.master_state_dict(named)
    assert {t.dtype for t in masters.values()} == {F32}
    for name, p in list(named.items())[:-1]:
        assert torch.equal(opt.master(p), master(opt, p))
        assert torch.equal(masters[name], master(opt, p))
    assert torch.equal(masters.pop("frozen"), torch.ones(3))
    fresh = parameters()
    other = PagedAdamW(fresh, **KINDS["AdamW"][1], param_format="bfloat16+16", device_budget=0)
    other.load_master(masters, {f"p{i}": p for i, p in enumerate(fresh)})  # before the first step
    saved = through_file(other.state_dict())
    again = loaded(saved, [torch.nn.Parameter(p.detach().clone()) for p in fresh], param_format="bfloat16+16")
    assert alike([other.master(p) for p in fresh], list(masters.values()))
    assert alike([again.master(p) for p in again.param_groups[0]["params"]], list(masters.values()))
    wide = [torch.nn.Parameter(t.clone()) for t in masters.values()]
    reference = PagedAdamW(wide, **KINDS["AdamW"][1])
    train(other, fresh, range(3))
    train(reference, wide, range(3))
    assert alike([other.master(p) for p in fresh], [w.detach() for w in wide])
    other.reset_master(fresh[0])
    assert torch.equal(other.master(fresh[0]), fresh[0].float())
    other.load_master({"p0": masters["p0"]}, {"p0": fresh[0]})  # over what is there
    assert torch.equal(other.master(fresh[0]), masters["p0"])


def test_the_first_step_after_loading_masters_is_the_first() -> None:
    """SGD's momentum then begins with the gradient, undamped, as in torch."""
    hyper = KINDS["SGD"][1]
    params, wide = parameters(), parameters(F32)
    opt, theirs = PagedSGD(params, **hyper, param_format="bfloat16+16"), torch.optim.SGD(wide, **hyper, foreach=False)
    opt.load_master({str(i): p for i, p in enumerate(wide)}, {str(i): p for i, p in enumerate(params)})
    train(opt, params, range(1))
    for p in wide:
        p.grad = torch.zeros_like(p)
    for p, q in zip(wide, params, strict=True):
        p.grad = q.grad.float()  # type: ignore[union-attr]
    theirs.step()
    for p, w in zip(params, wide, strict=True):
        torch.testing.assert_close(opt.master(p), w.detach(), rtol=1e-6, atol=0)


def test_masters_of_other_layouts_and_of_parameters_that_lose_nothing() -> None:
    p = torch.nn.Parameter(torch.randn(6, 8).bfloat16().t())
    gaps = torch.nn.Parameter(torch.randn(4, 6).bfloat16()[:, ::2])
    plain = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    params = [p, gaps, plain]
    opt = PagedAdamW(params, lr=1e-4, param_format="bfloat16+8")
    train(opt, params, range(2))
    values = {name: torch.randn(q.shape, dtype=F32) for name, q in zip("abc", params, strict=True)}
    opt.load_master(values, zip("abc", params, strict=True))
    for q, want in zip(params, values.values(), strict=True):
        assert ((opt.master(q) - want).abs() <= want.abs() * 2**-16).all()
        assert opt.master(q).dtype is (torch.float64 if q is plain else F32)
        assert ((q.detach() - want).abs() <= (0 if q is plain else want.abs() * 1.01 * 2**-8)).all()


def test_masters_that_do_not_fit_change_nothing() -> None:
    opt, params = trained(param_format="bfloat16+16")
    before, named = bits(opt, params), {str(i): p for i, p in enumerate(params)}
    good: dict[str, Any] = {"1": torch.ones(13)}
    for masters, names, message in (
        ({**good, "weight": torch.ones(1)}, named, "no parameter is called 'weight'; there are 0, 1, 2"),
        ({**good, "0": torch.ones(13)}, named, r"the master of 0 has shape \(13,\), the parameter has \(70, 80\)"),
        ({**good, "x": torch.ones(3)}, {**named, "x": torch.ones(3)}, "is no parameter of this optimizer"),
        (
            {**good, "4": torch.ones((), dtype=torch.complex64)},
            named,
            "4 is torch.complex64, and the parameter torch",
        ),
        ({**good, "4": torch.ones((), dtype=torch.int64)}, named, "master of 4 is torch.int64.*; give float32"),
        ({**good, "4": torch.ones((), device="meta")}, named, "master of 4 has no values: it is a meta tensor"),
        ({**good, "4": 1.0}, named, "'4' in values is a float, not a tensor"),
        (good, params, "named is a list; give names and tensors, as of model.named_parameters"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            opt.load_master(masters, names)
    for method in (opt.master, opt.reset_master):
        with pytest.raises(ValueError, match=r"a tensor of shape \(2,\) is no parameter of this optimizer"):
            method(torch.ones(2))
        with pytest.raises(ValueError, match=r"a str is no parameter of this optimizer"):
            method("weight")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight is no parameter of this optimizer, and shares memory with one"):
        opt.master_state_dict({"weight": params[0].detach()})
    assert alike(bits(opt, params), before)


def test_masters_for_which_there_is_no_room_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups, the second finds none: what was made for the first goes."""
    params = parameters()
    opt = PagedAdamW([{"params": params[:2]}, {"params": params[2:]}], param_format="bfloat16+16")
    before, create, named = bits(opt, []), opt.store.create, {str(i): p for i, p in enumerate(params)}
    full: Any = (MemoryError("no room") for _ in range(1))

    def crowded(wanted: Any) -> Any:
        if any(each.param is params[2] for each in wanted):
            raise next(full)
        return create(wanted)

    monkeypatch.setattr(opt.store, "create", crowded)
    with pytest.raises(MemoryError, match="no room"):
        opt.load_master({name: torch.ones(p.shape) for name, p in named.items()}, named)
    assert not opt.state
    assert not sum(opt.memory_report().by_place.values())
    assert alike(bits(opt, []), before)


def test_masters_of_a_model_that_was_cast_lose_nothing() -> None:
    """Its state is there, and nothing kept beside it yet; that of other parameters is not made."""
    params, rest = parameters(F32)[:2], torch.nn.Parameter(torch.ones(3, dtype=BF16))
    opt = PagedAdamW([*params, rest], lr=1e-4, param_format="bfloat16+16")
    train(opt, params, range(2))
    moments = [opt.state[p]["exp_avg"] for p in params]
    masters = opt.master_state_dict(zip("ab", params, strict=True))
    for p in params:
        p.data = p.data.bfloat16()
    opt.load_master(masters, zip("ab", params, strict=True))
    assert alike([opt.master(p) for p in params], list(masters.values()))
    assert all(opt.state[p]["exp_avg"] is moment for p, moment in zip(params, moments, strict=True))
    assert opt.memory_report().by_place == {"host": sum(10 * p.numel() for p in params)}


def test_a_parameter_that_others_write_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps in Python and in C++; not where masters or all of a checkpoint are loaded, nor of float32."""
    monkeypatch.setattr(warn, "_said", set())
    params = [*parameters()[:2], torch.nn.Parameter(torch.ones(3))]
    opt = PagedAdamW(params, lr=1e-4, param_format="bfloat16+16")

    @torch.no_grad()
    def written(i: int, value: float) -> list[str]:
        """What is said in two steps after a write."""
        params[i].fill_(value)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train(opt, params, range(2))
        return [str(each.message) for each in found]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(opt, params, range(12))
        opt.load_master({"1": torch.ones(13)}, {"1": params[1]})
        train(opt, params, range(2))
        saved = copy.deepcopy(([p.detach() for p in params], opt.state_dict()))
        train(opt, params, range(2))
        for p, q in zip(params, saved[0], strict=True):
            p.detach().copy_(q)
        opt.load_state_dict(saved[1])
        train(opt, params, range(2))
    assert written(2, 0.0) == []
    (said,) = written(1, 0.5)
    assert said.startswith("parameter 1 was written since the last step, and what it had lost")
    with torch.no_grad():
        params[0].zero_()  # as a mask for pruning does
    assert (opt.master(params[0]).abs() < 1e-40).all()
    assert written(0, 0.0) == []
