"""What users do with state dicts, copies and budgets: tables as those of ``tests/acts.py``, which takes them in."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from optim_support import through_file

from tests.world import Act, World


def budget(value: Any) -> Act:
    return lambda w: None if w.side.share is None else w.optimizer.set_device_budget(value)


def spill(w: World) -> None:
    if w.ours:
        w.optimizer.spill()
        w.paged = True


def load(through: Callable[[Any], Any]) -> Act:
    """The optimizer goes on with what becomes of its own state dict."""
    return lambda w: w.optimizer.load_state_dict(through(w.optimizer.state_dict()))


def exchange(through: Callable[[Any], Any]) -> Act:
    """A copy of the optimizer and its parameters goes on."""

    def act(w: World) -> None:
        w.optimizer, w.params = through((w.optimizer, w.params))

    return act


def renew(through: Callable[[Any, World], Any]) -> Act:
    """A new optimizer, of another learning rate, goes on with what has become of the state dict of the old one."""

    def act(w: World) -> None:
        saved = through(w.optimizer.state_dict(), w)
        groups = [{"params": group["params"], "lr": 1.0} for group in w.groups]
        w.optimizer = w.case.make(not w.ours, groups, **w.options)
        w.optimizer.load_state_dict(saved)

    return act


def by_way_of_torch(**flags: Any) -> Callable[[Any, World], Any]:
    """Torch's optimizer loads it with these flags, where its class has them, and saves it."""

    def through(saved: Any, w: World) -> Any:
        known = {name: flag for name, flag in flags.items() if name in w.case.known}
        theirs = w.case.make(True, [{"params": group["params"]} for group in w.groups])
        theirs.load_state_dict({**saved, "param_groups": [{**group, **known} for group in saved["param_groups"]]})
        return theirs.state_dict()

    return through


def with_counts(kind: Callable[[float], Any]) -> Callable[[Any, World], Any]:
    """Step counts (and the products of NAdam) of another kind, as numbers in torch before 1.12."""
    old = ("step", "mu_product")

    def through(saved: Any, w: World) -> Any:
        entries = {i: {n: kind(float(v)) if n in old else v for n, v in e.items()} for i, e in saved["state"].items()}
        return {**saved, "state": entries}

    return through


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


#: What brings state home: nothing of it lies outside of the budget then.
HOME: dict[str, Act] = {
    "budget 0": budget(0), "load": load(lambda saved: saved), "load a copy": load(copy.deepcopy),
    "load a pickle": load(pickled),
}  # fmt: skip
MOVES: dict[str, Act] = {
    **HOME, "budget None": budget(None), "budget 100 kB": budget("100kB"),
    "spill": spill, "unspill": lambda w: w.ours and w.optimizer.unspill(),
    "deepcopy": exchange(copy.deepcopy), "pickle": exchange(pickled),
    "a new one": renew(lambda saved, w: copy.deepcopy(saved)),
    "a new one by a file": renew(lambda saved, w: through_file(saved)),
    "a new one by way of torch": renew(by_way_of_torch()), "a new one as of old": renew(with_counts(float)),
}  # fmt: skip


def renamed(saved: Any) -> Any:
    """Parameters are named in the dict as somebody likes."""

    def name(i: int) -> int | str:
        return 9 - i if i % 2 else f"p{i}"

    groups = [{**group, "params": [*map(name, group["params"])]} for group in saved["param_groups"]]
    return {"state": {name(i): entry for i, entry in reversed(saved["state"].items())}, "param_groups": groups}


def entries(change: Callable[[dict[Any, Any]], dict[Any, Any]]) -> Act:
    """The optimizer loads its own dict with other entries; those of the second and third parameter are alike."""
    return load(lambda saved: {**saved, "state": {**saved["state"], **change(saved["state"])}})


def cast(*dtypes: torch.dtype) -> Act:
    """Parameters are cast, and state of before is loaded."""

    def act(w: World) -> None:
        for dtype in dtypes:
            saved = copy.deepcopy(w.optimizer.state_dict())
            for p in w.params:
                p.grad, p.data = None, p.data.to(dtype)
            w.optimizer.load_state_dict(saved)

    return act


def switch(on: bool) -> Callable[[Any], Any]:
    """The state dict of an optimizer with the other ``amsgrad``."""

    def through(saved: Any) -> Any:
        state = {i: {**entry, "max_exp_avg_sq": entry["exp_avg_sq"].clone()} for i, entry in saved["state"].items()}
        if not on:
            state = {i: {n: v for n, v in entry.items() if n != "max_exp_avg_sq"} for i, entry in state.items()}
        return {"state": state, "param_groups": [{**group, "amsgrad": on} for group in saved["param_groups"]]}

    return through


#: What a state dict brings.
LOADED: dict[str, Act] = {
    "load names": load(renamed),
    "load exchanged entries": entries(lambda state: {1: state[2], 2: state[1]}),
    "load an entry less": load(lambda saved: {**saved, "state": {i: e for i, e in saved["state"].items() if i != 1}}),
    "load behind a cast to bfloat16": cast(torch.bfloat16),
    "load behind a cast to float16": cast(torch.float16),
    "load behind a cast to float64": cast(torch.float64),
    "load behind a cast to bfloat16 and back": cast(torch.bfloat16, torch.float32),
    "a new one by way of torch's foreach": renew(by_way_of_torch(foreach=True)),
    "a new one by way of torch's fused": renew(by_way_of_torch(fused=True, foreach=None)),
    "a new one with counts of int": renew(with_counts(int)),
    "a new one with counts of NumPy": renew(with_counts(np.float32)),
    "a new one with counts of float64": renew(with_counts(lambda n: torch.tensor(n, dtype=torch.float64))),
    "a new one with counts of int64": renew(with_counts(lambda n: torch.tensor(int(n)))),
}
