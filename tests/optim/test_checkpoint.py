"""Loading state: what does not fit is refused and changes nothing; what fits is copied, and nothing else is kept."""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from file_support import mapping_rss
from optim_support import ADAMW, same, step_on_ones, train, trained
from stand_ins import raising

import pagedopt
from pagedopt import PagedAdamW, PagedOptimizer
from pagedopt.optim import load
from pagedopt.placements.store import find

StateDict = dict[str, Any]


def photograph(opt: torch.optim.Optimizer) -> Any:
    """All that a failed load must not change: objects, values and addresses, and what hooks there are."""
    hooks = {k: dict(v) for k, v in vars(opt).items() if k.endswith("_hooks")}
    objects = [id(opt.param_groups), id(opt.state), *map(id, opt.param_groups), sorted(vars(opt))]
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups])
    params = [[id(p) for p in g["params"]] for g in opt.param_groups]
    state = {id(p): {k: (id(v), v.data_ptr(), v.tolist()) for k, v in entry.items()} for p, entry in opt.state.items()}
    return hooks, objects, groups, params, state


def whole_dict() -> StateDict:
    return copy.deepcopy(trained()[1].state_dict())


def cut_off(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values.untyped_storage().resize_(values.nbytes - 1)
    return values


def entry(change: Callable[[dict[str, Any]], Any], index: int = 2) -> Callable[[StateDict], Any]:
    return lambda d: change(d["state"][index])


def mean(change: Callable[[torch.Tensor], Any], index: int = 2) -> Callable[[StateDict], Any]:
    """Another ``exp_avg``."""
    return entry(lambda e: e.update(exp_avg=change(e["exp_avg"])), index)


def count(value: Any) -> Callable[[StateDict], Any]:
    return entry(lambda e: e.update(step=value))


def group(change: Callable[[dict[str, Any]], Any]) -> Callable[[StateDict], Any]:
    return lambda d: change(d["param_groups"][0])


#: What happens to a state dict, and what is said of it.
HARMS: dict[str, tuple[Callable[[StateDict], Any], str]] = {
    "shape": (mean(lambda _: torch.zeros(7)), r"exp_avg of parameter 2 has shape \(7,\), the parameter"),
    "transposed": (mean(torch.t, 0), r"parameter 0 has shape \(13, 18\)"),
    "a name less": (entry(lambda e: e.pop("exp_avg_sq")), "parameter 2 has no exp_avg_sq; it has step, exp_avg"),
    "a name without value": (entry(lambda e: e.update(exp_avg_sq=None)), "has no exp_avg_sq"),
    "no step": (entry(lambda e: e.pop("step")), "parameter 2 has no step"),
    "of another rule": (
        lambda d: d["state"].update({2: {"momentum_buffer": d["state"][2]["exp_avg"]}}),
        "parameter 2 has no step, exp_avg, exp_avg_sq; it has momentum_buffer",
    ),
    "a list": (mean(torch.Tensor.tolist), "exp_avg of parameter 2 is list, not a tensor"),
    "integers": (mean(torch.Tensor.int), "parameter 2 is torch.int32"),
    "complex": (mean(lambda t: t * 1j), "parameter 2 is torch.complex64"),
    "sparse": (mean(torch.Tensor.to_sparse), "parameter 2 is .*torch.sparse_coo"),
    "meta": (mean(lambda t: t.to("meta")), "does not hold its values"),
    "double": (mean(torch.Tensor.double), "float64 and would be rounded to torch.float"),
    "cut off": (mean(cut_off), "exp_avg of parameter 2 does not hold"),
    "other, cut off": (entry(lambda e: e.update(other=cut_off(e["exp_avg"]))), "other of parameter 2 does not hold"),
    "step cut off": (count(cut_off(torch.ones(1))), "step of parameter 2 does not hold"),
    "steps": (count(torch.ones(2)), r"step of parameter 2 is a tensor of torch.float32, \(2,"),
    "step complex": (count(torch.tensor(1j)), "step of parameter 2 is a tensor of .*complex64"),
    "step true": (count(True), "step of parameter 2 is True"),
    "step text": (count("3"), "step of parameter 2 is '3'"),
    "no entry but a tensor": (lambda d: d["state"].update({2: torch.ones(3)}), "state of parameter 2 is a Tensor"),
    "a parameter twice": (group(lambda g: g["params"].__setitem__(2, 1)), "name a parameter twice"),
    "no betas": (group(lambda g: g.pop("betas")), "loaded group 0 has no betas"),
    "a parameter less": (group(lambda g: g["params"].pop()), "doesn't match the size"),
    "a parameter more": (group(lambda g: g["params"].append(4)), "doesn't match the size"),
    "a group more": (lambda d: d["param_groups"].append({**d["param_groups"][0], "params": []}), "different number of"),
    "a group less": (lambda d: d["param_groups"].pop(), "different number of"),
    "no groups": (lambda d: d.pop("param_groups"), "no state dict of an optimizer: .* and has 'state'"),
    "no parameters": (group(lambda g: g.pop("params")), "loaded group 0 has no list of parameters"),
    "no state": (lambda d: d.pop("state"), "no state dict of an optimizer: .* and has 'param_groups'"),
    "the whole checkpoint": (lambda d: d.update(model={}, optimizer=d.pop("state")), "has 'param_groups', 'model'"),
    "amsgrad": (group(lambda g: g.update(amsgrad=True)), "parameter 0 has no max_exp_avg_sq"),
}


#: Those that torch refuses so, too.
KEY_ERRORS = ("no groups", "no parameters", "no state", "the whole checkpoint")


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", HARMS)
def test_what_does_not_fit_raises_and_changes_nothing(name: str, steps: int) -> None:
    harm, message = HARMS[name]
    state_dict = whole_dict()
    state_dict["param_groups"][0]["lr"] = 99.0
    harm(state_dict)
    net, opt = trained(steps)
    opt.register_load_state_dict_post_hook(lambda _: pytest.fail("nothing was loaded"))
    before = photograph(opt)
    with pytest.raises(ValueError, match=message) as caught:
        opt.load_state_dict(state_dict)
    assert isinstance(caught.value, KeyError) == (name in KEY_ERRORS)
    assert photograph(opt) == before
    train(net, opt, 2, first=steps)
    assert same(net.parameters(), trained(steps + 2)[0].parameters())


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    x, y = a.state_dict()["state"], b.state_dict()["state"]
    return x.keys() == y.keys() and all(
        list(x[k]) == list(y[k]) and all(x[k][n].dtype == y[k][n].dtype and torch.equal(x[k][n], y[k][n]) for n in x[k])
        for k in x
    )


@pytest.mark.parametrize("steps", [0, 2])
def test_a_failure_behind_the_check_of_a_dict_changes_nothing(steps: int) -> None:
    class Own(PagedAdamW):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            self.mark = 1
            raise MemoryError

    _, opt = trained(steps, Own)
    before, arenas = photograph(opt), list(opt.store.arenas)
    with pytest.raises(MemoryError):
        opt.load_state_dict(whole_dict())
    assert photograph(opt) == before
    assert opt.store.arenas == arenas, "memory made for a load that failed is held"


def test_a_copy_that_fails_leaves_damage_which_a_whole_load_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    net, opt = trained(2)
    with monkeypatch.context() as patch:
        patch.setattr(load, "copy_values", raising(OSError("the disk")))
        with pytest.raises(OSError, match="the disk"):
            opt.load_state_dict(whole_dict())
    for refused in (opt.step, opt.state_dict, lambda: pickle.dumps(opt), lambda: copy.deepcopy(opt)):
        with pytest.raises(RuntimeError, match="damaged"):
            refused()
    opt.load_state_dict(whole_dict())
    train(net, opt, 1, first=3)


def test_hooks_are_what_they_were_and_one_that_fails_behind_the_load_undoes_nothing() -> None:
    _, opt = trained(3)
    _, other = trained(5)
    opt.register_load_state_dict_post_hook(raising(KeyError("mine")))
    hooks = photograph(opt)[0]
    with pytest.raises(KeyError, match="mine"):
        opt.load_state_dict(other.state_dict())
    assert photograph(opt)[0] == hooks
    assert same_state(opt, other)


@pytest.mark.parametrize("steps", [0, 2])
def test_no_tensor_that_a_rule_names_is_kept_of_the_loaded_dict(steps: int) -> None:
    state_dict = whole_dict()
    state_dict["param_groups"][0]["lr"] = torch.tensor(0.1)
    _, opt = trained(steps)
    opt.load_state_dict(state_dict)
    tensors = [t for e in state_dict["state"].values() for t in e.values()] + [state_dict["param_groups"][0]["lr"]]
    watched = [weakref.ref(t.untyped_storage()) for t in tensors] + [weakref.ref(t) for t in tensors]
    theirs = {t.untyped_storage().data_ptr() for t in tensors}
    ours = {t.untyped_storage().data_ptr() for e in opt.state.values() for t in e.values()}
    assert not theirs & ours
    del state_dict, tensors
    assert not [w for w in watched if w() is not None]


def test_state_keeps_its_addresses_and_what_is_missing_is_made_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    state_dict = whole_dict()
    for key, values in state_dict["state"].items():  # in another order than the rule's
        state_dict["state"][key] = dict(reversed(values.items()))
    net, opt = trained(1)
    params = list(net.parameters())
    addresses = [opt.state[p][name].data_ptr() for p in params for name in ("exp_avg", "exp_avg_sq")]
    asked: list[Any] = []
    create = opt.store.create
    monkeypatch.setattr(opt.store, "create", lambda wanted: asked.append(wanted) or create(wanted))
    opt.load_state_dict(state_dict)
    assert [opt.state[p][name].data_ptr() for p in params for name in ("exp_avg", "exp_avg_sq")] == addresses
    assert opt.state_dict()["state"][0]["exp_avg"] is opt.state[params[0]]["exp_avg"], "it is no copy"
    assert asked == []
    for p in params[1:3]:
        del opt.state[p]
    opt.load_state_dict(state_dict)
    assert [[(one.param.shape, one.key, one.column.dtype) for one in wanted] for wanted in asked] == [
        [(p.shape, name, torch.float32) for p in params[1:3] for name in ("exp_avg", "exp_avg_sq")]
    ]
    assert [list(opt.state[p]) for p in params] == [["step", "exp_avg", "exp_avg_sq"]] * 4


@pagedopt.rule
def running_sum(param, grad, state1, *, lr):  # type: ignore[no-untyped-def]
    """State by the name that bitsandbytes uses."""
    state1 = state1 + grad
    param = param - lr * state1
    return param, state1


def test_a_rule_of_ones_own_loads_what_it_saved() -> None:
    class Sum(PagedOptimizer):
        rule = running_sum

        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            super().__init__(params, {"lr": lr})

    net, opt = trained(3, Sum, {"lr": 0.01})
    again = Sum(net.parameters())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert same_state(again, opt)
    assert list(opt.state_dict()["state"][0]) == ["step", "state1"]
    with pytest.raises(ValueError, match="parameter 0 has no state1"):
        opt.load_state_dict(whole_dict())


PLACES: list[dict[str, Any]] = [{}, {"device_budget": 0}, {"device_budget": "50%"}, {"state_format": "bfloat16"}]


class Full(Exception):
    """What copying stops with."""


def stopped_load(opt: PagedAdamW, saved: dict[str, Any], after: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a load has copied that was stopped behind so many copies."""
    copied, plain = 0, load._copy

    def copy_some(*given: Any) -> None:
        nonlocal copied
        if copied == after:
            raise Full
        copied += 1
        plain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(load, "_copy", copy_some)
        patch.setattr(load, "STAGING_BYTES", 4096)
        with contextlib.suppress(Full):
            opt.load_state_dict(copy.deepcopy(saved))
    return copied


@pytest.mark.parametrize("options", PLACES, ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_load_that_stopped_in_the_middle_is_mended_in_the_room_there_is(
    steps: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops: the next load makes no state, as that of a healthy optimizer makes none."""
    net, opt = trained(steps, **options)
    _, other = trained(4)
    saved = other.state_dict()
    whole = stopped_load(trained(steps, **options)[1], saved, 1 << 30, monkeypatch)
    assert whole > 4
    for after in (1, whole // 2, whole - 1):
        assert stopped_load(opt, saved, after, monkeypatch) == after
        assert "load" in opt.damaged
        there = {p: dict(entry) for p, entry in opt.state.items()}
        arenas = list(opt.store.arenas)
        assert [set(entry) for entry in there.values()] == [{"step", "exp_avg", "exp_avg_sq"}] * 4
        with monkeypatch.context() as patch:
            patch.setattr(type(opt.store), "create", lambda *_: pytest.fail("a second copy of state"))
            opt.load_state_dict(copy.deepcopy(saved))
        assert opt.damaged == ""
        assert opt.store.arenas == arenas
        for p, entry in opt.state.items():
            assert all(entry[name] is there[p][name] for name in ("exp_avg", "exp_avg_sq"))
        loaded = opt.decoded_state_dict()["state"]
        for key, entry in saved["state"].items():
            for name, value in entry.items():
                torch.testing.assert_close(loaded[key][name], value.to(loaded[key][name].dtype))
    train(net, opt, 1, first=3)


# --- hooks behind a state dict: what they see, and what is returned ---------------------------------------------------


@pytest.mark.parametrize("returned", [{"mine": 1}, [], {"param_groups": 7, "state": None}, None], ids=str)
@pytest.mark.parametrize(("kind", "save"), [(torch.optim.AdamW, "state_dict"), (PagedAdamW, "state_dict"),
                                            (PagedAdamW, "decoded_state_dict")])  # fmt: skip
def test_what_a_hook_on_state_dict_returns_is_returned(kind: Any, save: str, returned: Any) -> None:
    """The object itself, whatever it is; without one, the dict that hooks saw and may have changed."""
    _, opt = trained(1, kind)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "state_format": "int8", "rounding": "nearest"})
    seen: list[Any] = []
    opt.register_state_dict_post_hook(lambda _, found: seen.append(found) or found.update(note=3))
    opt.register_state_dict_post_hook(lambda _, found: seen.append(found) or returned)
    found = getattr(opt, save)()
    assert seen[0] is seen[1]
    assert found is (seen[0] if returned is None else returned)
    assert seen[0]["note"] == 3
    if kind is PagedAdamW:
        assert not any("state_format" in group for group in seen[0]["param_groups"])
        assert {"state_format", "rounding"} < opt.param_groups[-1].keys(), "the optimizer's own group"
    assert len(opt._optimizer_state_dict_post_hooks) == 2


def with_codes() -> PagedAdamW:
    opt = PagedAdamW([torch.nn.Parameter(torch.ones(70, 70))], state_format="int8")
    state = {"step": 1, "exp_avg": torch.ones(70, 70), "exp_avg_sq": torch.ones(70, 70)}
    opt.load_state_dict({**opt.state_dict(), "state": {0: state}})
    return opt


def test_hooks_on_state_dict_see_decoded_state_where_that_is_asked_for() -> None:
    opt = with_codes()
    opt.register_state_dict_post_hook(lambda _, found: list(found["state"][0]))
    assert opt.decoded_state_dict() == ["step", "exp_avg", "exp_avg_sq"]
    assert opt.state_dict()[1:3] == ["exp_avg.root3", "exp_avg.absmax"]


def test_an_interrupt_of_decoding_leaves_codes_in_later_state_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that comes when torch has the hook that decodes, and nobody has what would take it back."""
    opt = with_codes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.hooks.RemovableHandle, "__enter__", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            opt.decoded_state_dict()
    assert list(opt.state_dict()["state"][0])[1:3] == ["exp_avg.root3", "exp_avg.absmax"]


# --- values arrive whatever their layout and dtype, where the state is and as it is stored, block by block ------------


SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as the parameter": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "columns first": lambda t: t.permute(list(range(t.dim()))[::-1]).contiguous().permute(list(range(t.dim()))[::-1]),
    "with gaps": lambda t: torch.stack([t, t], -1)[..., 1],
    "narrower": lambda t: t.bfloat16(),
    "expanded": lambda t: torch.ones(()).expand(t.shape),
    "a leaf of a graph": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("chunk", [64, 16 << 20])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_arrive_whatever_the_layout_in_blocks_of_a_chunk(
    layout: torch.memory_format, source: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "STAGING_BYTES", chunk)
    shapes = [(4, 3, 2, 5), (3, 1, 40, 1), (0, 2, 2, 2)]
    params = [torch.nn.Parameter(torch.randn(s).to(memory_format=layout)) for s in shapes]
    params += [torch.nn.Parameter(torch.randn(s)) for s in ((), (1,), (200,), (2, 100))]
    state = {
        i: {"step": 4, **{name: SOURCES[source](torch.randn_like(p).detach()) for name in ("exp_avg", "exp_avg_sq")}}
        for i, p in enumerate(params)
    }
    opt = PagedAdamW(params)
    blocks: list[torch.Tensor] = []
    copy_block = load._copy
    monkeypatch.setattr(load, "_copy", lambda block, *rest: blocks.append(block) or copy_block(block, *rest))
    opt.load_state_dict({**opt.state_dict(), "state": state})
    for i, p in enumerate(params):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[p][name], state[i][name].float())
            assert opt.state[p][name].stride() == p.stride() or not p.numel()
    assert all(b.is_contiguous() and b.nbytes <= chunk for b in blocks)
    assert sum(b.numel() for b in blocks) == 2 * sum(p.numel() for p in params)


def test_loading_keeps_memory_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 256 << 10
    monkeypatch.setattr(load, "STAGING_BYTES", chunk)
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (300_000, 7, 200_000)]
    values = {name: [torch.randn_like(p).detach() for p in params] for name in ("exp_avg", "exp_avg_sq")}
    state = {i: {"step": 1, **{name: v[i] for name, v in values.items()}} for i in range(3)}
    opt = PagedAdamW(params, placement="file", device_budget=0)
    in_memory: list[int] = []
    copy_block = load._copy

    def watched(*given: Any) -> None:
        copy_block(*given)
        in_memory.extend(mapping_rss(a.tensor.data_ptr(), a.tensor.nbytes) for a in opt.store.arenas)

    monkeypatch.setattr(load, "_copy", watched)
    opt.load_state_dict({**opt.state_dict(), "state": state})
    assert chunk // 2 < max(in_memory) <= 3 * chunk
    assert opt.memory_report().measured.get("host", 0) == 0
    assert all(torch.equal(opt.state[p][name], values[name][i]) for i, p in enumerate(params) for name in values)


def test_state_that_no_longer_fits_its_parameter_is_made_anew() -> None:
    image = torch.ones(4, 3, 2, 2)
    for before, data in ((torch.ones(12), torch.ones(9)), (image, image.to(memory_format=torch.channels_last))):
        p = torch.nn.Parameter(before)
        opt = PagedAdamW([p])
        step_on_ones(opt)
        p.data = data
        state = {0: {"step": 1, "exp_avg": torch.rand_like(data), "exp_avg_sq": torch.rand_like(data)}}
        opt.load_state_dict({**opt.state_dict(), "state": state})
        assert opt.state[p]["exp_avg"].stride() == data.stride()
        assert torch.equal(opt.state[p]["exp_avg"], state[0]["exp_avg"])
        step_on_ones(opt)


@pytest.mark.parametrize("how", ["load", "budget"])
@pytest.mark.parametrize("names", [("exp_avg_sq",), ("exp_avg", "exp_avg_sq")], ids=str)
def test_state_that_was_put_apart_comes_together_and_what_it_left_is_gone(names: tuple[str, ...], how: str) -> None:
    params = [torch.nn.Parameter(torch.rand(50_000)) for _ in range(2)]
    opt = PagedAdamW(params, placement="file", device_budget="50%", **ADAMW)
    for p in params:
        p.grad = torch.rand_like(p)
    opt.step()
    for entry in opt.state.values():
        entry.update({name: entry[name].clone() for name in names})
    saved = copy.deepcopy(opt.state_dict())
    if how == "load":
        opt.load_state_dict(saved)
    else:
        opt.set_device_budget("50%")
    assert len(opt.store.arenas) == 1
    for i, p in enumerate(params):
        state = [opt.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
        assert find(opt.store.arenas, state) == (0, i), "its pages are whole"
        assert all(torch.equal(opt.state[p][name], saved["state"][i][name]) for name in ("exp_avg", "exp_avg_sq"))
