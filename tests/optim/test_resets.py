"""Ways in which people reset an optimizer between tasks, and parts of its content that they set."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from often import long_but
from optim_support import distance, model, train

from pagedopt import PagedAdamW, PagedSGD

Change = Callable[[Any], Any]


def params_of(opt: Any) -> list[torch.Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def begin_anew(opt: Any) -> None:
    """Groups are emptied and filled again."""
    params = params_of(opt)
    opt.state = defaultdict(dict)
    del opt.param_groups[:]
    opt.add_param_group({"params": params})


def zeros(opt: Any) -> dict[Any, Any]:
    return {p: {name: torch.zeros_like(value) for name, value in entry.items()} for p, entry in opt.state.items()}


def one_by_one(opt: Any) -> list[dict[str, Any]]:
    """A group for each parameter."""
    return [{**opt.param_groups[0], "params": [p], "lr": 0.01 * i} for i, p in enumerate(params_of(opt))]


RESETS: dict[str, Change] = {
    "another dict": lambda opt: setattr(opt, "state", defaultdict(dict)),
    "a plain dict": lambda opt: setattr(opt, "state", {}),
    "cleared": lambda opt: opt.state.clear(),
    "entries emptied": lambda opt: opt.state.update({p: {} for p in params_of(opt)}),
    "entries deleted": lambda opt: [opt.state.pop(p) for p in params_of(opt)],
    "zeros": lambda opt: setattr(opt, "state", defaultdict(dict, zeros(opt))),
    "the first state dict": lambda opt: opt.load_state_dict(opt.first),
    "groups anew": begin_anew,
    "state": lambda opt: opt.__setstate__({"state": defaultdict(dict)}),
    "state of zeros": lambda opt: opt.__setstate__({"state": defaultdict(dict, zeros(opt))}),
    "groups": lambda opt: opt.__setstate__({"param_groups": one_by_one(opt)}),
    "groups without flags": lambda opt: opt.__setstate__(
        {"param_groups": [{k: v for k, v in g.items() if k not in ("maximize", "foreach")} for g in opt.param_groups]}
    ),
    "defaults": lambda opt: [opt.__setstate__({"defaults": {**opt.defaults, "lr": 0.5}}), begin_anew(opt)],
    "another name": lambda opt: opt.__setstate__({"mine": 3}),
    "nothing": lambda opt: opt.__setstate__({}),
    "its own content": lambda opt: opt.__setstate__(opt.__getstate__()),
}


def outcome(kind: Any, change: Change, options: dict[str, Any]) -> Any:
    """Parameters, or the error, after training with three changes in between; and what is in the optimizer."""
    net = model(dtype=torch.float64)
    opt = kind(net.parameters(), lr=0.01, **options)
    opt.first = copy.deepcopy(opt.state_dict())
    try:
        train(net, opt, 3)
        change(opt)
        train(net, opt, 3, first=3)
        change(opt)
        change(opt)
        train(net, opt, 2, first=6)
    except Exception as error:
        return [], type(error)
    state = [(key, [*entry]) for key, entry in opt.state_dict()["state"].items()]
    return list(net.parameters()), (state, opt.defaults["lr"], vars(opt).get("mine"))


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (PagedAdamW, torch.optim.AdamW, {}),
    "sgd": (PagedSGD, torch.optim.SGD, {"momentum": 0.9}),
}
OPTIONS: list[dict[str, Any]] = [
    {}, {"device_budget": 0}, {"device_budget": "50%"}, {"preallocate": True}, {"max_grad_norm": 1e9},
    {"placement": "host"},
]  # fmt: skip
WORLDS = [(kind, options) for kind in KINDS for options in OPTIONS]
OFTEN = WORLDS[:6:2] + WORLDS[7::2]


@pytest.mark.filterwarnings("ignore:.*outside of what device_budget:RuntimeWarning")
@pytest.mark.parametrize("world", long_but(WORLDS, OFTEN.__contains__), ids=str)
def test_a_reset_does_what_torch_s_does(world: tuple[str, dict[str, Any]]) -> None:
    kind, options = world
    ours, theirs, hyper = KINDS[kind]
    for name, change in RESETS.items():
        want, content = outcome(theirs, change, hyper)
        params, found = outcome(ours, change, {**hyper, **options})
        assert found == content, name
        assert not want or distance(params, want) < 1e-9, name


def test_adams_weight_decay_that_parts_of_a_content_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's AdamW sets the flag of the groups that there are."""
    monkeypatch.setattr("pagedopt.system.warn._said", set())
    opt = PagedAdamW(model().parameters(), weight_decay=0.1)
    opt.param_groups[0]["decoupled_weight_decay"] = False
    with pytest.warns(RuntimeWarning, match="decoupled_weight_decay is False"):
        opt.__setstate__({"state": defaultdict(dict)})
    assert opt.param_groups[0]["decoupled_weight_decay"]
