"""The examination of a real card, and estimates held against what the driver gives out."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from command_line import assert_has
from gpu_support import launching, least, settled
from optim_support import step_on_ones

from pagedopt import PagedAdamW, Rates, estimate
from pagedopt.commands.main import main
from pagedopt.placements import choose
from pagedopt.planning.rates import WORDS
from pagedopt.system import driver

pytestmark = [launching(), pytest.mark.exclusive]

MIB = 1 << 20


@pytest.fixture(scope="module")
def report() -> Any:
    """A whole examination, taken through the command."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["doctor", "--device", "cuda:0", "--json"])
    found = json.loads(out.getvalue())
    assert status == (1 if found["problems"] else 0), found["problems"]
    return found


def test_everything_is_reported(report: Any) -> None:
    assert report["problems"] == []
    assert report["driver"]
    assert all(report["cuda"].values()), report["cuda"]
    assert report["step"]["works"], report["step"]["reason"]
    card = report["cards"][0]
    assert 0 < card["memory_free"] <= card["memory_total"]
    assert card["can"] == asdict(driver.capabilities(0))


def test_every_rate_is_measured(report: Any) -> None:
    found = Rates.from_dict(report["rates"])
    assert not found.assumed
    assert torch.cuda.get_device_name(0) in found.machine
    optional = set() if report["cards"][0]["can"]["mapped"] else {"in_place"}
    assert {name for name in WORDS if getattr(found, name) is None} <= optional
    assert found.both is not None
    assert max(found.up or 0, found.down or 0) < found.both < found.device  # type: ignore[operator]


def test_every_placement_is_tried(report: Any) -> None:
    tried = {t["placement"]: t for t in report["placements"]}
    assert tried.keys() == choose.ARENAS["cuda"].keys()
    for name, one in tried.items():
        refusal = choose.ARENAS["cuda"][name].refusal(torch.device("cuda", 0))
        assert (one["works"], one["reason"]) == (not refusal, refusal)
    (chosen,) = [t for t in tried.values() if t["default"]]
    assert chosen["works"]


def test_examining_gives_back_what_it_took() -> None:
    def taken() -> int:
        before = torch.cuda.mem_get_info(0)[0]
        assert main(["doctor", "--device", "cuda:0", "--quick", "--json"]) in (0, 1)
        settled()
        return before - torch.cuda.mem_get_info(0)[0]

    taken()  # kernels, and what torch keeps
    assert least(taken, 4 * MIB) <= 4 * MIB


def network() -> torch.nn.Module:
    """About 26 million parameters, 200 MiB of state in float32."""
    layers = [torch.nn.Linear(2048, 2048) for _ in range(6)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 301)).to("cuda")


@pytest.mark.parametrize("way", ["staged", "in_place"])
@pytest.mark.parametrize("share", [0, 0.25, 0.6, 1])
@pytest.mark.parametrize("placement", ["mapped", "managed", "host"])
def test_bytes_are_what_was_said(placement: str, share: float, way: str) -> None:
    if refusal := choose.ARENAS["cuda"][placement].refusal(torch.device("cuda", 0)):
        pytest.skip(refusal)
    if (placement, way) == ("managed", "staged") or (placement == "host" and share):
        pytest.skip("there is no such combination")
    net = network()
    budget = int(share * estimate(net).state_bytes)
    options: dict[str, Any] = {"placement": placement, "host_access": way, "device_budget": budget}
    said = estimate(net, **options)
    optimizer = PagedAdamW(net.parameters(), **options)
    step_on_ones(optimizer)
    torch.cuda.synchronize()
    report = optimizer.memory_report()
    assert said.by_place == report.by_place
    assert (said.placement, said.budget, said.ring) == (report.placement, report.budget, report.ring)
    for place in {*said.by_place, *report.measured}:
        taken = report.measured.get(place, 0)
        assert said.by_place.get(place, 0) == pytest.approx(taken, rel=0.02, abs=2 * MIB), place


# --- `python -m pagedopt train` on a GPU: gradients add up in one order, and a budget changes no bit of a training ----


#: A process of its own: cuBLAS asks once how much it may keep to one order, and the order stays.
TINY = """
import sys
from pagedopt.commands.main import main
from pagedopt.planning.sizes import DEFAULT_SIZE
DEFAULT_SIZE["cuda"] = "tiny"
sys.exit(main(["train", "--device", "cuda", "--steps", "16", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("optimizer", "budget", "state_format"), [("adamw", "25%", "float32"), ("lion", "0", "int8")])
def test_a_budget_changes_no_bit_of_a_training(optimizer: str, budget: str, state_format: str, tmp_path: Path) -> None:
    options = ("--optimizer", optimizer, "--device-budget", budget, "--state-format", state_format, "--out", tmp_path)
    said = python("-c", TINY, *options)
    assert_has(said, "state on device", "state on host", "The budget has changed no bit of 16 losses")
    assert ("The curves agree" in said) == (optimizer == "adamw")
