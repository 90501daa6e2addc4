"""All loops: models, and what users do while an update is queued, between a step and the next forward.

What they read is in ``loop.more``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from often import long_but
from overlapped import LAYERS, Loop
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.optim.overlapped_found import FOUND
from tests.optim.overlapped_models import LOOPS, regularized

Act = Callable[[Loop], Any]
Join = Callable[[nn.Sequential], Any]


def total(tensors: Iterable[Any]) -> float:
    return float(sum(t.detach().double().abs().sum() for t in tensors if isinstance(t, torch.Tensor)))


def of_state(optimizer: Any) -> float:
    return total(value for entry in optimizer.state.values() for value in entry.values())


def of_dict(state: dict[str, Any]) -> float:
    return total(value for entry in state["state"].values() for value in entry.values())


def load_model(loop: Loop) -> None:
    state = loop.models[0].state_dict()
    loop.models[0].load_state_dict({key: value * 0.9 for key, value in state.items()})


def save_and_load(loop: Loop) -> None:
    """Both, through a file."""
    file = io.BytesIO()
    torch.save([loop.models[0].state_dict(), loop.opts[0].state_dict()], file)
    file.seek(0)
    model, optimizer = torch.load(file)
    loop.models[0].load_state_dict(model)
    loop.opts[0].load_state_dict(optimizer)


def load_optimizer(loop: Loop) -> None:
    state = copy.deepcopy(loop.opts[0].state_dict())
    state["param_groups"][0]["lr"] *= 0.9
    for entry in state["state"].values():
        entry["exp_avg"] *= 0.5
    loop.opts[0].load_state_dict(state)


def budget(loop: Loop) -> None:
    loop.opts[0].set_device_budget(("50%", 0)[loop.number % 2])


def spill(loop: Loop) -> None:
    if loop.number % 2:
        loop.opts[0].spill()
    else:
        loop.opts[0].unspill()


def add_group(loop: Loop) -> None:
    loop.models[0].append(nn.Linear(*[loop.batch().shape[-1]] * 2, device=loop.device))
    loop.opts[0].add_param_group({"params": list(loop.models[0][-1].parameters())})


def before_steps(loop: Loop) -> None:
    """A hook of the user's reads parameters, in a step without gradients, too."""
    if loop.number == 0:
        loop.opts[0].register_step_pre_hook(lambda *_: loop.more.append(total(loop.models[0].parameters())))
    loop.opts[0].step()


def behind_steps(loop: Loop) -> None:
    """A hook of the user's sees updated parameters."""
    if loop.number == 1:
        loop.opts[0].register_step_post_hook(lambda *_: loop.more.append(total(loop.models[0].parameters())))


def in_a_thread(loop: Loop) -> None:
    def evaluate() -> None:
        with torch.no_grad():
            loop.more.append(float(loop.models[0](loop.batch()).sum()))

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def average(loop: Loop) -> None:
    """An average of the weights, and everything else that nothing can see."""
    model, opt = loop.models[0], loop.opts[0]
    with opt.waited():
        params = list(model.parameters())
        with torch.no_grad():
            loop.tool = loop.tool or [p.clone() for p in params]
            torch._foreach_lerp_(loop.tool, params, 0.1)
            for p in params:
                p.clamp_(-0.2, 0.2)
        loop.more += [total(loop.tool), total(copy.deepcopy(model).parameters())]
        model.zero_grad(set_to_none=False)
        loop.more.append(float(model.forward(loop.batch()).sum().detach()))


def attach_again(loop: Loop) -> None:
    if loop.attached:
        loop.opts[0].detach()
        loop.opts[0].attach(loop.models[0])


def error_in_forward(loop: Loop) -> None:
    """Out of memory in the middle of a forward, and Ctrl-C in another."""
    error = (torch.OutOfMemoryError, KeyboardInterrupt)[loop.number % 2]

    def fails(*_: Any) -> None:
        raise error

    handle = loop.models[0][20].register_forward_pre_hook(fails)
    with contextlib.suppress(error):
        loop.models[0](loop.batch())
    handle.remove()


def part(loop: Loop) -> None:
    """A part of the model, with gradients, and its backward."""
    loop.models[0][:6](loop.batch()).sum().backward()


ACTS: dict[str, Act] = {
    "model.state_dict": lambda loop: loop.more.append(total(loop.models[0].state_dict().values())),
    "a part's state_dict": lambda loop: loop.more.append(total(loop.models[0][-2].state_dict().values())),
    "model.load_state_dict": load_model,
    "state_dict": lambda loop: loop.more.append(of_dict(loop.opts[0].state_dict())),
    "decoded_state_dict": lambda loop: loop.more.append(of_dict(loop.opts[0].decoded_state_dict())),
    "load_state_dict": load_optimizer,
    "both through a file": save_and_load,
    "set_device_budget": budget,
    "spill, unspill": spill,
    "memory_report": lambda loop: loop.more.append(loop.opts[0].memory_report().by_place.get("file", 0)),
    "add_param_group": add_group,
    "zero_grad to zeros": lambda loop: loop.opts[0].zero_grad(set_to_none=False),
    "zero_grad to None": lambda loop: loop.opts[0].zero_grad(),
    "deepcopy": lambda loop: loop.more.append(of_state(copy.deepcopy(loop.opts[0]))),
    "pickle": lambda loop: loop.more.append(of_state(pickle.loads(pickle.dumps(loop.opts[0])))),
    "hooks before steps": before_steps,
    "threads": in_a_thread,
    "waited": average,
    "cast and back": lambda loop: loop.models[0].double().float(),
    "share_memory": lambda loop: loop.models[0].share_memory(),
    "overlap_report": lambda loop: loop.opts[0].overlap_report(),
    "start": lambda loop: loop.opts[0].start(),
    "attach again": attach_again,
    "errors in the forward": error_in_forward,
    "a part of the model": part,
}  # fmt: skip
HOOKED = "hooks that run after step() may read parameters"
UNSEEN = (
    "no forward of an attached model was seen since the last step; attach() the modules that are called, for hooks see "
    "no other method of a model"
)
#: Why some steps are not queued.
PLAIN = {"hooks before steps": {UNSEEN: 3}}
#: Those that wait for nothing, or only for what they read.
HIDE = ("zero_grad to None", "overlap_report", "start", "errors in the forward", "threads")


