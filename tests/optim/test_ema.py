"""An average of the weights in the sweep of each step: beside torch's ``AveragedModel``, and shown in their place."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from optim_support import same, through_file
from support import BF16, F16, F32, F64
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pagedopt import (
    PagedAdamW,
    PagedLion,
    PagedOptimizer,
    PagedScheduleFreeAdamW,
    PagedSGD,
    compose,
    ema,
    estimate,
    rule,
    rules,
)
from pagedopt.optim.average import averaging
from pagedopt.rules.schedule_free import schedule_free_adamw, to_average
from tests.optim.clipped import ends

KINDS = {"adamw": (PagedAdamW, {}), "sgd": (PagedSGD, {"momentum": 0.9}), "lion": (PagedLion, {})}
PAGED = {"device_budget": 0}
WAYS = [
    {}, PAGED, {"device_budget": "256KiB"}, {"state_format": "int8", **PAGED}, {"max_grad_norm": 0.5},
    {"preallocate": True},
]  # fmt: skip


class Model(torch.nn.Module):
    """Parameters, of which the last gets no gradient in the first steps."""

    def __init__(self, dtype: torch.dtype = F32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = (3000,), (70, 80), (1,), (40,)
        self.all = torch.nn.ParameterList(torch.randn(s, generator=generator).to(dtype) for s in shapes)

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.all[:2])}, {"params": list(self.all[2:]), "lr": 0.01}]

    def give(self, number: int, late: int = 0) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        for p in self.all:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if number < late:
            self.all[-1].grad = None


@contextlib.contextmanager
def shown(params: Iterable[torch.Tensor], optimizer: Any) -> Iterator[None]:
    """Averages are shown in a block, behind which all is as it was."""
    params = list(params)
    before = ends(params, optimizer)
    with optimizer.averaged():
        yield
    assert same(before, ends(params, optimizer))


def averages(model: Model, optimizer: Any) -> list[torch.Tensor]:
    return [optimizer.state[p]["param_ema"].clone() for p in model.all]


def made(kind: Any = PagedAdamW, decay: float = 0.9, dtype: torch.dtype = F32, **options: Any) -> tuple[Model, Any]:
    model = Model(dtype)
    return model, kind(model.groups(), lr=0.03, after=ema(decay), **options)


def train(model: Model, optimizer: Any, count: int, late: int = 0, first: int = 0) -> None:
    for number in range(first, first + count):
        model.give(number, late)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"), [*(("adamw", way) for way in WAYS), ("sgd", PAGED), ("lion", WAYS[3])], ids=str
)
def test_it_is_torchs_to_the_bit(name: str, options: dict[str, Any]) -> None:
    kind, hyper = KINDS[name]
    model, optimizer = made(kind, 0.99, **hyper, **options)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    for number in range(6):
        model.give(number)
        optimizer.step()
        theirs.update_parameters(model)
    assert same(averages(model, optimizer), theirs.module.all)
    before = ends(model.all, optimizer)
    with shown(model.all, optimizer):
        assert same(model.all, theirs.module.all)
        assert not same(model.all, before[:4])


def test_a_late_parameter_begins_with_a_copy_and_one_without_a_gradient_keeps_its_average() -> None:
    model, optimizer = made(**PAGED)
    train(model, optimizer, 2, late=9)
    last = model.all[-1]
    assert last not in optimizer.state
    with optimizer.averaged():
        assert torch.equal(last, Model().all[-1])
    train(model, optimizer, 1, first=2)
    assert torch.equal(optimizer.state[last]["param_ema"], last)
    train(model, optimizer, 1, first=3)
    kept = optimizer.state[last]["param_ema"].clone()
    train(model, optimizer, 2, late=9, first=4)
    assert torch.equal(optimizer.state[last]["param_ema"], kept)
    assert not torch.equal(kept, last)


def test_the_decay_is_a_group_s_and_changes_between_steps() -> None:
    model, optimizer = made(decay=0.5)
    optimizer.param_groups[1]["ema_decay"] = 1.0
    train(model, optimizer, 1)
    firsts = averages(model, optimizer)
    train(model, optimizer, 1, first=1)
    assert same(averages(model, optimizer)[2:], firsts[2:])
    optimizer.param_groups[1]["ema_decay"] = 0.0
    train(model, optimizer, 1, first=2)
    assert same(averages(model, optimizer)[2:], list(model.all[2:]))
    assert not same(averages(model, optimizer)[:2], list(model.all[:2]))


@pytest.mark.parametrize(
    ("dtype", "rounding", "paged"),
    [(BF16, "nearest", PAGED), (BF16, "stochastic", PAGED), (F16, "stochastic", {}), (F64, "nearest", {}),
     (torch.complex64, "stochastic", PAGED)],
    ids=str,
)  # fmt: skip
def test_other_dtypes(dtype: torch.dtype, rounding: Any, paged: dict[str, Any]) -> None:
    """The average is of 32 bits or more, and of what is stored, unless that is rounded at random."""
    model, optimizer = made(dtype=dtype, param_rounding=rounding, **paged)
    wide = torch.promote_types(dtype, F32)
    expected: list[torch.Tensor] = []
    for number in range(4):
        train(model, optimizer, 1, first=number)
        values = [p.detach().to(wide, copy=True) for p in model.all]
        expected = [v if number == 0 else a.lerp(v, 0.1) for a, v in zip(expected or values, values, strict=True)]
    found = averages(model, optimizer)
    drawn = rounding == "stochastic" and dtype.itemsize == 2
    tolerance = {} if not drawn else {"rtol": 0.0, "atol": 0.05}
    torch.testing.assert_close(found, expected, **tolerance)
    assert not drawn or not same(found, expected)
    with shown(model.all, optimizer):
        assert same(model.all, [a.to(dtype) for a in found])


def test_an_average_may_be_stored_in_fewer_bits_by_name() -> None:
    model, optimizer = made(state_format={"param_ema": "bfloat16", "exp_avg": "float32"})
    train(model, optimizer, 3)
    assert {t.dtype for t in averages(model, optimizer)} == {BF16}
    with shown(model.all, optimizer):
        assert same(model.all, [t.float() for t in averages(model, optimizer)])
    with pytest.raises(ValueError, match=r"state .param_ema. of rule .* cannot be stored in int8: it holds weights"):
        made(state_format={"param_ema": "int8"})


def test_a_backward_within_the_block_updates_nothing() -> None:
    model = torch.nn.Linear(5, 5)
    optimizer = PagedSGD(model.parameters(), lr=0.1, after=ema(0.9))
    optimizer.attach(model, overlap="backward")
    for _ in range(2):
        model(torch.ones(5)).sum().backward()
        with pytest.raises(RuntimeError, match=r"averaged\(\) in the middle of a step"), optimizer.averaged():
            pass
        optimizer.step()
    with shown(model.parameters(), optimizer), pytest.raises(RuntimeError, match=r"within averaged\(\)"):
        model(torch.ones(5)).sum().backward()


INSIDE: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: o.step(),
    "closure": lambda o: o.step(lambda: 0),
    "save": lambda o: o.state_dict(),
    "save decoded": lambda o: o.decoded_state_dict(),
    "load": lambda o: o.load_state_dict({"state": {}, "param_groups": []}),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "another": lambda o: o.averaged().__enter__(),
}


@pytest.mark.parametrize("what", INSIDE)
def test_what_is_refused_inside(what: str) -> None:
    model, optimizer = made()
    train(model, optimizer, 9)  # the last ones in one compiled call
    with shown(model.all, optimizer):
        inside = ends(model.all, optimizer)
        with pytest.raises(RuntimeError, match=r"within averaged\(\) parameters are their averages.*leave the block"):
            INSIDE[what](optimizer)
        assert same(inside, ends(model.all, optimizer))
    train(model, optimizer, 1, first=9)


def test_moves_inside_and_an_exception_end_in_the_parameters() -> None:
    model, optimizer = made(**PAGED)
    train(model, optimizer, 3)
    before = ends(model.all, optimizer)
    grads = [p.grad for p in model.all]
    with contextlib.suppress(KeyError), optimizer.averaged():
        assert all(p.grad is grad for p, grad in zip(model.all, grads, strict=True))
        optimizer.set_device_budget("all")
        raise KeyError
    assert same(before, ends(model.all, optimizer))


def test_parameters_that_share_memory_are_put_back() -> None:
    first = torch.nn.Parameter(torch.arange(8.0))
    params = [first, torch.nn.Parameter(first.detach()[4:])]
    optimizer = PagedSGD(params, lr=0.5, after=ema(0.9))
    for number in range(3):
        for p in params:
            p.grad = torch.full_like(p, 1.0 + number)
        optimizer.step()
    before = ends(params, optimizer)
    with optimizer.averaged():
        assert not torch.equal(first, before[0])
    assert same(before, ends(params, optimizer))


def test_a_failure_at_the_end_is_damage_that_a_load_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(MemoryError), optimizer.averaged():
        monkeypatch.setattr("pagedopt.optim.averaged.Plan.of", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(RuntimeError, match=r"damaged: averaged\(\) failed at its end \(MemoryError: full\)"):
        optimizer.state_dict()
    monkeypatch.undo()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, 1, first=2)


@pytest.mark.parametrize("options", [{}, {"state_format": "int8", **PAGED}], ids=str)
def test_saved_and_loaded_it_goes_on(options: dict[str, Any]) -> None:
    model, optimizer = made(decay=0.7, **options)
    train(model, optimizer, 3)
    other, again = made(decay=0.9, **options)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pickled = pickle.loads(pickle.dumps(optimizer))
    assert pickled.after == ema(0.7)
    train(model, optimizer, 2, first=3)
    train(other, again, 2, first=3)
    assert [group["ema_decay"] for group in again.param_groups] == [0.7, 0.7]
    assert same(ends(model.all, optimizer), ends(other.all, again))


def test_checkpoints_with_and_without_an_average() -> None:
    model, optimizer = made()
    plain = PagedAdamW(model.groups())
    train(model, plain, 2)
    without = plain.state_dict()
    said = r"loaded state of parameter 0 has no param_ema; .*; an average begins with a copy: entry\['param_ema'\] = p"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(without)
    for p, entry in zip(model.all, without["state"].values(), strict=True):
        entry["param_ema"] = p.detach().clone()
    optimizer.load_state_dict(without)
    assert same(averages(model, optimizer), model.all)
    assert [group["ema_decay"] for group in optimizer.param_groups] == [0.9, 0.9]
    with pytest.raises(ValueError, match="has param_ema, an average of the weights, and this optimizer makes none"):
        plain.load_state_dict(optimizer.state_dict())
    torch.optim.AdamW(model.groups()).load_state_dict(optimizer.state_dict())


def test_an_estimate_counts_it_in_float32() -> None:
    both = compose(rules.adamw, averaging)
    bytes_of = lambda **how: estimate("1M", rule=both, **how).state_bytes / 1e6  # noqa: E731
    assert bytes_of(param_dtype="bfloat16") == pytest.approx(2 * 2 + 4, rel=0.01)
    assert bytes_of(state_format="int8") == pytest.approx(2.03 + 4, rel=0.01)
    model, optimizer = made(state_format="int8", **PAGED)
    train(model, optimizer, 1)
    assert "it is not what fills the memory" in str(_advice(optimizer))


def _advice(optimizer: Any) -> list[str]:
    with pytest.raises(MemoryError) as caught, optimizer.guard():
        raise MemoryError
    return caught.value.__notes__


def test_what_does_not_go_with_it_is_refused() -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=BF16))]
    with pytest.raises(ValueError, match=r"after=pagedopt.ema\(0.9\) averages .* param_format='bfloat16\+16' stores"):
        PagedAdamW(params, after=ema(0.9), param_format="bfloat16+16")
    with pytest.raises(TypeError, match=r"after is 0.9; give pagedopt.ema\(decay\), or None"):
        PagedAdamW(params, after=0.9)  # type: ignore[arg-type]
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"decay is .*; it must be from 0 to 1"):
            ema(value)
    for wrong in ("0.9", True, None):
        with pytest.raises(TypeError, match=r"decay is .*; it must be a number from 0 to 1"):
            ema(wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"there is no average: make the optimizer with after=pagedopt.ema"):
        PagedAdamW(params).averaged().__enter__()

    @rule
    def twice(param, grad, param_ema, *, lr):  # type: ignore[no-untyped-def]
        param_ema = param_ema + grad
        param = param - lr * param_ema
        return param, param_ema

    class Twice(PagedOptimizer):
        rule = twice

    with pytest.raises(ValueError, match=r"rule 'twice' has a state 'param_ema', which after=ema\(…\) adds: rename it"):
        Twice(params, {"lr": 0.1}, after=ema(0.9))


# --- PagedScheduleFreeAdamW trains y and evaluates x, as its authors' code: x is between y and z ----------------------


def trained(params: list[torch.nn.Parameter], *others: torch.nn.Parameter, **options: Any) -> PagedScheduleFreeAdamW:
    """An optimizer after four steps; ``others`` have no gradient."""
    optimizer = PagedScheduleFreeAdamW([*params, *others], lr=0.1, betas=(0.8, 0.99), **options)
    for step in range(4):
        for p in params:
            p.grad = torch.sin(p.detach().float() * (step + 2)).to(p.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("how", [{}, {"device_budget": 0}], ids=["resident", "file"])
def test_it_goes_to_the_average_and_back_and_refuses_a_step_there(how: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n, dtype=torch.float64)) for n in (70_000, 3)]
    late = torch.nn.Parameter(torch.ones(2))  # without a gradient it stays
    optimizer = trained(params, late, **how)
    before = [p.detach().clone() for p in params]
    optimizer.eval()
    for p, y in zip(params, before, strict=True):
        z = optimizer.state[p]["z"]
        torch.testing.assert_close(0.8 * p.detach() + 0.2 * z, y)
        assert (p.detach() - y).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match=r"parameters are the average, .*call optimizer.train\(\) before a step"):
        optimizer.step()
    other = PagedScheduleFreeAdamW([*params, late], **how)
    other.load_state_dict(through_file(optimizer.state_dict()))
    other.train()
    other.train()
    for p, y in zip(params, before, strict=True):
        torch.testing.assert_close(p.detach(), y)
    other.step()
    assert torch.equal(late, torch.ones(2))


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_no_step_is_taken_at_the_average_by_an_attached_model(overlap: Any) -> None:
    model = torch.nn.Linear(5, 5)
    optimizer = PagedScheduleFreeAdamW(model.parameters(), lr=0.1)
    optimizer.attach(model, overlap=overlap)
    for averaged in (False, True):
        if averaged:
            optimizer.eval()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"call optimizer.train\(\)") if averaged else contextlib.nullcontext():
            model(torch.ones(5)).sum().backward()
            optimizer.step()
        optimizer.wait()
        same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert same == [averaged] * 2
        optimizer.zero_grad()


def test_it_does_not_change_places_within_averaged() -> None:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 300))]
    optimizer = trained(params, after=ema(0.9))
    y = params[0].detach().clone()
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"within averaged\(\)"):
        optimizer.eval()
    optimizer.train()
    assert torch.equal(params[0], y)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_twice_in_a_group_goes_once() -> None:
    param = torch.nn.Parameter(torch.linspace(-1, 1, 300))
    optimizer = trained([param, param])
    y = param.detach().clone()
    optimizer.eval()
    torch.testing.assert_close(0.8 * param.detach() + 0.2 * optimizer.state[param]["z"], y)


def test_the_bits_beside_a_parameter_go_along() -> None:
    began = torch.linspace(-1, 1, 300)
    narrow, wide = torch.nn.Parameter(began.bfloat16()), torch.nn.Parameter(began.bfloat16().float())
    grads = [torch.sin(began * (step + 2)).bfloat16() for step in range(4)]
    pair = [(p, PagedScheduleFreeAdamW([p], lr=0.1, **how))
            for p, how in ((narrow, {"param_format": "bfloat16+16"}), (wide, {}))]  # fmt: skip
    for grad in grads:
        for p, optimizer in pair:
            p.grad = grad.to(p.dtype)
            optimizer.step()
            optimizer.eval()
        assert torch.equal(pair[0][1].master(narrow), wide)
        for _, optimizer in pair:
            optimizer.train()
        assert torch.equal(pair[0][1].master(narrow), wide)


def test_a_first_beta_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"betas=\(0.0, 0.9\): the first is above 0, or eval\(\) cannot find"):
        PagedScheduleFreeAdamW([torch.nn.Parameter(torch.ones(2))], betas=(0.0, 0.9))


@pytest.mark.parametrize(
    ("dtype", "form", "stored"),
    [("bfloat16", None, "float32"), ("float64", None, "float64"), ("bfloat16", "bfloat16", "bfloat16"),
     ("bfloat16", {"z": "float64", "exp_avg_sq": "float32"}, "float64")],
)  # fmt: skip
def test_weights_are_float32_unless_a_format_is_named(dtype: str, form: Any, stored: str) -> None:
    params = [torch.nn.Parameter(torch.ones(300, dtype=getattr(torch, dtype)))]
    assert trained(params, state_format=form).state[params[0]]["z"].dtype is getattr(torch, stored)
    of_squares = dtype if form is None else form["exp_avg_sq"] if isinstance(form, dict) else form
    said, named = (
        estimate(params, rule=schedule_free_adamw, state_format=each)
        for each in (form, {"z": stored, "exp_avg_sq": of_squares})
    )
    assert said.by_place == named.by_place


def test_a_second_rule_names_the_state_that_is_not_there() -> None:
    optimizer = PagedAdamW([p := torch.nn.Parameter(torch.ones(3))])
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ValueError, match=r"rule 'to_average' takes 'z'; the state .* is 'step', 'exp_avg'"):
        optimizer.apply(to_average, optimizer.param_groups[0])
