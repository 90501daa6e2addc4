"""Entries that wrappers keep in ``optimizer.state`` beside its own: loads and copies treat them as torch's do.

TRAC, Lookahead with pullback and Schedule-Free do so, under keys of their own or in the entries of parameters.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from often import long_but
from optim_support import COPIES, step_on_ones, through_file

from pagedopt import PagedAdamW, PagedLion, PagedSGD

Params = list[torch.nn.Parameter]
Put = Callable[[Any, Params], Any]

OWN = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


def full(like: torch.Tensor, value: float = 2.0) -> torch.Tensor:
    return torch.full_like(like, value, requires_grad=False)


def wide(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def beside(**values: Callable[[Any, Params], Any]) -> Put:
    """Puts values under keys of their own."""
    return lambda opt, params: opt.state.update({key: make(opt, params) for key, make in values.items()})


def within(**values: Callable[[torch.Tensor], Any]) -> Put:
    """Puts values into the entry of each parameter."""
    return lambda opt, params: [opt.state[p].update({k: make(p) for k, make in values.items()}) for p in params]


def by_parameter(_: Any, params: Params) -> dict[Any, Any]:
    return {p: full(p) for p in params}


def moments(opt: Any, params: Params) -> dict[Any, Any]:
    """The optimizer's own state, in a container of a wrapper."""
    return {p: {name: t for name, t in opt.state[p].items() if name != "step"} for p in params}


def ring(*_: Any) -> list[Any]:
    """A list that holds itself."""
    made: list[Any] = [3]
    made.append(made)
    return made


def shared(opt: Any, params: Params) -> None:
    """One tensor, and a part of it, in several places."""
    whole = torch.arange(6.0)
    opt.state["whole"], opt.state["again"] = whole, {"whole": [whole], "part": whole[2:4]}
    opt.state[params[0]] |= {"whole": whole, "parts": [whole, {"part": whole[1:]}]}


def of_another_parameter(opt: Any, params: Params) -> None:
    p, _, q = params  # of one dtype
    opt.state[p] |= {q: torch.ones(2), "other": q, "both": [p, {q: p}], "moments": moments(opt, [q])}


def names_of_other_rules(opt: Any, params: Params) -> None:
    for p in params:
        names = {"max_exp_avg_sq", "exp_avg", "exp_avg_sq", "momentum_buffer"} - opt.state[p].keys()
        opt.state[p] |= {name: full(p) for name in sorted(names)}


PUTS: dict[str, Put] = {
    "by parameter": beside(trac=lambda o, ps: {**by_parameter(o, ps), "step": 3, "s": torch.ones(6)}),
    "parameters": beside(frozen=lambda _, ps: list(ps), some=lambda _, ps: {ps[0]}, none=lambda *_: ()),
    "nested": beside(a=lambda o, ps: {"b": [({ps[0]: (ps[1], full(ps[0]))}, by_parameter(o, ps))], "c": ps[0]}),
    "no containers": beside(fn=lambda *_: len, none=lambda *_: None, n=lambda *_: 3, text=lambda *_: "text"),
    "mappings": beside(
        ordered=lambda o, ps: OrderedDict(by_parameter(o, ps)), lists=lambda *_: defaultdict(list, {"a": [wide(2)]})
    ),
    "tensors": beside(wide=lambda *_: wide(3), whole=lambda *_: torch.arange(3), away=lambda *_: wide(2).to("meta")),
    "odd tensors": beside(
        sparse=lambda *_: {"s": torch.eye(2).to_sparse()}, empty=lambda *_: {"e": torch.empty(0)},
        away=lambda *_: {"m": wide(2).to("meta")}, graph=lambda _, ps: {"g": ps[0] * 2},
    ),
    "objects": beside(net=lambda *_: torch.nn.Linear(2, 2), array=lambda _, ps: {ps[0]: np.ones(2)}),
    "no copies": beside(lock=lambda *_: threading.Lock(), locks=lambda *_: [threading.Lock()]),
    "a ring": beside(ring=ring),
    "own state": beside(moments=moments, ours=lambda o, ps: [*o.state[ps[0]].values()][-1]),
    "names of bitsandbytes": beside(them=lambda *_: {"state1": torch.ones(2), "qmap1": torch.ones(2)}),
    "shared": shared,
    "of another parameter": of_another_parameter,
    "names of other rules": names_of_other_rules,
    "like the parameter": within(slow=full, z=lambda p: full(p, 3.0)),
    "cast": within(wide=lambda _: wide(3), whole=lambda _: torch.arange(3), state1=lambda _: wide(2)),
    "nested, cast": within(
        a=lambda _: {"step": wide(1), "b": [wide(2), 3, None], "c": {wide}}, c=lambda p: (wide(2), p),
        d=lambda p: deque([full(p), [wide(1)]]),
    ),
    "within": within(fn=lambda _: len, none=lambda _: None, flag=lambda _: True, ref=lambda p: p, refs=lambda p: {p}),
    "no copies within": within(lock=lambda _: threading.Lock()),
}  # fmt: skip


def again(both: Any, through: Callable[[Any], Any] = lambda saved: saved) -> Any:
    both[0].load_state_dict(through(both[0].state_dict()))
    return both


WAYS: dict[str, Callable[[Any], Any]] = {
    "load": again,
    "load from a file": lambda both: again(both, lambda saved: through_file(saved, weights_only=False)),
    **COPIES,
}


