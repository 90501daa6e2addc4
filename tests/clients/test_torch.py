"""What torch itself brings around models and steps: parametrizations, checkpointing, averages, functions, compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clients
import pytest
import torch
from clients import ADAMW, PLACES, Watched, everywhere, moved_alike, on_cuda, on_devices, torchs, values
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from pagedopt import PagedAdamW

STEPS = 6

Make = Callable[[str], nn.Module]
Train = Callable[[nn.Module, torch.optim.Optimizer, str], list[float]]


def model(device: str) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(13, 18), nn.Tanh(), nn.Linear(18, 18), nn.BatchNorm1d(18), nn.Linear(18, 5)
    return nn.Sequential(*layers).to(device)


def batch(step: int, device: str) -> torch.Tensor:
    return torch.randn(8, 13, generator=torch.Generator().manual_seed(step)).to(device)


def loop(net: Any, opt: torch.optim.Optimizer, device: str, steps: int = STEPS, first: int = 0) -> list[float]:
    """Steps; the loss of each."""
    return clients.steps(opt, range(first, first + steps), lambda step: net(batch(step, device)).square().mean())


def beside_torch(
    device: str, place: str, train: Train = loop, make: Make = model, near: float = 1e-5, ours: Any = Watched
) -> None:
    """Every step is torch's, and so are losses and what the model becomes."""
    ends = []
    for kind in (lambda p: ours(p, **{**ADAMW, **PLACES[place]}), torchs):
        net = make(device)
        start = [p.detach().clone() for p in net.parameters()]
        opt = kind(net.parameters())
        ends.append((train(net, opt, device), list(net.parameters()), opt))
    assert ours is not Watched or ends[0][2].watched == STEPS
    assert ends[0][0] == pytest.approx(ends[1][0], rel=near, abs=near / 10)
    moved_alike(ends[0][1], ends[1][1], start, near)


@pytest.mark.parametrize("of", ["weight_norm", "orthogonal", "spectral_norm"])
@everywhere
def test_parametrizations(device: str, place: str, of: str) -> None:
    """`weight_norm`, `orthogonal` and `spectral_norm`: a step updates what a weight is made of."""

    def make(device: str) -> nn.Module:
        net = model(device)
        getattr(parametrizations, of)(net[2])  # type: ignore[index]
        assert parametrize.is_parametrized(net[2])  # type: ignore[index]
        return net

    beside_torch(device, place, make=make)


@everywhere
def test_parametrizations_are_removed(device: str, place: str) -> None:
    """In mid-training: what is made of one tensor becomes that parameter in other memory, what is made of several a new
    one, which joins with `add_param_group`."""
    ends = []
    for kind in clients.both(place):
        net: Any = model(device)
        parametrizations.weight_norm(net[0])
        parametrizations.orthogonal(net[2])
        opt = kind(net.parameters())
        losses = loop(net, opt, device, 3)
        parametrize.remove_parametrizations(net[0], "weight")
        parametrize.remove_parametrizations(net[2], "weight")
        known = {id(p) for p in opt.param_groups[0]["params"]}
        opt.add_param_group({"params": [p for p in net.parameters() if id(p) not in known]})
        assert len(opt.param_groups[1]["params"]) == 1
        start = values(net)
        ends.append((losses + loop(net, opt, device, 3, 3), values(net), opt))
    clients.agree(ends, STEPS, 1e-5, start)


