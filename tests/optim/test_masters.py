"""What a parameter has lost, and the number that both are: saved, loaded, read, set, and written by others."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from optim_support import bits, same, through_file
from sixteen_training import KINDS, loaded, master, parameters, train, trained
from support import BF16, F32

from pagedopt import PagedAdamW, PagedSGD
from pagedopt.formats import sixteen
from pagedopt.system import warn


def test_a_remainder_is_loaded_into_the_other_format() -> None:
    opt, params = trained(param_format="bfloat16+16")
    exact = [master(opt, p) for p in params]
    narrow = loaded(opt.state_dict(), params, param_format="bfloat16+8")
    for p, want in zip(params, exact, strict=True):
        assert ((master(narrow, p) - want).abs() <= want.abs() * 2**-15).all()
    coarse = [master(narrow, p) for p in params]
    wide = loaded(narrow.state_dict(), params, param_format="bfloat16+16")
    assert same([master(wide, p) for p in params], coarse)


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


def test_masters_go_out_and_in() -> None:
    opt, params = trained(param_format="bfloat16+16")
    named = {f"p{i}": p for i, p in enumerate(params)} | {"frozen": torch.ones(3, dtype=BF16)}
    masters = opt.master_state_dict(named)
    assert torch.equal(masters.pop("frozen"), torch.ones(3))
    for found in (list(masters.values()), [opt.master(p) for p in params]):
        assert same(found, [master(opt, p) for p in params])
    fresh = parameters()
    other = PagedAdamW(fresh, **KINDS["AdamW"][1], param_format="bfloat16+16", device_budget=0)
    other.load_master(masters, {f"p{i}": p for i, p in enumerate(fresh)})  # before the first step
    saved = through_file(other.state_dict())
    again = loaded(saved, [torch.nn.Parameter(p.detach().clone()) for p in fresh], param_format="bfloat16+16")
    assert same([other.master(p) for p in fresh], list(masters.values()))
    assert same([again.master(p) for p in again.param_groups[0]["params"]], list(masters.values()))
    wide = [torch.nn.Parameter(t.clone()) for t in masters.values()]
    reference = PagedAdamW(wide, **KINDS["AdamW"][1])
    train(other, fresh, range(3))
    train(reference, wide, range(3))
    assert same([other.master(p) for p in fresh], [w.detach() for w in wide])
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
    for optimizer, each in ((opt, params), (theirs, wide)):
        train(optimizer, each, range(1))
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
    before, named = bits(params, opt), {str(i): p for i, p in enumerate(params)}
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
    assert same(bits(params, opt), before)


def test_masters_for_which_there_is_no_room_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups, the second finds none: what was made for the first goes."""
    params = parameters()
    opt = PagedAdamW([{"params": params[:2]}, {"params": params[2:]}], param_format="bfloat16+16")
    create, named = opt.store.create, {str(i): p for i, p in enumerate(params)}

    def crowded(wanted: Any) -> Any:
        if any(each.param is params[2] for each in wanted):
            raise MemoryError("no room")
        return create(wanted)

    monkeypatch.setattr(opt.store, "create", crowded)
    with pytest.raises(MemoryError, match="no room"):
        opt.load_master({name: torch.ones(p.shape) for name, p in named.items()}, named)
    assert not opt.state
    assert not sum(opt.memory_report().by_place.values())


def test_masters_that_cannot_be_converted_damage_only_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    opt, params = trained(param_format="bfloat16+16")
    before, named = bits(params, opt), {str(i): p for i, p in enumerate(params)}
    encode, room = sixteen.Split.encode, [0]

    def crowded(form: Any, values: torch.Tensor) -> Any:
        room[0] -= 1
        if room[0] < 0:
            raise MemoryError("no room")
        return encode(form, values)

    monkeypatch.setattr(sixteen.Split, "encode", crowded)
    for room[0], damaged in ((0, False), (1, True)):
        with pytest.raises(MemoryError, match="no room"):
            opt.load_master({name: torch.ones(p.shape) for name, p in named.items()}, named)
        assert bool(opt.damaged) is damaged
        assert damaged or same(bits(params, opt), before)


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
    assert same([opt.master(p) for p in params], list(masters.values()))
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
    monkeypatch.setattr(warn, "_said", set())
    opt.told_of_writes = False
    train(opt, params, range(2))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        params[1].fill_(2.0)
        opt.reset_master(params[1])
        train(opt, params, range(2))
        params[0].fill_(2.0)
        params[1].fill_(3.0)
        opt.reset_master(params[1])
    assert written(1, 0.5)[0].startswith("parameter 0 was written")
    with torch.no_grad():
        params[0].zero_()  # as a mask for pruning does
    assert (opt.master(params[0]).abs() < 1e-40).all()
    assert written(0, 0.0) == []
