"""Forms of AdamW's and Lion's update: a real run of toys, and what is made of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiment_runs import judged, regenerated, run_quick

from experiments.harness.rows import Rows
from experiments.step.arithmetic import TABLES, derive, difference
from experiments.works.contenders import FOREACH, FUSED, LOOP
from experiments.works.forms import BASE, FORMS, PRODUCTS, SHIPPED, step


@pytest.mark.long
def test_toys_of_every_form_are_measured_on_a_cpu(tmp_path: Path) -> None:
    rows = Rows(run_quick("arithmetic", tmp_path)["parts"]["arithmetic"]["rows"])
    assert [(row["family"], row["case"]) for row in rows] == [
        (of, name) for of, forms in FORMS.items() for name in forms
    ]
    for row in rows:
        assert row["errors"].pop("grad") == {"rms": 0, "most": 0, "ulps": 0}
        assert all(0 < error["rms"] < 2e-5 and error["rms"] < error["most"] for error in row["errors"].values())
        assert row["turned"] == 0
    known = {(row["family"], row["case"]): row["errors"] for row in rows}
    assert known["AdamW", SHIPPED] == known["AdamW", BASE]
    assert known["AdamW", LOOP]["param"]["ulps"] == known["Lion", PRODUCTS]["param"]["ulps"] == 0
    assert known["AdamW", SHIPPED]["param"]["rms"] < min(
        known["AdamW", w]["param"]["rms"] for w in (LOOP, FOREACH, FUSED)
    )
    adamw, lion = TABLES[0].shown(derive(rows))
    assert (len(adamw[2]), len(lion[2])) == (len(FORMS["AdamW"]), len(FORMS["Lion"]))
    assert adamw[2][0][4] != lion[2][0][4] == "-"


def test_written_out_adamw_is_what_ships() -> None:
    draw = torch.Generator().manual_seed(0)
    begin = [torch.rand(4096, generator=draw) for _ in range(4)]
    shipped, written = (step("AdamW", name, [t.clone() for t in begin], 7) for name in (SHIPPED, BASE))
    assert all(map(torch.equal, shipped, written))
    assert not torch.equal(shipped[0], begin[0])


def test_differences_are_told_in_ulp_and_errors_by_the_rms() -> None:
    usual = torch.tensor([1.0, 1.5, -4.0])
    once = usual + torch.tensor([0.0, 2.0, -1.0]) * torch.finfo(torch.float32).eps
    exact = torch.tensor([3.0, 3.0, -3.0], dtype=torch.float64)
    found = exact.float() + torch.tensor([0.0, 0.0, 1.5])
    assert difference(found, exact, once, usual) == {"rms": pytest.approx(0.5 / 3**0.5), "most": 0.5, "ulps": 2}


def test_what_is_committed_comes_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("arithmetic", "cpu") == 0
    regenerated("arithmetic", tmp_path, monkeypatch)
