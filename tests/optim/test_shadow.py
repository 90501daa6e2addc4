"""`pagedopt.shadow`: torch's optimizer and ours on somebody's model, and no trace of it afterwards."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pagedopt
from pagedopt import PagedAdamW, PagedLion, PagedSGD, shadow


class Net(nn.Module):
    """Dropout and a batch norm: random numbers and buffers, one of which is replaced rather than written."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.Dropout(), nn.Linear(700, 3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        self.count = self.count + 1
        out = self.layers(inputs + random.random() * np.random.rand())
        return out if targets is None else (out - targets).square().mean()


def made(seed: int = 0) -> tuple[Net, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    return Net(), [(torch.randn(8, 300), torch.randn(8, 3)) for _ in range(5)]


def trained(net: Net, batches: list[tuple[Tensor, Tensor]], kind: Any, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has taken two steps, with gradients left behind."""
    optimizer = kind(net.parameters(), **options)
    for inputs, targets in batches[:2]:
        net(inputs, targets).backward()
        optimizer.step()
    return optimizer


def everything(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all that might change, and the identities of tensors."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {
        "values": {name: t.detach().clone() for name, t in tensors.items()},
        "objects": {name: (id(t), t.data_ptr()) for name, t in tensors.items()},
        "grads": {name: (id(t.grad), t.grad.clone() if t.grad is not None else None) for name, t in tensors.items()},
        "modes": [module.training for module in net.modules()],
        "state": copy.deepcopy(optimizer.state_dict()),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "python": random.getstate(),
    }


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, whatever is in them."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


#: Large: what a gradient near zero is rounded to would move a parameter by the whole learning rate.
EPS = 1e-3
PAIRS = [
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": EPS}, {}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "eps": EPS}, {"device_budget": "50%"}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "eps": EPS}, {}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"placement": "file", "device_budget": 0}),
    (PagedAdamW, {"lr": 0.01, "device_budget": 0, "eps": EPS}, {}),
    (PagedSGD, {"lr": 0.1, "momentum": 0.9}, {}),
]


@pytest.mark.parametrize(("kind", "given", "options"), PAIRS)
def test_both_are_near_and_nothing_is_left(kind: Any, given: dict[str, Any], options: Any) -> None:
    net, batches = made()
    optimizer = trained(net, batches, kind, **given)
    net.layers[0].eval()
    before = everything(net, optimizer)
    seen = shadow(net, optimizer, iter(batches[2:]), **options)
    assert_same(everything(net, optimizer), before)
    assert len(seen.losses[0]) == len(seen.losses[1]) == 3
    assert seen.losses[0][0] == seen.losses[1][0]
    assert 0 <= seen.difference < 1e-5
    assert seen.where in dict(net.named_parameters())
    assert all(t > 0 for t in seen.seconds)
    state = sum(t.nbytes for p in optimizer.state.values() for t in p.values() if isinstance(t, Tensor) and t.dim())
    assert seen.state_bytes[0] >= state
    spilled = {**given, **options}.get("device_budget") is not None
    assert (seen.saved_bytes > 0) == spilled or not spilled
    chosen = "fused" if given.get("fused") else "foreach" if given.get("foreach") else "loop"
    assert f"torch's {seen.names[0].split()[1]} ({chosen})" in str(seen)
    assert ("saved" in str(seen)) or seen.saved_bytes < 0
    way = "foreach" if chosen == "fused" else "fused"
    assert f"{seen.names[0]} and ({way}) differ by {seen.torch_difference:.2g} of a parameter, " in str(seen)
    assert seen.torch_losses[0] == seen.losses[0][0]


def test_what_a_wrapper_keeps_in_state_may_be_anything() -> None:
    net, batches = made()
    optimizer = trained(net, batches, torch.optim.AdamW, eps=EPS)
    optimizer.state["wrapper"] = None
    assert shadow(net, optimizer, iter(batches[2:])).difference < 1e-5


def test_the_yardstick_is_torch_in_another_way() -> None:
    net, batches = made()
    real = copy.deepcopy(net)
    found = []
    for fused in (False, True):
        one, numbers = copy.deepcopy(real), torch.get_rng_state()
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.01, fused=fused)
        random.seed(7)
        np.random.seed(7)
        for inputs, targets in batches:
            optimizer.zero_grad()
            one(inputs, targets).backward()
            optimizer.step()
        torch.set_rng_state(numbers)
        found.append([p.detach().double() for p in one.parameters()])
    random.seed(7)
    np.random.seed(7)
    seen = shadow(net, torch.optim.AdamW(net.parameters(), lr=0.01), batches)
    assert (seen.torch_way, len(seen.torch_losses)) == ("fused", 5)
    assert seen.torch_difference == max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) > 0
    given = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01))
    assert shadow(net, given, batches[:1]).torch_way == ""
    assert "differ by" not in str(shadow(net, given, batches[:1]))


def test_the_torch_side_is_what_torch_does() -> None:
    net, batches = made()
    optimizer = trained(net, batches, torch.optim.AdamW, lr=0.01)
    real = copy.deepcopy((net, optimizer))
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    seen = shadow(net, optimizer, batches[2:])
    losses = []
    for inputs, targets in batches[2:]:
        real[1].zero_grad()
        loss = real[0](inputs, targets)
        loss.backward()
        real[1].step()
        losses.append(loss.item())
    assert seen.losses[0] == tuple(losses)


def test_a_wrong_rule_is_seen_and_named() -> None:
    """Ours with another learning rate in one group differs there by what that rate moves."""

    class Wrong(PagedSGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][3][5] += 0.25

    net, batches = made()
    seen = shadow(net, Wrong(net.parameters(), lr=0.001), batches[:1])
    assert seen.where == [name for name, _ in net.named_parameters()][3]
    assert seen.difference == pytest.approx(0.25)


def test_it_says_how_far_parameters_went_and_what_is_saved() -> None:
    torch.manual_seed(0)
    net, batch = nn.Linear(300, 3), torch.randn(8, 300)
    real = copy.deepcopy(net)
    real(batch).square().mean().backward()
    torch.optim.SGD(real.parameters(), lr=0.1).step()
    pairs = zip(net.parameters(), real.parameters(), strict=True)
    moved = max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs)

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = shadow(net, optimizer, [batch], loss=lambda model, x: model(x).square().mean())
    assert seen.change == pytest.approx(moved)
    words = (
        f"largest absolute difference: {seen.difference:.2g} of a parameter ({seen.where}; these steps moved one by "
    )
    assert f"{words}{seen.change:.2g} at most), " in str(seen)
    assert abs(seen.saved_bytes) < 1024
    assert "nothing saved" in str(seen)
    assert "1.00 KiB saved" in str(replace(seen, state_bytes=(2048, 1024)))
    assert "1.00 KiB more" in str(replace(seen, state_bytes=(1024, 2048)))


def test_whatever_goes_wrong_everything_is_put_back() -> None:
    net, batches = made()
    optimizer = trained(net, batches, torch.optim.AdamW)
    before = everything(net, optimizer)
    calls = itertools.count()

    def fails(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return model(*batch)

    with pytest.raises(KeyboardInterrupt):
        shadow(net, optimizer, batches[:3], loss=fails)
    assert_same(everything(net, optimizer), before)


def test_batches_of_many_kinds_are_understood() -> None:
    net, batches = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs, targets = batches[0]
    expected = shadow(net, optimizer, [(inputs, targets)]).losses
    as_dict = shadow(net, optimizer, [{"inputs": inputs, "targets": targets}])
    assert as_dict.losses == expected
    for output in (lambda loss: SimpleNamespace(loss=loss), lambda loss: {"loss": loss}):
        net.forward, real = lambda *batch, out=output, f=net.forward: out(f(*batch)), net.forward  # type: ignore[method-assign]
        assert shadow(net, optimizer, [(inputs, targets)]).losses == expected
        net.forward = real  # type: ignore[method-assign]
    endless = itertools.repeat((inputs, targets))
    assert len(shadow(net, optimizer, endless, steps=2).losses[0]) == 2


def test_what_cannot_be_is_refused() -> None:
    net, batches = made()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer is a PagedLion, .* there are torch\.optim\.AdamW or"):
        shadow(net, PagedLion(net.parameters()), batches)
    with pytest.raises(TypeError, match="optimizer is an Adagrad"):
        shadow(net, torch.optim.Adagrad(net.parameters()), batches)
    with pytest.raises(TypeError, match=r"a tensor of \(8, 3\), not one number; give loss="):
        shadow(net, optimizer, [b[0] for b in batches])
    with pytest.raises(TypeError, match="batches are 5; give a list"):
        shadow(net, optimizer, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no batch"):
        shadow(net, optimizer, iter(()))
    with pytest.raises(ValueError, match="steps is 0"):
        shadow(net, optimizer, batches, steps=0)
    with pytest.raises(ValueError, match="placement"):
        shadow(net, optimizer, batches, placement="moon")
    assert pagedopt.Shadow is type(shadow(net, optimizer, batches[:1]))


def test_a_loss_that_is_not_a_number_is_no_small_difference() -> None:
    net, batches = made()
    seen = shadow(net, torch.optim.SGD(net.parameters(), lr=0.1), batches[:2])
    broken = replace(seen, losses=([0.5, float("nan")], [0.5, 0.5]))
    assert "nan of a loss" in str(broken)


def test_torch_clips_where_ours_does() -> None:
    net, batches = made()
    plain = shadow(net, PagedSGD(net.parameters(), lr=0.1), batches)
    clipped = shadow(net, PagedSGD(net.parameters(), lr=0.1, max_grad_norm=1e-3), batches)
    assert clipped.difference < 1e-6
    assert clipped.change < 0.1 * plain.change
