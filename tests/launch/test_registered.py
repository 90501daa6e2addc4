"""``multi_tensor_apply`` in compiled functions: one operator, told what it writes, with the bits of eager calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from children import python
from gpu_support import DEVICES, NEEDED

from pagedopt import Rule, compose, multi_tensor_apply, rule
from pagedopt.rules import RULES, addcmul
from pagedopt.rules.rule import find_registered

pytestmark = pytest.mark.usefixtures("nothing_compiled")

BACKENDS = ("aot_eager", "inductor")
#: On a GPU Inductor makes kernels of its own, or all of it a CUDA graph.
ON_GPU = [pytest.param("inductor", mode, "cuda", marks=NEEDED) for mode in (None, "reduce-overhead")]
SIZES = (3, 1, 700)


@rule
def decayed(weight, grad, *, rate, lr=0.5):  # type: ignore[no-untyped-def]
    weight = weight * (1 - rate) - lr * grad
    return weight


def lists(seed: int = 0, device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(n, generator=generator).to(device) for n in SIZES * 2]
    return made[:3], made[3:]


def scalars(rate: float, lr: float = 0.5) -> torch.Tensor:
    return torch.tensor([rate, lr], dtype=torch.float64)


def operator() -> Any:
    from pagedopt.launch.registered import multi_tensor_apply_

    return multi_tensor_apply_


def decay(weights: list[torch.Tensor], grads: list[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    multi_tensor_apply(decayed, [weights, grads], values)
    return weights[0] + 1  # reads what was written


def graphs() -> int:
    """How many graphs torch.compile has made."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("backend", "mode", "device"), [*((each, None, "cpu") for each in BACKENDS), *ON_GPU])
def test_twelve_values_in_a_tensor_are_one_graph_with_the_bits_of_eager_calls(
    backend: str, mode: str | None, device: str
) -> None:
    run = torch.compile(decay, backend=backend, mode=mode, fullgraph=True)
    for i in range(12):
        (got, grads), (want, _) = lists(i, device), lists(i, device)
        after = run(got, grads, scalars(0.01 * i)).clone()
        multi_tensor_apply(decayed, [want, grads], {"rate": 0.01 * i})
        assert equal([*got, after], [*want, want[0] + 1])
    assert graphs() == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_go_to_other_lists(backend: str) -> None:
    weights, grads = lists()
    got, want = ([torch.empty_like(w) for w in weights] for _ in range(2))

    def apply(out: list[torch.Tensor]) -> None:
        multi_tensor_apply(decayed, [weights, grads], {"rate": 0.1, "lr": 0.2}, out=[out])

    torch.compile(apply, backend=backend, fullgraph=True)(got)
    apply(want)
    assert equal(got, want)
    assert equal(weights, lists()[0])


def test_a_python_float_compiles_again_for_each_value() -> None:
    def apply(weights: list[torch.Tensor], grads: list[torch.Tensor], rate: float) -> None:
        multi_tensor_apply(decayed, [weights, grads], {"rate": rate})

    run = torch.compile(apply, backend="aot_eager", fullgraph=True)
    for i in range(4):
        (got, grads), (want, _) = lists(i), lists(i)
        run(got, grads, 0.1 * (i + 1))
        apply(want, grads, 0.1 * (i + 1))
        assert equal(got, want)
    assert graphs() == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rules_do_not_share_a_graph(backend: str) -> None:
    def apply(rule: Rule, value: torch.Tensor, values: torch.Tensor) -> None:
        multi_tensor_apply(rule, [[value]], values)

    def times(factor: float) -> Rule:
        def timed(x, *, by):  # type: ignore[no-untyped-def]
            return x * by * factor

        return Rule(timed)

    run, two = torch.compile(apply, backend=backend, fullgraph=True), torch.tensor([2.0], dtype=torch.float64)
    for factor, want in ((1.0, 2.0), (3.0, 6.0), (5.0, 10.0)):
        value = torch.ones(4)
        run(times(factor), value, two)
        assert value.tolist() == [want] * 4


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_has_nothing_to_say(device: str) -> None:
    for given in (decayed, compose(decayed, decayed)):
        weights, grads = lists(device=device)
        found = torch.library.opcheck(operator(), (weights, grads, given.registered, scalars(0.1)))
        assert found == dict.fromkeys(found, "SUCCESS")
        assert len(found) == 4


def test_it_is_told_to_stay_out_of_cuda_graphs() -> None:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    assert tag is None or tag in operator().tags


