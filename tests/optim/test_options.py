"""What docstrings and ``notes/options.md`` say of options: it is of one table, and it is so."""

from __future__ import annotations

import io
import pydoc
import re
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from optim_support import step_on_ones, stepped
from paths import ROOT
from rich.console import Console

import pagedopt
from pagedopt import Estimate, MemoryReport, PagedAdamW, Rates, estimate
from pagedopt.formats.int8 import BLOCK, FEWEST, MAX_DECAY, SLOW
from pagedopt.optim.options import MAX_SEED, TABLE
from pagedopt.optim.registry import OPTIMIZERS
from pagedopt.paging.budget import Budget
from pagedopt.planning.rates import ASSUMED, WORDS

CLASSES = [pagedopt.PagedOptimizer, *(entry.optimizer for entry in OPTIMIZERS)]
VALUES = [(name, value) for name, option in TABLE.items() for value in option.taken]


def each(values: str) -> list[Any]:
    """The values that a line of the table has."""
    return list(eval(f"({values},)", {"torch": torch, "pagedopt": pagedopt}))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_help_of_a_class_says_every_option(kind: type) -> None:
    said = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    for name, option in TABLE.items():
        assert f"{name} = {option.written}: {option.what}. {option.choice}." in said


def test_the_help_of_the_options_says_every_value() -> None:
    said = " ".join((pagedopt.Options.__doc__ or "").split())
    for option in TABLE.values():
        assert all(f" {value}: {' '.join(meaning.split())}." in said for value, meaning in option.values.items())


def test_the_numbers_of_8_bits_are_those_of_the_format() -> None:
    of_format, of_rounding = TABLE["state_format"].values['"int8", "8bit"'], TABLE["rounding"].values["None"]
    assert f"below {FEWEST:,} elements" in of_format
    assert f"for each {BLOCK}: {2 * (1 + 4 / BLOCK):.2f} bytes" in of_format
    assert of_format.endswith(f"above {MAX_DECAY}")
    assert f"{SLOW} or more" in of_rounding
    assert each(next(iter(TABLE["seed"].values))) == [0, MAX_SEED]


def test_options_with_more_values_than_are_listed_say_their_range() -> None:
    page = (ROOT / "notes" / "options.md").read_text()
    for name, said in {"seed": f"whole numbers from 0 to {MAX_SEED:,}",
                       "blocks": "None, or a whole number from 1 on"}.items():  # fmt: skip
        assert TABLE[name].choice == said
        assert f"\n## {name}\n\nValues: {said}.\n" in page


def literals(hint: Any) -> set[Any]:
    """The values that a type names."""
    if typing.get_origin(hint) is Literal:
        return set(typing.get_args(hint))
    return set().union(*map(literals, typing.get_args(hint)))


@pytest.mark.parametrize("name", TABLE)
def test_every_name_that_an_option_takes_is_in_the_table(name: str) -> None:
    option = TABLE[name]
    known = [value for values in option.values for value in each(values)]
    assert option.default in known
    assert literals(typing.get_type_hints(pagedopt.Options)[name]) <= {v for v in known if isinstance(v, str)}


@pytest.mark.parametrize(("name", "values"), VALUES)
@pytest.mark.filterwarnings("ignore:placement:UserWarning")
def test_what_the_table_shows_is_taken(name: str, values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDOPT_STATE_DIR", str(tmp_path))
    dtype = torch.float16 if "torch.float16" in values else torch.float32
    needed = {"max_grad_norm": 1.0} if name == "skip_nonfinite" else {}
    for value in each(values):
        pagedopt.PagedAdamW([torch.nn.Parameter(torch.ones(3, dtype=dtype))], **needed, **{name: value})


#: What the table's budgets are, in the words of their class.
BUDGETS = {
    'None, "all"': "all of the state",
    '"2GiB", "500 MB", 2e9, 65536': "2.00 GiB, 477 MiB, 1.86 GiB, 64.0 KiB",
    "0": "0 B",
    '"50%", 0.5': "50% of the state",
    "1.0": "100% of the state",
    '1, "50"': "refused",
    '"20 ms"': "refused",
    '"auto"': "what the device can spare",
}


def meant(value: Any) -> str:
    try:
        budget = Budget(value)
        budget.check_unit()
    except ValueError:
        return "refused"
    return str(budget)


def test_budgets_mean_what_the_table_says() -> None:
    option = TABLE["device_budget"]
    found = {values: ", ".join(dict.fromkeys(map(meant, each(values)))) for values in option.values}
    assert found == BUDGETS
    assert option.taken == [values for values in found if found[values] != "refused"]


def test_state_of_bfloat16_parameters_is_bfloat16_unless_asked() -> None:
    for value, dtype in ((None, torch.bfloat16), ("float32", torch.float32)):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = pagedopt.PagedAdamW([p], state_format=value)
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype is dtype


# --- how an optimizer and its reports show themselves: in units a person reads, on terminals and in notebooks ---------


GIB = 1 << 30
REPORT = MemoryReport({"device": 2 * GIB, "host": 3 << 20}, {"device": 2 * GIB, "host": 0}, "mapped", 5 * GIB, 7 << 20)


def optimizer(**options: Any) -> PagedAdamW:
    return stepped(1 << 20, **options)[1]


@pytest.mark.parametrize(
    "shown", [REPORT, estimate("7B", device_budget="2GiB"), ASSUMED], ids=lambda s: type(s).__name__
)
def test_reports_are_tables_with_all_they_say(shown: Any) -> None:
    title, facts = shown.facts()
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown)
    html = shown._repr_html_()
    for text in (title, *(text for fact in facts for text in fact)):
        assert text in " ".join(captured.get().split())  # a title is as wide as its table
        assert text in html
    assert html.count("<tr>") == html.count("</td>") == len(facts)


