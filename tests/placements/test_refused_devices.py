"""Devices that are not meant are refused before anything is made."""

from __future__ import annotations

import pytest
import torch
from children import run
from paths import ROOT

from pagedopt.optim.registry import OPTIMIZERS, Entry
from pagedopt.paging.budget import Budget
from pagedopt.placements.choose import PLACEMENTS
from pagedopt.placements.store import Store


@pytest.mark.parametrize("placement", [None, *PLACEMENTS])
@pytest.mark.parametrize("name", ["mps", "xpu:1", "meta", "hpu", "privateuseone"])
def test_devices_that_are_not_meant_are_refused_in_plain_words(name: str, placement: str | None) -> None:
    store = Store(placement, Budget.parse(None), None)
    with pytest.raises(ValueError, match=f"parameters are on {name}; supported are cpu and cuda .*torch.optim"):
        store.check_device(torch.device(name))


def test_gpus_of_others_are_refused_whatever_torch_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(None, Budget.parse(None), None)
    store.check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    store.check_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="parameters are on cuda of ROCm; supported are"):
        store.check_device(torch.device("cuda"))


SYSTEM = """
import sys, torch, rich.console
sys.platform = sys.argv[1]
import pagedopt
from pagedopt.commands.main import main
try:
    pagedopt.PagedAdamW
except ImportError as error:
    print(error)
sys.exit(main(["plan", "--params", "1B"]))
"""


@pytest.mark.parametrize("name", ["win32", "darwin"])
def test_systems_that_are_not_meant_are_refused_in_plain_words(name: str) -> None:
    done = run("-c", SYSTEM, name, cwd=ROOT)
    text = f"pagedopt needs Linux, and this is {name}"
    assert done.stdout.startswith(text), done.stderr
    assert done.stderr.startswith(f"pagedopt plan: {text}"), done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "WSL 2" in done.stderr


def test_the_table_of_set_up_has_a_line_for_each() -> None:
    text = (ROOT / "notes" / "setup.md").read_text()
    for name in ("Linux, CPU", "Linux, NVIDIA GPU", "WSL 2", "Windows, macOS", "ROCm", "MPS", "XPU"):
        assert f"\n| {name}" in text, name


@pytest.mark.parametrize("entry", OPTIMIZERS, ids=lambda entry: entry.name)
def test_at_construction_and_when_a_group_is_added(entry: Entry) -> None:
    here, away = (torch.nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "meta"))
    make = entry.optimizer
    for params in ([away], [here, away], [{"params": here}, {"params": away}]):
        with pytest.raises(ValueError, match="parameters are on meta"):
            make(params)  # type: ignore[call-arg]
    optimizer = make([here])  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="parameters are on meta"):
        optimizer.add_param_group({"params": [away]})
    assert [group["params"] for group in optimizer.param_groups] == [[here]]