def test_an_exported_program_holds_it() -> None:
    class Decay(torch.nn.Module):
        def forward(self, weight: torch.Tensor, grad: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            weight = weight.clone()
            multi_tensor_apply(decayed, [[weight], [grad]], values)
            return weight

    given = (torch.ones(3), torch.full((3,), 2.0), scalars(0.5))
    program = torch.export.export(Decay(), given)
    graphs_of = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    assert sum(node.target is operator() for graph in graphs_of for node in graph.nodes) == 1
    assert program.module()(*given).tolist() == [-0.5] * 3


def test_version_counters_go_up_and_autograd_does_not_follow() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    version = weight._version
    operator()([weight], [torch.ones(3)], decayed.registered, scalars(0.1))
    assert weight._version > version
    assert weight.grad_fn is None
    loss = (weight * weight).sum()
    operator()([weight], [torch.ones(3)], decayed.registered, scalars(0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_eager_call_does_not_pass_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedopt.launch import registered

    calls = list[Any]()
    monkeypatch.setattr(registered, "multi_tensor_apply_", lambda *given: calls.append(given))
    weights, grads = lists()
    multi_tensor_apply(decayed, [weights, grads], scalars(0.5))
    assert not calls
    assert not equal(weights, lists()[0])


UNFIT: dict[str, tuple[Callable[..., tuple[Any, ...]], str]] = {
    "dtype": (lambda w, g: (w, g, decayed.registered, torch.zeros(2)), r"is torch.float32 \(2,\) on cpu; give float64"),
    "shape": (lambda w, g: (w, g, decayed.registered, scalars(0).tile(2)), r"give float64 \(2,\)"),
    "lists": (lambda w, g: (w, g[:2], decayed.registered, scalars(0)), "got 3 tensors to write and 2 to read"),
    "rule": (lambda w, g: (w, g, "no.such:rule", scalars(0)), "no rule 'no.such:rule' is alive in this process"),
    "no rule": (lambda w, g: (w, g, "pagedopt.rules:compose", scalars(0)), "no rule 'pagedopt.rules:compose'"),
}


@pytest.mark.parametrize(("given", "found"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused_by_name(given: Callable[..., tuple[Any, ...]], found: str) -> None:
    weights, grads = lists()
    with pytest.raises(ValueError, match=found):
        operator()(*given(weights, grads))
    assert equal(weights, lists()[0])


@pytest.mark.parametrize(
    ("given", "options", "numel", "found"),
    [({"rate": 0.1}, {"transport": "memcpy"}, 3, "is 'memcpy', and a compiled function takes 'managed' alone"),
     ({"lr": 0.1}, {}, 3, r"missing \['rate'\]"), ({"rate": 0.1, "beta": 1}, {}, 3, r"unknown \['beta'\]"),
     (torch.zeros(2), {}, 3, "give float64"),
     (scalars(0.1), {}, 4, r"tensor 0 of 'grad' has shape \(4,\), of 'weight' \(3,\)")],
    ids=["transport", "missing", "unknown", "dtype", "shape"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_when_it_is_compiled(
    given: Any, options: dict[str, Any], numel: int, found: str
) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def apply(weight: torch.Tensor, grad: torch.Tensor) -> None:
        multi_tensor_apply(decayed, [[weight], [grad]], given, **options)

    with pytest.raises(Exception, match=found):
        apply(torch.ones(3), torch.ones(numel))


def test_rules_are_found_by_names_of_their_own() -> None:
    again = Rule(decayed.function)
    names = [r.registered for r in (*RULES.values(), decayed, again, compose(decayed, addcmul), decayed.out_of_place)]
    assert len(set(names)) == len(names)
    assert find_registered(again.registered) is again
    assert find_registered(decayed.registered) is decayed
    gone = again.registered
    del again
    gc.collect()
    with pytest.raises(ValueError, match="keep the rule that was compiled alive"):
        find_registered(gone)


def test_another_process_finds_a_rule_by_its_name_and_importing_the_package_defines_no_operator() -> None:
    code = f"""
    import torch, pagedopt
    pagedopt.multi_tensor_apply, pagedopt.PagedAdamW
    print(hasattr(torch.ops.pagedopt, "multi_tensor_apply_"))
    from pagedopt.rules.rule import find_registered
    print(find_registered({addcmul.registered!r}).name)
    """
    assert python("-c", dedent(code), fresh=True).split() == ["False", "addcmul"]