# --- modules of an attached model change: what is read, and when ------------------------------------------------------


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 1.25 * weight


class Around(nn.Module):
    """A wrapped layer, whose weight is read and which is not called."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 1.5 * self.base.weight)


def parametrized(net: nn.Sequential) -> None:
    for i in (0, 20, -2):
        parametrize.register_parametrization(net[i], "weight", Scaled())


def wrap(net: nn.Sequential) -> None:
    net[4] = Around(net[4])  # type: ignore[arg-type]
    net[40] = Around(net[40])  # type: ignore[arg-type]


def clear(net: nn.Sequential) -> None:
    """As libraries do that have put hooks there themselves."""
    for module in net[2:30]:
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


def clear_behind(net: nn.Sequential) -> None:
    """Then nobody tells the end of the forward."""
    net._forward_hooks.clear()


def own_in_front(net: nn.Sequential) -> None:
    for module in net[2:20:2]:
        module.register_forward_pre_hook(lambda module, args: (args[0] * (1 + module.weight.mean()),), prepend=True)


def other_in_front(net: nn.Sequential) -> None:
    """A hook that reads another module."""
    last = net[-2]
    net[2].register_forward_pre_hook(lambda _, args: (args[0] + last.weight.mean(),), prepend=True)


def replace_weight(net: nn.Sequential) -> None:
    """Another parameter in the place of one; the optimizer still has the old one, and gets none anew."""
    net[10].weight = nn.Parameter(0.5 * net[10].weight.detach())


def tie(net: nn.Sequential) -> None:
    net[2].weight = net[-2].weight


#: By name: what is done, and whether it reads or writes parameters by hand, and so waits.
JOINS: dict[str, tuple[Join, bool]] = {
    "parametrization": (parametrized, True),
    "spectral_norm": (lambda net: parametrizations.spectral_norm(net[-2]), True),
    "a wrapped layer": (wrap, False),
    "cleared hooks": (clear, False),
    "cleared hooks behind": (clear_behind, False),
    "a hook in front": (own_in_front, False),
    "a hook in front that reads another": (other_in_front, False),
    "another weight": (replace_weight, True),
    "a weight that is tied": (tie, False),
}  # fmt: skip


def without_biases(width: int) -> list[nn.Module]:
    """A bias, updated behind the weight of its layer, would make its reader wait for that as well."""
    net = nn.Sequential(*[each for _ in range(LAYERS) for each in (nn.Linear(width, width, bias=False), nn.Tanh())])
    for layer in net[::2]:
        nn.init.xavier_normal_(layer.weight, gain=nn.init.calculate_gain("tanh"))  # else nothing comes out at the end
    return [net]


def joined(join: Join, waits: bool, plain: dict[str, int]) -> Loop:
    """A loop in which it is done once, while a step is queued, or, if it ``waits``, when none is any more."""

    def act(loop: Loop) -> None:
        if loop.number == 2:
            if waits:
                loop.opts[0].wait()
            with torch.random.fork_rng():
                join(loop.models[0])  # type: ignore[arg-type]

    return Loop(without_biases, behind=act, loss=regularized, enough=6, plain=plain)


TRAINED: dict[str, Loop] = {
    **LOOPS, **FOUND,
    **{name: Loop(behind=act, hides=name in HIDE, plain=PLAIN.get(name, {})) for name, act in ACTS.items()},
    "hooks behind steps": Loop(before=behind_steps, enough=4, hides=False, plain={HOOKED: 3}),
    **{f"joined: {name}": joined(join, waits, {}) for name, (join, waits) in JOINS.items()},
    **{
        f"joined when none is queued: {name}": joined(join, True, {UNSEEN: 1} if join is clear_behind else {})
        for name, (join, waits) in JOINS.items()
        if not waits
    },
}  # fmt: skip
#: Left to the long tests.
LONG = {
    "half of it resident", "checkpoint", "schedule", "new weight_norm", "spectral_norm",
    "two models", "two optimizers", "accumulation", "a group more",
    "recorded in a transform", "share_memory", "a part's state_dict", "decoded_state_dict", "both through a file",
    "spill, unspill", "attach again", "pickle", "joined: spectral_norm", "joined: a hook in front",
    "joined: another weight", "joined: a weight that is tied", *(name for name in TRAINED if "none is queued" in name),
}  # fmt: skip


def loop_of(name: str, **changes: Any) -> Loop:
    """A loop of :data:`TRAINED`, with changes."""
    return dataclasses.replace(TRAINED[name], **changes)


def often_and_long(names: Iterable[str]) -> list[Any]:
    return long_but(names, lambda name: name not in LONG)