@pytest.mark.parametrize("reentrant", [False, True])
@everywhere
def test_gradient_checkpointing(device: str, place: str, reentrant: bool) -> None:
    """`torch.utils.checkpoint`, of both kinds."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model(device)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inner[0](x)  # type: ignore[index]
            return checkpoint(self.inner[1:], x, use_reentrant=reentrant)  # type: ignore[index]

    beside_torch(device, place, make=lambda device: Net().to(device))


@everywhere
def test_functions(device: str, place: str) -> None:
    """`torch.func`: gradients of `functional_call`, one for each sample by `vmap`, clipped and put into `.grad`."""

    def train(net: Any, opt: Any, device: str) -> list[float]:
        net.eval()  # no statistics of a batch in what is computed for each sample

        def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(net, params, (x[None],)).square().mean()

        losses = []
        for step in range(STEPS):
            x, params = batch(step, device), dict(net.named_parameters())
            each = vmap(grad(loss_of), (None, 0))({name: p.detach() for name, p in params.items()}, x)
            for name, p in params.items():
                p.grad = each[name].clamp(-0.1, 0.1).mean(0)
            opt.step()
            losses.append(functional_call(net, params, (x,)).square().mean().item())
        return losses

    beside_torch(device, place, train)


@pytest.mark.parametrize("kind", ["swa", "ema"])
@everywhere
def test_averages(device: str, place: str, kind: str) -> None:
    """`AveragedModel` with equal weights and as an EMA, `SWALR`, `update_bn`; the averages are compared, too."""

    def train(net: Any, opt: Any, device: str) -> list[float]:
        how = {"multi_avg_fn": get_ema_multi_avg_fn(0.7), "use_buffers": True} if kind == "ema" else {}
        mean, rate = AveragedModel(net, **how), SWALR(opt, 0.002, anneal_epochs=3)
        losses = []
        for step in range(STEPS):
            losses += loop(net, opt, device, 1, step)
            mean.update_parameters(net)
            rate.step()
        update_bn([batch(step, device) for step in range(STEPS)], mean)
        return losses + [value for t in values(mean.module) for value in t.double().flatten().tolist()]

    beside_torch(device, place, train)


class Whole:
    """A model with three parametrizations, checkpointing in its forward and an average behind it, in training."""

    def __init__(self, device: str, place: str) -> None:
        net: Any = model(device)
        for layer, of in ((net[0], "weight_norm"), (net[2], "orthogonal"), (net[4], "spectral_norm")):
            getattr(parametrizations, of)(layer)
        self.net, self.device = net, device
        self.optimizer = PagedAdamW(net.parameters(), **ADAMW, **PLACES[place])
        self.mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
        self.rate = SWALR(self.optimizer, 0.002, anneal_epochs=3)
        self.parts = {"net": net, "optimizer": self.optimizer, "mean": self.mean, "rate": self.rate}

    def train(self, first: int, steps: int) -> None:
        def forward(x: torch.Tensor) -> Any:
            return checkpoint(self.net[1:], self.net[0](x), use_reentrant=False)

        for step in range(first, first + steps):
            loop(forward, self.optimizer, self.device, 1, step)
            self.mean.update_parameters(self.net)
            self.rate.step()

    def digest(self) -> str:
        return clients.digest(self.mean, self.optimizer) + clients.digest(self.net, self.optimizer)


@pytest.mark.clients
@on_devices
def test_new_process(tmp_path: Path, device: str) -> None:
    """Parametrizations, checkpointing and an EMA in one model, resumed, also in another place."""

    def run(place: str) -> str:
        whole = Whole(device, place)
        whole.train(0, 3)
        torch.save({name: part.state_dict() for name, part in whole.parts.items()}, tmp_path / place)
        whole.train(3, 3)
        return whole.digest()

    clients.goes_on(__file__, tmp_path, device, run)


def go_on(folder: Path, device: str, before: str, after: str) -> str:
    run = Whole(device, after)
    saved = torch.load(folder / before, weights_only=True)
    for name, part in run.parts.items():
        part.load_state_dict(saved[name])
    run.train(3, 3)
    return run.digest()


@pytest.fixture
def _forgets() -> Iterator[None]:
    """What was compiled is no one's after the test."""
    yield
    torch._dynamo.reset()


@pytest.mark.clients
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("_forgets")
@pytest.mark.parametrize("what", ["model", "step"])
@everywhere
def test_compiled(device: str, place: str, what: str) -> None:
    """`torch.compile` (inductor) of the model, and of the whole train step with `backward` and `optimizer.step()`."""

    def train(net: Any, opt: Any, device: str) -> list[float]:
        if what == "model":
            return loop(torch.compile(net), opt, device)

        @torch.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        return [step(batch(i, device)).item() for i in range(STEPS)]

    beside_torch(device, place, train, near=1e-4, ours=PagedAdamW)


@pytest.mark.clients
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("_forgets")
@on_cuda
def test_compiled_with_graphs(device: str, place: str) -> None:
    """`torch.compile(model, mode="reduce-overhead")`: CUDA graphs around forward and backward, the step beside them."""

    def train(net: Any, opt: Any, device: str) -> list[float]:
        return loop(torch.compile(net, mode="reduce-overhead"), opt, device)

    beside_torch(device, place, train, near=1e-4)


if __name__ == "__main__":
    clients.child(go_on)
