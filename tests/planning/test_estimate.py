"""What is said in advance: the bytes that are really taken, and seconds that can be worked out by hand."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from command_line import assert_has
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optim_support import step_on_ones, stepped

import pagedopt
from pagedopt import Estimate, PagedAdamW, PagedSGD, Rates, estimate
from pagedopt.commands.gpt import GPT
from pagedopt.paging.policy import SLOTS
from pagedopt.planning.rates import ASSUMED, ASSUMED_CPU
from pagedopt.planning.sizes import SIZES, shapes
from pagedopt.system import warn

MIB = 1 << 20
F32, BF16 = torch.float32, torch.bfloat16


def network(dtype: torch.dtype = F32) -> torch.nn.Module:
    """About 1.3 million parameters with odd sizes: several pages of state, and parameters that cross from one to the
    next."""
    return torch.nn.Sequential(torch.nn.Linear(1001, 701), torch.nn.Linear(701, 803), torch.nn.LayerNorm(803)).to(dtype)


def taken(net: torch.nn.Module, kind: Any = PagedAdamW, **options: Any) -> pagedopt.MemoryReport:
    """What a real optimizer reports after its first step."""
    optimizer = kind(net.parameters(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_on_ones(optimizer)
    return optimizer.memory_report()


@pytest.mark.parametrize("budget", [0, 3 * MIB, "5 MiB", "10.2MB", "1GiB"])
@pytest.mark.parametrize(
    "options",
    [{}, {"state_format": "bfloat16"}, {"state_format": "int8"}, {"amsgrad": True}, {"param_format": "bfloat16+8"}],
    ids=str,
)
def test_a_file_takes_what_was_said(options: dict[str, Any], budget: int | str) -> None:
    net = network(BF16 if "param_format" in options else F32)
    report = taken(net, device_budget=budget, **options)
    formats = {name: option for name, option in options.items() if name != "amsgrad"}
    rule = "adamw_amsgrad" if options.get("amsgrad") else "adamw"
    said = estimate(net, rule=rule, device_budget=budget, **formats)
    assert (said.by_place, said.placement, said.budget) == (report.by_place, report.placement, report.budget)
    assert said.state_bytes == sum(report.by_place.values())


@pytest.mark.parametrize("placement", [None, "device", "host"])
def test_ordinary_memory_takes_what_was_said(placement: str | None) -> None:
    net = network(BF16)
    report = taken(net, placement=placement, state_format="float32")
    said = estimate(net, placement=placement, state_format="float32")
    assert said.by_place == report.by_place
    assert said.by_place.keys() == {"host"}
    assert (said.moved, said.ring, said.host_access, said.away_bytes) == (0, 0, None, 0)


@pytest.mark.parametrize("options", [{}, {"device_budget": 2 * MIB}], ids=str)
def test_a_group_with_a_format_of_its_own_takes_what_was_said(options: dict[str, Any]) -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(1000, 300), network())
    groups = [{"params": list(net[0].parameters()), "state_format": "float32"}, {"params": list(net[1].parameters())}]
    optimizer = PagedAdamW(groups, state_format="int8", **options)
    step_on_ones(optimizer)
    said = estimate(groups, state_format="int8", **options)
    assert said.by_place == optimizer.memory_report().by_place
    assert said.state_bytes > 8 * 300_000 + 2 * (said.parameters - 300_000)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters_take_what_was_said(dtype: torch.dtype, meta: bool) -> None:
    p, optimizer = stepped((1000, 10), dtype=dtype)
    said = estimate([p.detach().to("meta")] if meta else [p], device="cpu")
    assert said.state_bytes == sum(optimizer.memory_report().by_place.values()) == 2 * p.nbytes
    assert (said.parameters, said.param_bytes, said.grad_bytes) == (p.numel(), p.nbytes, p.nbytes)


def test_sgd_without_momentum_has_no_state() -> None:
    net = network()
    said = estimate(net, rule="sgd", device_budget=0)
    assert said.by_place == taken(net, PagedSGD, lr=0.1).by_place == {}
    rates = Rates(ram=1e6)
    # Read the parameter and the gradient, write the parameter: 12 bytes an element, wherever state would be.
    assert estimate(net, rule="sgd", device_budget=0, rates=rates).seconds == pytest.approx(12 * said.parameters / 1e6)
    said = estimate(net, rule="sgd", device="cuda", placement="host", rates=Rates(device=1e6))
    assert said.seconds == pytest.approx(12 * said.parameters / 1e6)


SHAPE = [(16 * MIB,)]  # 64 MiB in float32, so 128 MiB of state, in 16 pages of 8 MiB
#: MiB a second that make the sums come out in whole seconds.
HAND = Rates(
    device=28 * MIB, up=8 * MIB, down=4 * MIB, both=16 * MIB, in_place=6 * MIB, ram=14 * MIB, file_read=32 * MIB,
    file_write=16 * MIB,
)  # fmt: skip


#: Options, bytes by place, of the ring, that move; seconds, and the least of them; worked out by hand.
SECONDS: list[tuple[dict[str, Any], dict[str, int], int, int, float, float]] = [
    # 4 Mi elements stay: 3 reads of state and parameter, 1 of the gradient, 3 writes: 28 bytes each, 112 MiB: 4 s.
    # 96 MiB go both ways: the first page comes in 1 s, the last goes in 2 s, 88 MiB pass one another in 11 s.
    # The floor is 448 MiB of device memory; the link needs 12 s.
    ({"device_budget": 32 * MIB}, {"device": 32, "host": 96}, 8 * SLOTS, 192, 4 + 1 + 11 + 2, 16),
    ({"device_budget": 32 * MIB, "host_access": "in_place"}, {"device": 32, "host": 96}, 0, 192, 4 + 192 / 6, 16),
    ({"device_budget": 32 * MIB, "placement": "managed"}, {"device": 32, "host": 96}, 0, 192, 4 + 192 / 6, 16),
    *((resident, {"device": 128}, 0, 0, 448 / 28, 448 / 28)
      for resident in ({}, {"device_budget": 128 * MIB}, {"placement": "managed-driver"}, {"placement": "device"})),
    *(({"placement": placement, "device_budget": 0}, {"host": 128}, 8 * SLOTS, 256, 1 + 2 * 120 / 16 + 2, 16)
      for placement in ("host", "mapped")),
    ({"device": "cpu", "device_budget": 0}, {"file": 128}, 8 * SLOTS, 256, 4 + 8, 448 / 14),
    ({"device": "cpu"}, {"host": 128}, 0, 0, 448 / 14, 448 / 14),
]  # fmt: skip


@pytest.mark.parametrize(("options", "places", "ring", "moved", "seconds", "floor"), SECONDS, ids=str)
def test_seconds_by_hand(
    options: dict[str, Any], places: dict[str, int], ring: int, moved: int, seconds: float, floor: float
) -> None:
    said = estimate(SHAPE, rates=HAND, **options)
    assert said.by_place == {place: nbytes * MIB for place, nbytes in places.items()}
    assert (said.ring, said.moved) == (ring * MIB, moved * MIB)
    assert (said.seconds, said.floor) == (pytest.approx(seconds), pytest.approx(floor))
    if said.host_access == "staged":
        assert said.near_bytes == (64 + 64 + places.get("device", 0) + ring) * MIB


def test_formats_change_what_moves() -> None:
    said = estimate(SHAPE, param_dtype="bfloat16", state_format={"exp_avg": "bfloat16", "exp_avg_sq": "float32"},
                    rates=Rates(device=1.0))  # fmt: skip
    assert (said.param_bytes, said.grad_bytes, said.state_bytes) == (32 * MIB, 32 * MIB, 96 * MIB)
    assert said.seconds == pytest.approx((3 * 2 + 2 * 2 + 2 * 4) * 16 * MIB)


def test_rules_of_ones_own() -> None:
    @pagedopt.rule
    def momentum_and_sum(param, grad, buffer, total, *, lr):  # type: ignore[no-untyped-def]
        buffer = buffer + grad
        param = param - lr * buffer * total
        return param, buffer

    said = estimate(SHAPE, rule=momentum_and_sum, rates=Rates(device=1.0))
    assert said.state_bytes == 128 * MIB
    assert said.seconds == pytest.approx(6 * 4 * 16 * MIB)  # four are read, two are written


def test_rates_that_were_not_measured_are_said_to_be_assumed() -> None:
    assert (said := estimate(SHAPE, device_budget=0)).rates is ASSUMED
    assert "assumed" in str(said)
    assert "assumed" not in str(estimate(SHAPE, rates=replace(HAND, machine="mine")))
    for said in (estimate(SHAPE, device="cpu"), estimate(network(), device_budget=0)):
        assert said.rates is ASSUMED_CPU
        assert "a round guess, assumed: `pagedopt doctor` measures" in str(said)
        assert "H200" not in str(said)


def test_an_estimate_says_which_rates_it_lacks() -> None:
    lacking = replace(HAND, up=None, in_place=None)
    away = estimate(SHAPE, device_budget=0, rates=lacking)
    assert (away.unknown_rates, away.seconds) == (("up",), None)
    assert estimate(SHAPE, device_budget=0, host_access="in_place", rates=lacking).unknown_rates == ("in_place",)
    assert (said := estimate(SHAPE, rates=lacking)).unknown_rates == ()
    assert said.seconds == 16
    assert estimate(SHAPE, device_budget=0, rates=replace(HAND, device=None)).unknown_rates == ()  # none stays there
    assert estimate(SHAPE, device_budget="50%", rates=replace(HAND, device=None)).unknown_rates == ("device",)
    assert "they have no up" in str(away)
    # The reading for 268 million parameters, all state on the host, is 43.1 ms staged and 50.9 in place.
    for way, reading in (("staged", 43.1e-3), ("in_place", 50.9e-3)):
        assert estimate([(1 << 28,)], device_budget=0, host_access=way).seconds == pytest.approx(reading, rel=0.03)


def test_what_may_describe_a_model() -> None:
    net = network()
    named = {name: tuple(p.shape) for name, p in net.named_parameters()}
    with torch.device("meta"):
        meta = network()
    whole = estimate(net, device="cuda", device_budget=3 * MIB)
    decay, plain = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() == 1]
    for model in (
        net.parameters(), list(net.parameters()), net.named_parameters(), [{"params": net.parameters()}],
        list(named.values()), named, meta, meta.parameters(), net.state_dict(), [p.shape for p in net.parameters()],
    ):  # fmt: skip
        assert estimate(model, device="cuda", device_budget=3 * MIB) == whole
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain}]
    assert estimate(groups, device="cuda", device_budget=3 * MIB).state_bytes == whole.state_bytes
    assert estimate([{"params": decay[0]}]).parameters == decay[0].numel()
    for number in (7_000_000_000, 7e9, "7B", "7e9", "7,000,000,000", " 7 b "):
        assert estimate(number).parameters == 7_000_000_000


def test_parameters_that_are_not_trained_have_no_gradient_and_no_state() -> None:
    net = network()
    net[0].requires_grad_(False)
    said = estimate(net)
    assert estimate(list(net.parameters())) == said
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in net.parameters())
    assert (said.param_bytes, said.grad_bytes) == (4 * everything, 4 * trained)
    assert said.state_bytes == pytest.approx(8 * trained, abs=256)
    assert said.by_place == taken(net).by_place


def test_the_device_is_where_the_parameters_are() -> None:
    assert estimate(network()).device == "cpu"
    assert estimate(network(), device="cuda").device == "cuda"
    assert estimate(SHAPE).device == "cuda"
    with torch.device("meta"):
        assert estimate(network()).device == "cuda"


def test_a_placement_of_the_gpu_has_its_stand_in_on_a_cpu() -> None:
    net = network()
    said = estimate(net, placement="mapped", device_budget=0)
    warn._said.clear()
    with pytest.warns(RuntimeWarning, match="placement='mapped'"):
        step_on_ones(optimizer := PagedAdamW(net.parameters(), placement="mapped", device_budget=0))
    assert (said.placement, said.by_place) == ("file", optimizer.memory_report().by_place)


def test_seventy_billion_parameters_take_no_memory() -> None:
    shapes = [(8192, 28672)] * 240 + [(8192, 8192)] * 160 + [(32000, 8192)] * 2 + [(8192,)] * 161
    said = estimate(shapes, param_dtype="bfloat16", state_format="float32", device_budget="40GiB")
    exact = 8 * said.parameters
    assert said.parameters == 240 * 8192 * 28672 + 160 * 8192**2 + 2 * 32000 * 8192 + 161 * 8192
    assert exact <= said.state_bytes <= 1.0001 * exact
    assert 0 <= 40 * 1024 * MIB - said.by_place["device"] < 16 * MIB
    assert estimate("70B", device_budget=0).state_bytes == pytest.approx(560e9, rel=1e-4)


def test_it_reads_well() -> None:
    text = str(estimate("7B", param_dtype="bfloat16", device_budget="2GiB"))
    assert_has(text, "7.00 B parameters", "13.0 GiB on cuda", "placement: mapped", "budget: 2.00 GiB")
    assert_has(
        text, "state on device: 2.00 GiB", "state on host: 24.1 GiB", "28.1 GiB of device memory", " ms ", "H200"
    )
    assert_has(text, "48.2 GiB over the link (staged), through a ring of 64.0 MiB")
    assert "file" in str(estimate("7B", device="cpu", device_budget=0))
    values = estimate("7B").as_dict()
    assert values["by_place"] == {"device": 56_000_000_000}
    assert isinstance(estimate("7B"), Estimate)


#: A model, options, and what is said of them.
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("lots", {}, "model is 'lots'; give a number of parameters, as"),
    (-5, {}, "must be between 1 and"),
    ("1.5", {}, "must be a whole number"),
    (None, {}, "model is a NoneType; give a module"),
    (torch.ones(3), {}, "model is a Tensor; give a module"),
    ([4096, 4096], {}, r"a shape is 4096; give sizes, as \(4096, 4096\)"),
    ([(4096, -1)], {}, "cannot be negative"),
    ([(4096, 1.5)], {}, "must be integers"),
    (["weight"], {}, "a shape is 'weight'"),
    ([(3,), torch.ones(3)], {}, "both tensors and shapes"),
    ("7B", {"rule": "adem"}, "rule is 'adem'; there are adadelta, adagrad, adam, "),
    ("7B", {"param_dtype": "float8"}, "param_dtype is 'float8'; there are float32"),
    ("7B", {"state_format": "int3"}, "state_format is 'int3'"),
    (
        [torch.ones(3, dtype=torch.complex64)],
        {"state_format": "int8"},
        "'int8' for 'exp_avg' of a parameter of torch.comp",
    ),
    ("7B", {"placement": "moon"}, "placement is 'moon'"),
    ("7B", {"placement": "file"}, "placement='file' is for parameters on a CPU"),
    ("7B", {"placement": "device", "device_budget": 5000}, "device_budget is 5000 with placement='device'"),
    ("7B", {"device_budget": "auto"}, "device_budget is 'auto'.*give bytes"),
    ("7B", {"host_access": "by_post"}, "host_access is 'by_post'"),
    ("7B", {"placement": "managed", "host_access": "staged"}, "host_access is 'staged' with placement='managed'"),
    ("7B", {"device": "mps"}, "device is 'mps'; there are cuda, cpu"),
]


@pytest.mark.parametrize(("model", "options", "text"), REFUSED)
def test_what_cannot_be_is_refused(model: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        estimate(model, **options)


@pytest.mark.parametrize("name", SIZES)
def test_a_name_of_plan_is_the_model_that_train_makes(name: str) -> None:
    size = SIZES[name]
    with torch.device("meta"):
        made = GPT(size)
    assert shapes(size) == [tuple(p.shape) for p in made.parameters()]
    assert estimate(name, device_budget="50%") == estimate(made, device="cuda", device_budget="50%")


def test_a_text_that_is_neither_a_number_nor_a_name_is_answered_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"^model is 'gpt5'; give a number of parameters, .* or a name of tiny, small"):
        estimate("gpt5")


# --- whatever the sizes, dtypes and budgets: an estimate names the bytes that an optimizer then reports ---------------


DTYPES = (torch.float32, torch.bfloat16)
PARAMETERS = st.lists(
    st.tuples(st.one_of(st.integers(0, 40), st.integers(20_000, 400_000)), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=6,
)
SHARES = st.one_of(st.floats(0, 1), st.integers(0, 100).map(lambda n: f"{n}%"))
#: From 4 KiB on, as fewer bytes are refused.
BUDGETS = st.one_of(st.none(), SHARES, st.just(0), st.integers(4096, 6 << 20), st.integers(5, 6000).map("{} kB".format))


@given(
    parameters=PARAMETERS,
    state_format=st.sampled_from((None, "float32", {"exp_avg": "bfloat16", "exp_avg_sq": "float32"})),
    placement=st.sampled_from((None, "file")),
    budgets=st.lists(BUDGETS, min_size=1, max_size=3),
)
@example([(300_000, DTYPES[0]), (90_000, DTYPES[1]), (3, DTYPES[0])], None, "file", [None, 0, "50%", 0.99, 1.0, "all"])
@example([(0, DTYPES[0])], None, None, ["50%", 0])
@settings(deadline=None, max_examples=40)
def test_bytes_by_place_are_those_that_were_estimated(
    parameters: list[tuple[int, torch.dtype]], state_format: Any, placement: str | None, budgets: list[Any]
) -> None:
    """At the first step, and after each change of the budget."""
    params = [torch.nn.Parameter(torch.zeros(numel, dtype=dtype)) for numel, dtype in parameters]
    for p in params:
        p.grad = torch.zeros_like(p)
    options = {"placement": placement, "state_format": state_format}
    opt = PagedAdamW(params, device_budget=budgets[0], **options)
    opt.step()
    for number, budget in enumerate(budgets):
        if placement is None and (budgets[0] is None or budget is None) and number:
            break  # state made without a budget has no pages to move, and one made now would have none
        if number:
            opt.set_device_budget(budget)
        said, report = estimate(params, device_budget=budget, **options), opt.memory_report()
        assert said.by_place == report.by_place
        if report.by_place:
            assert (said.budget, said.placement) == (report.budget, report.placement)
