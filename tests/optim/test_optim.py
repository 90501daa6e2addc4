"""A step by itself: how near it is, what it writes, and what it refuses before it changes anything.

That steps are torch's, whatever is done between them, is in ``test_acts.py``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_support import ADAMW, ready, same, step_on_ones, stepped

import pagedopt
from pagedopt import PagedAdamW
from tests.optim.quick_steps import look

__all__ = ["look"]
pytestmark = pytest.mark.usefixtures("look")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_as_near_to_float64_as_torch_fused(dtype: torch.dtype) -> None:
    """Same parameters and gradients every step, so that only the update's rounding differs."""
    torch.manual_seed(0)
    start, grads = torch.randn(4097).to(dtype), [torch.randn(4097).to(dtype) for _ in range(10)]
    errors = []
    for make in (PagedAdamW, lambda p, **k: torch.optim.AdamW(p, fused=True, **k)):
        p = torch.nn.Parameter(start.clone())
        exact = torch.nn.Parameter(start.double())
        opt, reference = make([p], **ADAMW), torch.optim.AdamW([exact], **ADAMW)
        for g in grads:
            p.grad, exact.grad = g.clone(), g.double()
            opt.step()
            reference.step()
        errors.append((p.double() - exact).abs().mean().item())
    assert errors[0] <= errors[1] * 1.05
    assert errors[0] > 0


def test_versions_of_what_is_written_go_up_and_no_others() -> None:
    params = [ready(), ready()]
    opt = PagedAdamW(params)
    for step in range(6):
        params[1].grad = None if step % 2 else torch.ones(3)
        written = [*params, opt.state[params[0]].get("exp_avg", params[0])]
        before = [t._version for t in written]
        opt.step()
        assert [t._version - v for t, v in zip(written, before, strict=True)] == [1, 1 - step % 2, 1]


@pytest.mark.parametrize("steps_too", [True, False], ids=["made and stepped", "made"])
def test_in_inference_mode(steps_too: bool) -> None:
    made = []
    for kind in (PagedAdamW, torch.optim.AdamW):
        with torch.inference_mode(steps_too):
            p = torch.nn.Parameter(torch.ones(3), requires_grad=False)
            with torch.inference_mode():
                opt = kind([p])
            for _ in range(5):
                p.grad = torch.ones(3)
                opt.step()
        made.append(p)
    torch.testing.assert_close(*made)


def test_a_step_that_fails_to_launch_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    p, opt = stepped()
    before = p.detach().clone()
    monkeypatch.setattr(pagedopt.launch.sweep.cpu, "walks", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.step()
    assert float(opt.state[p]["step"]) == 1
    assert torch.equal(p, before)


def test_a_closure_is_called_with_gradients_on() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    opt = PagedAdamW([p])

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(opt.step(closure)) == 3
    assert not torch.equal(p, torch.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"differentiable": True}, "differentiable=True"),
        ({"state_format": "int3"}, "state_format is 'int3'; there are float32, bfloat16"),
        ({"placement": "moon"}, "placement is 'moon'; there are mapped, managed, host"),
        ({"transport": "owl"}, "transport is 'owl'; there are hybrid, managed"),
    ],
)
def test_wrong_options_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        PagedAdamW([torch.nn.Parameter(torch.ones(2))], **options)


def shrunk(p: Any) -> None:
    p.data = p.data[:2]


def recast(p: Any) -> None:
    """With its gradient, as module.half() does; else torch follows."""
    p.grad, p.data = None, p.data.half()
    p.grad = torch.ones_like(p)


HARMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shrunk": (shrunk, r"tensor 1 of param has shape \(2,\), the table has \(5,\)"),
    "freed": (lambda p: p.grad.untyped_storage().resize_(0), "tensor 1 of grad has no memory"),
    "recast": (recast, "tensor 1 of param is torch.float16"),
    "resized": (lambda p: p.grad.resize_(1), r"tensor 1 of grad has shape \(1,\)"),
    "sparse": (lambda p: setattr(p, "grad", torch.ones(5).to_sparse()), "AdamW does not support sparse gradients"),
}


@pytest.mark.parametrize(("harm", "message"), HARMS.values(), ids=HARMS)
def test_a_tensor_that_changed_is_noticed_before_anything_is_updated(harm: Any, message: str) -> None:
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5, 7)]
    double = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))  # another launch, prepared after the first
    opt = PagedAdamW([double, *params])
    step_on_ones(opt)
    others = [params[0], params[2], double]
    before = [p.clone() for p in others]
    harm(params[1])
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        opt.step()
    assert same(others, before)
    assert float(opt.state[double]["step"]) == 1


def test_empty_and_scalar_parameters_step() -> None:
    params = [torch.nn.Parameter(torch.ones(s)) for s in ((0,), (), (1, 0, 3), (2,))]
    opt = PagedAdamW(params, lr=0.5)
    step_on_ones(opt)
    assert float(params[1]) < 1
    assert opt.state[params[2]]["exp_avg"].shape == (1, 0, 3)


def test_managed_placement_without_a_gpu_says_so_once() -> None:
    from pagedopt.system import warn

    warn._said.clear()
    opt = PagedAdamW([ready()], placement="managed")
    with pytest.warns(RuntimeWarning, match="these parameters are on no GPU") as caught:
        opt.step()
    opt.step()
    assert len(caught) == 1
    assert opt.memory_report().by_place == {"host": 24}
