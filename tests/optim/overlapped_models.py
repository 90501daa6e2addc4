"""Models in which a module reads what is not its own, or is called in an unusual way, and loops around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from overlapped import LAYERS, Loop, linears
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def tied(width: int) -> list[nn.Module]:
    net = linears(width, 40)
    for i in range(0, 18, 3):
        net[2 * i].weight = net[-2 - 2 * i].weight  # the first is the last
    return [net]


class Attention(nn.Module):
    """out_proj is a module of its own, whose hooks nobody calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(LAYERS // 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.net = nn.TransformerEncoder(layer, LAYERS // 8 + 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


class Checkpointed(nn.Module):
    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = linears(width), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[:4](x).requires_grad_()
        for i in range(4, len(self.net), 8):
            x = checkpoint(self.net[i : i + 8], x, use_reentrant=self.reentrant)
        return x


def normed(how: Callable[[nn.Module], nn.Module]) -> Callable[[int], list[nn.Module]]:
    def make(width: int) -> list[nn.Module]:
        net = linears(width)
        for i in range(0, len(net), 2):
            net[i] = how(net[i])
        return [net]

    return make


class Reader(nn.Module):
    """Reads a module of its parent's."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]  # not a child

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.others[0].weight)


class Functional(nn.Module):
    """The first modules read weights of the last ones, and the model those of one that is never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net, self.never = linears(width), nn.Linear(width, width)
        self.readers = nn.ModuleList(Reader(self.net[-2 - 2 * i]) for i in range(3))
        self.table = nn.ParameterList(nn.Parameter(torch.randn(width) / 9) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for reader, row in zip(self.readers, self.table, strict=True):
            x = reader(x).tanh() + row
        return self.net(x) + F.linear(x, self.never.weight)


class Late(nn.Module):
    """From the third forward on, a module runs, and a weight is read, that did not before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spare, self.net, self.late, self.calls = nn.Linear(width, width), linears(width), linears(width, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            x = F.linear(x, self.spare.weight).tanh()
            x = self.late(x) + F.linear(x, self.net[-2].weight)  # its hook waits for everything
        return self.net(x)


class Skipping(nn.Module):
    """Skips half of its layers in every second forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net, self.calls = linears(width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.net(x) if self.calls % 2 else self.net[: len(self.net) // 2](x)
        return y


class Blocks(nn.Module):
    """Its loop attaches the list of blocks, which is never called itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(linears(width, 2) for _ in range(LAYERS // 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def by_transforms(ways: Callable[[int], int]) -> Callable[[Loop, Callable[[], Tensor]], Tensor]:
    """A step whose gradients come from backward (0), from torch.func.grad (1) or of each sample from vmap (2)."""

    def step(loop: Loop, gradients: Callable[[], Tensor]) -> Tensor:
        (net,), (opt,), way = loop.models, loop.opts, ways(loop.number)

        def loss_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return loop.loss(loop, torch.func.functional_call(net, params, (x,)))

        if way == 0:
            loss = gradients()
        else:
            grad = torch.func.grad_and_value(loss_of)
            of = torch.func.vmap(grad, in_dims=(None, 0)) if way == 2 else grad
            grads, losses = of({name: p.detach() for name, p in net.named_parameters()}, loop.batch())
            loss = losses.mean()
            for name, p in net.named_parameters():
                p.grad = grads[name].mean(0) if way == 2 else grads[name]
        opt.step()
        opt.zero_grad()
        return loss

    return step


def regularized(loop: Loop, y: Tensor) -> Tensor:
    return y.square().mean() + 1e-3 * sum(p.square().sum() for m in loop.models for p in m.parameters())


def clip(loop: Loop) -> None:
    nn.utils.clip_grad_norm_([p for m in loop.models for p in m.parameters()], 0.01)


def scaled(loop: Loop, gradients: Callable[[], Tensor]) -> Tensor:
    """A scaler, which skips a step where gradients overflow."""
    if loop.tool is None:
        loop.tool = torch.amp.GradScaler(loop.device, init_scale=256.0, growth_interval=2)
    scale, loss = loop.tool, loop.loss(loop, loop.forward(loop, loop.batch()))
    scale.scale(loss).backward()
    if loop.number == 3:
        next(loop.models[0].parameters()).grad.fill_(float("inf"))
    scale.unscale_(loop.opts[0])
    clip(loop)
    scale.step(loop.opts[0])
    scale.update()
    loop.opts[0].zero_grad()
    return loss.detach()


def by_closure(loop: Loop, gradients: Callable[[], Tensor]) -> Tensor:
    def closure() -> Tensor:
        loop.opts[0].zero_grad()
        return gradients()

    loss: Tensor = loop.opts[0].step(closure)
    return loss


def with_schedule(loop: Loop) -> None:
    if loop.number == 0:
        loop.tool = torch.optim.lr_scheduler.OneCycleLR(loop.opts[0], 0.05, total_steps=300)


def scheduled(loop: Loop) -> None:
    loop.tool.step()


def evaluate(loop: Loop) -> None:
    """In evaluation's mode without gradients; then in training's, without; a part alone; each has to be right."""
    model = loop.models[0]
    way = loop.number % 4
    with torch.no_grad():
        if way == 0:
            model.eval()
            loop.more.append(float(model(loop.batch()).sum()))
            model.train()
        elif way == 1:
            loop.more.append(float(model(loop.batch()).sum()))
        elif way == 2:
            loop.more.append(float(model[4](loop.batch()).sum()))


def halves(loop: Loop) -> list[Any]:
    params = list(loop.models[0].parameters())
    return [loop.adamw(params[: len(params) // 2]), loop.adamw(params[len(params) // 2 :], lr=0.007)]


def twice(loop: Loop) -> list[Any]:
    return [loop.adamw(loop.models[0].parameters()), loop.adamw(loop.models[0].parameters(), lr=0.007)]


def split(loop: Loop) -> None:
    opt = loop.opts[0]
    if loop.number == 3:
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2000, device=loop.device))], "lr": 0.1})
    if loop.number == 4:
        opt.param_groups[-1]["params"][0].grad = torch.ones(2000, device=loop.device)


LOOPS: dict[str, Loop] = {
    "plain": Loop(),
    "half of it resident": Loop(options={"device_budget": "50%"}),
    "tied": Loop(tied),
    "attention": Loop(lambda w: [Attention(w)], data=(2, 3)),
    "encoder": Loop(lambda w: [Encoder(w)], hook_plain=True, data=(2, 3)),
    "checkpoint": Loop(lambda w: [Checkpointed(w, False)]),
    "reentrant": Loop(lambda w: [Checkpointed(w, True)]),
    "accumulation": Loop(micro=3),
    "clipping": Loop(between=clip),
    "scaler": Loop(step=scaled, enough=6),
    "schedule": Loop(before=with_schedule, behind=scheduled),
    "closure": Loop(step=by_closure),
    "old weight_norm": Loop(normed(nn.utils.weight_norm)),
    "new weight_norm": Loop(normed(nn.utils.parametrizations.weight_norm)),
    "spectral_norm": Loop(normed(nn.utils.parametrizations.spectral_norm)),
    "functional": Loop(lambda w: [Functional(w)]),
    "late": Loop(lambda w: [Late(w)], enough=7),
    "regularizer": Loop(lambda w: [Skipping(w)], loss=regularized, enough=4),
    "evaluation": Loop(behind=evaluate, enough=5),
    "two models": Loop(lambda w: [linears(w), linears(w, 9)]),
    "two optimizers": Loop(optimizers=halves),
    "two over the same": Loop(optimizers=twice, enough=6),
    "a group more": Loop(before=split, enough=6),
    "encoder outside": Loop(
        lambda w: [linears(w, 9), linears(w)], attach=lambda loop: loop.models[1:], enough=4, outside=18
    ),
    "blocks alone": Loop(lambda w: [Blocks(w)], attach=lambda loop: [loop.models[0].blocks], outside=4),  # type: ignore[list-item]
    "transforms": Loop(step=by_transforms(lambda number: number % 3), enough=5),
    "recorded in a transform": Loop(lambda w: [Functional(w)], step=by_transforms(lambda number: int(number == 0))),
}
