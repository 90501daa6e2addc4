"""Whatever the sizes, dtypes and budgets: an estimate names the bytes that an optimizer then reports."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedopt import PagedAdamW, estimate

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