def test_what_is_html_or_markup_is_shown_as_it_is() -> None:
    assert "&lt;b&gt;Mine" in estimate("1B", rates=Rates(device=1e12, machine="<b>Mine</b>"))._repr_html_()
    odd = Rates(up=1e9, machine="[bold]<b>Mine</b>[/bold]")
    assert "&lt;b&gt;Mine" in odd._repr_html_()
    console = Console(width=200)
    with console.capture() as captured:
        console.print(odd)
    assert "[bold]<b>Mine</b>[/bold]" in captured.get()


@pytest.mark.parametrize(
    "text",
    [str(REPORT), str(estimate("70B", device_budget="9TiB")), str(estimate("7B", device="cpu")), str(ASSUMED),
     str(estimate([(3, 3)])), repr(optimizer()), str(optimizer(device_budget="50%").memory_report())],
)  # fmt: skip
def test_numbers_are_in_units_that_a_person_reads(text: str) -> None:
    assert not re.search(r"\d,\d{3}(\.\d+)? [KMG]?i?B\b", text)
    assert re.search(r"\d ([KMGT]iB|[GT]B/s|B)\b", text)


def test_a_report_names_every_place() -> None:
    assert str(REPORT) == (
        "optimizer state (mapped, budget 5.00 GiB, ring of 7.00 MiB): 2.00 GiB on device (measured 2.00 GiB), "
        "3.00 MiB on host (measured 0 B)"
    )


def test_a_report_says_why_the_host_has_more_than_planned() -> None:
    """After a save, which has read what is in the file; the next step drops it."""
    params = [torch.nn.Parameter(torch.ones(1 << 20)) for _ in range(2)]
    made, why = PagedAdamW(params, device_budget="50%"), "with pages read since the last step"

    def reported() -> str:
        step_on_ones(made)
        return str(made.memory_report())

    assert why not in reported()
    torch.save(made.state_dict(), io.BytesIO())
    report = made.memory_report()
    assert report.measured["host"] > report.by_place["host"]
    assert why in str(report)
    assert why in report._repr_html_()
    assert why not in reported()


def test_a_cpu_has_no_device() -> None:
    for shown in (optimizer().memory_report(), estimate("1B", device="cpu")):
        for text in (str(shown), shown._repr_html_()):
            assert "ordinary memory" in text
            assert not re.search(r"\bdevice\b", text)
    assert "pages in use" in str(estimate("1B", device="cpu", device_budget=0))
    assert "ring" not in str(estimate("1B", device="cpu", device_budget=0))
    assert isinstance(estimate("1B"), Estimate)
    assert "ordinary" not in str(estimate("1B"))


def test_an_optimizer_says_where_its_state_is() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    theirs = repr(torch.optim.AdamW([p])).replace("AdamW", "PagedAdamW")
    assert repr(PagedAdamW([p])) == f"{theirs[:-1]}state: none yet; placement none, device_budget all\n)"
    assert repr(optimizer()).endswith("\nstate: 8.00 MiB on host; placement ordinary memory, device_budget all\n)")
    for given, said in ((1 << 22, "4.00 MiB"), (2e6, "1.91 MiB"), (0.25, "25% of the state"), ("2GiB", "2GiB")):
        assert repr(PagedAdamW([p], device_budget=given)).endswith(f"device_budget {said}\n)")
    made = optimizer(device_budget="50%")
    text = r"state: (\S+) MiB on host, (\S+) MiB on file; placement file, device_budget 50%\n\)$"
    found = re.search(text, repr(made))
    assert found
    assert float(found[1]) + float(found[2]) == pytest.approx(8, abs=0.3)
    made.state[made.param_groups[0]["params"][0]]["exp_avg"] = torch.zeros(1 << 20)
    assert "placement file+device" in repr(made)


def test_words_of_rates_are_of_all_of_them() -> None:
    assert all(getattr(ASSUMED, name) for name in WORDS)
    assert set(WORDS) == set(ASSUMED.as_dict()["bytes_per_second"])