class Look:
    """Describes what is in ``optimizer.state``: values, and what is the same object as what.

    Args:
        before: names of objects by their ids.
    """

    def __init__(self, opt: Any, params: Params, before: dict[int, str]) -> None:
        self.before, self.met, self.alive = before, dict[int, str](), list[Any]()
        own = {(i, n): opt.state[p][n] for i, p in enumerate(params) for n in OWN if n in opt.state[p]}
        self.known = {id(tensor): f"own {name}" for name, tensor in own.items()}
        self.known |= {id(p): f"parameter {i}" for i, p in enumerate(params)}
        entries = [[(self(k), self(v)) for k, v in opt.state[p].items()] for p in params]
        self.found = [*entries, *((k, self(v)) for k, v in opt.state.items() if isinstance(k, str))]

    def __call__(self, value: Any) -> Any:
        if type(value) in (int, float, bool, str, type(None)):
            return value
        if (name := self.known.get(id(value)) or self.met.get(id(value))) is not None:
            return name
        self.alive.append(value)
        self.met[id(value)] = f"met {len(self.met)}"
        return self.before.get(id(value)), type(value).__name__, self.content(value)

    def content(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            about = value.dtype, str(value.device), value.layout, value.shape, value.requires_grad
            return about if value.is_meta or value.requires_grad else (*about, value.to_dense().tolist())
        if isinstance(value, dict):
            return [(self(key), self(item)) for key, item in value.items()]
        if isinstance(value, list | tuple | deque | set):
            return [self(item) for item in value]
        return value.tolist() if isinstance(value, np.ndarray) else None


def made(kind: Any, options: dict[str, Any]) -> tuple[Any, Params]:
    params = [torch.nn.Parameter(torch.ones(n).to(t)) for n, t in ((99, torch.float32), (33, torch.bfloat16))]
    params.append(torch.nn.Parameter(torch.ones(5)))
    opt = kind(params, lr=1e-2, **options)
    step_on_ones(opt)
    return opt, params


def outcome(kind: Any, options: dict[str, Any], put: Put, way: str) -> Any:
    """What is there after a load or in a copy, which then takes a step; or the error."""
    opt, params = made(kind, options)
    put(opt, params)
    first = Look(opt, params, {})
    try:
        opt, params = WAYS[way]((opt, params))
    except Exception as error:
        return type(error)
    found = Look(opt, params, first.met).found
    step_on_ones(opt)
    return found


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (PagedAdamW, torch.optim.AdamW, {}),
    "sgd": (PagedSGD, torch.optim.SGD, {"momentum": 0.9}),
}
PLACES: dict[str, dict[str, Any]] = {"resident": {}, "away": {"device_budget": 0}}
WORLDS = [*itertools.product(WAYS, KINDS, PLACES)]


@pytest.mark.parametrize("world", long_but(WORLDS, lambda w: (w[1] == "adamw") is (w[2] == "away")), ids="-".join)
def test_extras_are_taken_over_as_torch_takes_them(world: tuple[str, str, str]) -> None:
    way, kind, place = world
    ours, theirs, hyper = KINDS[kind]
    for name, put in PUTS.items():
        want = outcome(theirs, hyper, put, way)
        assert outcome(ours, {**hyper, **PLACES[place]}, put, way) == want, name


class Pair(NamedTuple):
    one: Any
    other: Any


def test_in_an_entry_is_kept_what_torch_breaks() -> None:
    """torch takes an iterable apart: a text becomes that of a generator, and others raise."""
    opt, params = made(PagedAdamW, {})
    values = {"text": "mine", "bytes": b"mine", "array": np.arange(3.0), "pair": Pair(1, 2), "float32": params[0]}
    opt.state[params[1]] |= values
    opt.load_state_dict(opt.state_dict())
    assert all(opt.state[params[1]][name] is value for name, value in values.items())


@pytest.mark.parametrize("place", PLACES)
def test_an_extra_that_lies_where_a_load_writes_keeps_its_values(place: str) -> None:
    opt, params = made(PagedAdamW, PLACES[place])
    saved, (p, *_) = copy.deepcopy(opt.state_dict()), params
    before = opt.state[p]["exp_avg"].clone()
    saved["state"][0] |= {"exp_avg": torch.zeros(99), "before": opt.state[p]["exp_avg"]}
    saved["state"]["before"] = [opt.state[p]["exp_avg"][3:5]]
    opt.load_state_dict(saved)
    assert torch.equal(opt.state[p]["exp_avg"], torch.zeros(99))
    assert torch.equal(opt.state[p]["before"], before)
    assert torch.equal(opt.state["before"][0], before[3:5])


def test_extras_beside_no_state_are_refused() -> None:
    opt, params = made(PagedAdamW, {})
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0] = {"z": torch.ones(99), params[1]: 3}
    with pytest.raises(ValueError, match=r"parameter 0 has no step, exp_avg, exp_avg_sq; it has z$"):
        opt.load_state_dict(saved)


def test_of_another_optimizer_is_what_makes_its_state_whole() -> None:
    """AdamW's state is no Lion's with an extra; ``momentum_buffer`` beside Lion's is an extra."""
    p = torch.nn.Parameter(torch.ones(5000))
    lion, theirs = PagedLion([p]), PagedAdamW([p], state_format="int8")
    step_on_ones(lion)
    step_on_ones(theirs)
    for others in (theirs.state_dict()["state"][0], theirs.decoded_state_dict()["state"][0]):
        others = {key: value for key, value in others.items() if key.startswith("exp_avg_sq")}
        saved = lion.state_dict()
        saved["state"][0] = {**saved["state"][0], **others}
        with pytest.raises(ValueError, match=f"has {', '.join(others)}, which no rule of PagedLion has"):
            lion.load_state_dict(saved)
    saved = lion.state_dict()
    saved["state"][0] = {**saved["state"][0], "momentum_buffer": full(p), "max_exp_avg_sq": full(p)}
    lion.load_state_dict(saved)
    assert lion.state[p].keys() == {"exp_avg", "momentum_buffer", "max_exp_avg_sq"}
