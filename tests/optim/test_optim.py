"""PagedAdamW and PagedSGD against torch's: the same numbers, the same state, the same errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_support import DEVICES
from looks import look
from optim_support import ADAMW, distance, model, pair, ready, same, step_on_ones, stepped, train, trained

import pagedopt
from pagedopt import PagedAdamW, PagedOptimizer, PagedSGD
from pagedopt.rules import sign

__all__ = ["look"]
pytestmark = pytest.mark.usefixtures("look")

ADAMW_CASES: list[dict[str, Any]] = [
    ADAMW,
    {**ADAMW, "amsgrad": True},
    {**ADAMW, "maximize": True},
    {**ADAMW, "amsgrad": True, "maximize": True},
    {},
]
SGD_CASES: list[dict[str, Any]] = [
    {"lr": 0.05, "weight_decay": 0.1},
    {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    {"lr": 0.02, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    {"lr": 0.001, "momentum": 0.8, "maximize": True},
]


@pytest.mark.parametrize("case", ADAMW_CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)], ids=str)
def test_adamw_follows_torch(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs, mine, other = pair(lambda p: PagedAdamW(p, **case), lambda p: torch.optim.AdamW(p, **case), 40, dtype)
    assert distance(ours, theirs) < tolerance
    for a, b in zip(mine.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True):
        assert list(a) == list(b)
        torch.testing.assert_close(a, b, rtol=tolerance * 20, atol=tolerance * 1e-2)


@pytest.mark.parametrize("case", SGD_CASES, ids=str)
def test_sgd_follows_torch(case: dict[str, Any]) -> None:
    ours, theirs, mine, other = pair(lambda p: PagedSGD(p, **case), lambda p: torch.optim.SGD(p, **case), 20)
    assert distance(ours, theirs) < 2e-6
    assert mine.state_dict()["state"].keys() == other.state_dict()["state"].keys() or not case.get("momentum")


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


def test_missing_gradients_leave_parameter_state_and_step_alone() -> None:
    def without(step: int) -> int:
        return -1 if step % 4 < 2 else step % 3

    makes = (lambda p: PagedAdamW(p, **ADAMW)), (lambda p: torch.optim.AdamW(p, **ADAMW))
    ours, theirs, *optimizers = pair(*makes, 30, without=without)
    assert distance(ours, theirs) < 3e-6
    mine, other = ([float(entry["step"]) for entry in opt.state.values()] for opt in optimizers)
    assert mine == other
    assert len(set(mine)) > 1


def test_a_parameter_whose_first_gradient_comes_late_gets_its_state_then() -> None:
    a, b = ready(), torch.nn.Parameter(torch.ones(3))
    opt = PagedAdamW([a, b])
    opt.step()
    assert b not in opt.state
    assert torch.equal(b, torch.ones(3))
    b.grad = torch.ones(3)
    opt.step()
    assert (float(opt.state[a]["step"]), float(opt.state[b]["step"])) == (2, 1)


def test_a_group_added_after_steps_is_updated_from_then_on() -> None:
    results = []
    for cls in (PagedAdamW, torch.optim.AdamW):
        first, late = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(7))
        opt = cls([first], **ADAMW)
        for step in range(4):
            if step == 2:
                opt.add_param_group({"params": [late], "lr": 0.2})
            first.grad, late.grad = torch.full((5,), 0.3), torch.full((7,), -0.7)
            opt.step()
        assert [float(opt.state[p]["step"]) for p in (first, late)] == [4, 2]
        results.append([first, late])
    assert distance(*results) < 1e-6


def test_groups_have_their_own_hyperparameters_and_may_change_them() -> None:
    def make(cls: Any, net: torch.nn.Module) -> Any:
        first, *rest = net.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.5, "betas": (0.5, 0.7)}]
        return cls(groups, **ADAMW)

    nets = model(), model()
    opts = make(PagedAdamW, nets[0]), make(torch.optim.AdamW, nets[1])
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in opts]
    for step in range(20):
        for net, opt, schedule in zip(nets, opts, schedules, strict=True):
            train(net, opt, 1, first=step)
            schedule.step()
    assert distance(list(nets[0].parameters()), list(nets[1].parameters())) < 3e-6


@pytest.mark.parametrize("lr", [torch.tensor(0.03), torch.tensor([0.03])])
def test_the_learning_rate_may_be_a_tensor(lr: torch.Tensor) -> None:
    ours, theirs, _, _ = pair(lambda p: PagedAdamW(p, lr=lr), lambda p: torch.optim.AdamW(p, lr=0.03), 10)
    assert distance(ours, theirs) < 2e-6


def test_gradients_reallocated_and_data_swapped_are_followed() -> None:
    """Every step new gradients elsewhere; once, new memory for a parameter."""
    nets = model(), model()
    opts = PagedAdamW(nets[0].parameters(), **ADAMW), torch.optim.AdamW(nets[1].parameters(), **ADAMW)
    keep = []
    for step in range(12):
        for net, opt in zip(nets, opts, strict=True):
            train(net, opt, 1, first=step)
            keep += [p.grad for p in net.parameters()]  # so that addresses are not used again
            if step == 6:
                for p in net.parameters():
                    p.data = p.data.clone()
    assert distance(list(nets[0].parameters()), list(nets[1].parameters())) < 2e-6


def test_a_gradient_laid_out_otherwise_is_taken_element_by_element() -> None:
    p, q = (torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    grad = torch.arange(12.0).reshape(4, 3).t()
    p.grad, q.grad = grad, grad.contiguous()
    for opt in (PagedAdamW([p], **ADAMW), PagedAdamW([q], **ADAMW)):
        opt.step()
        opt.step()
    assert torch.equal(p, q)


def test_channels_last_parameters_keep_their_layout_in_state() -> None:
    p = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    p.grad = torch.randn_like(p)
    opt = PagedAdamW([p])
    opt.step()
    assert opt.state[p]["exp_avg"].stride() == p.stride()
    torch.testing.assert_close(opt.state[p]["exp_avg"], 0.1 * p.grad)


def test_version_counters_go_up() -> None:
    net, opt = trained(1)
    written = [t for p in net.parameters() for t in (p, opt.state[p]["exp_avg"])]
    before = [t._version for t in written]
    train(net, opt, 1, first=1)
    assert all(t._version > version for t, version in zip(written, before, strict=True))


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


def test_the_version_of_a_parameter_without_gradient_stays() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    opt = PagedAdamW(params)
    step_on_ones(opt)
    params[1].grad = None
    before = [p._version for p in params]
    opt.step()
    assert [p._version - v for p, v in zip(params, before, strict=True)] == [1, 0]


def test_a_step_that_fails_to_launch_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    p, opt = stepped()
    before = p.detach().clone()
    monkeypatch.setattr(pagedopt.launch.sweep.cpu, "whole", lambda *_: 1 / 0)
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


def test_sparse_gradients_are_refused_as_torch_refuses_them() -> None:
    p = torch.nn.Parameter(torch.ones(4, 2))
    p.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="PagedAdamW does not support sparse gradients"):
        PagedAdamW([p]).step()
    assert torch.equal(p, torch.ones(4, 2))


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
    "sparse": (lambda p: setattr(p, "grad", torch.ones(5).to_sparse()), "sparse"),
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
    with pytest.warns(RuntimeWarning, match="there is no GPU") as caught:
        opt.step()
    opt.step()
    assert len(caught) == 1
    assert opt.memory_report().by_place == {"host": 24}


def test_a_rule_of_ones_own_is_an_optimizer_in_a_few_lines() -> None:
    class Lion(PagedOptimizer):
        rule = lion

        def __init__(self, params: Any, lr: float = 1e-4, beta1: float = 0.9, beta2: float = 0.99) -> None:
            super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2})

    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    p.grad = torch.tensor([1.0, -1.0, 0.0])
    opt = Lion([p], lr=0.5)
    opt.step()
    assert torch.equal(p, torch.tensor([0.5, -1.5, 3.0]))
    torch.testing.assert_close(opt.state[p]["exp_avg"], 0.01 * p.grad)
    assert list(opt.state_dict()["state"][0]) == ["step", "exp_avg"]


@pagedopt.rule
def lion(param, grad, exp_avg, *, lr, beta1, beta2):  # type: ignore[no-untyped-def]
    """Chen et al. 2023, arXiv:2302.06675, without weight decay."""
    param = param - lr * sign(beta1 * exp_avg + (1 - beta1) * grad)
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad
    return param, exp_avg


@pytest.mark.parametrize("device", DEVICES)
def test_which_gradient_is_absent_may_change_from_step_to_step(device: str) -> None:
    """As many as before are there, in the same shapes, and of other parameters."""
    worlds = []
    for cls in (torch.optim.AdamW, PagedAdamW):
        params = [torch.nn.Parameter(torch.full((5,), i + 1.0, device=device)) for i in range(3)]
        optimizer = cls(params, lr=0.1)
        for step in range(12):
            for i, p in enumerate(params):
                absent = i == step * 2 % 3 or (step % 4 == 3 and i == (step + 1) % 3)
                p.grad = None if absent else torch.linspace(-1, step + i, 5, device=device)
            optimizer.step()
        worlds.append(torch.cat([p.detach() for p in params]))
    torch.testing.assert_close(*worlds, rtol=1e-6, atol=1e-6)
