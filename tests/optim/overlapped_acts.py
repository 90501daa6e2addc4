"""What users do between a step and the next forward, while an update is queued; what they read is in ``loop.more``."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from overlapped import Loop
from torch import nn

Act = Callable[[Loop], Any]


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
#: Left to the long tests.
LONG = (
    "share_memory",
    "a part's state_dict",
    "decoded_state_dict",
    "both through a file",
    "spill, unspill",
    "attach again",
    "pickle",
)
#: Those that wait for nothing, or only for what they read.
HIDE = ("zero_grad to None", "overlap_report", "start", "errors in the forward", "threads")
