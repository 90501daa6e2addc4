"""State in 8 bits beside float32: a real run of toys, the published code, and what is made of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import judged, regenerated, run_quick

from experiments.harness.rows import Rows
from experiments.step import codes
from experiments.step.codes import BOTH, FIRST, FLOAT32, PUBLISHED, ROOT, STOCHASTIC, Twin, compared
from pagedopt.formats.int8 import BLOCK, MOST_DECAY, ROOT2


@pytest.mark.long
def test_toys_of_every_decay_and_code_are_measured_on_a_cpu(tmp_path: Path) -> None:
    rows = Rows(run_quick("codes", tmp_path, plots=["errors"])["parts"]["codes"]["rows"])
    asked = [(family, which, decay) for (family, which), decays in codes.DECAYS.items() for decay in decays]
    assert [(row["family"], row["which"], row["decay"]) for row in rows.where(code=FLOAT32)] == asked
    for row in rows:
        assert (row["error"] == row["turned"] == 0) is (row["code"] == FLOAT32)
        assert row["error"] < 5, "no step but the last few was taken in another code"
        assert ("bias" in row) is ("worst" in row) is (row["which"] == BOTH)
        assert abs(row.get("bias", 0)) < 1
    both, first = (list(table.shown(codes.derive(rows))) for table in codes.TABLES)
    assert (len(both[0][2]), len(first[0][2])) == (15, 16)


def test_the_published_code_takes_the_nearest_of_its_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    for signed in (True, False):
        size = 0 if signed else 1
        fractions = [(i, (j + 0.5) / 2 ** (i + size)) for i in range(7) for j in range(2 ** (i + size))]
        inner = [10.0 ** (i - 6) * (0.1 + 0.9 * at) for i, at in fractions]
        known = torch.tensor([0.0, 1.0, *inner, *([-x for x in inner] if signed else [])])
        assert len(known) == 256
        values = torch.randn(3 * BLOCK + 5, generator=draw) ** 3
        values = values if signed else values.abs()
        values[BLOCK : 2 * BLOCK] = 0
        wanted = []
        for block in values.split(BLOCK):
            absmax = block.abs().max()
            far = (block[:, None] - known * absmax).abs()
            far[(block[:, None] < 0) & (known >= 0)] = torch.inf  # what is negative stays so
            wanted.append(known[far.argmin(1)] * absmax)
        found = values.clone()
        codes.published(found, signed)
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-6, atol=0)
        assert (found[values < 0] < 0).all()
        assert not torch.equal(found, values)


@pytest.mark.parametrize(("family", "name"), [("AdamW", "exp_avg"), ("SGD", "momentum_buffer"), ("Lion", "exp_avg")])
def test_a_twin_decodes_updates_and_encodes(family: str, name: str) -> None:
    """A first moment in its code, against the same in plain tensors; whatever lies in the parameters."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4096, generator=draw)) for _ in range(2)]
    known = codes.codes(FIRST, name)
    exact, twin, rival = (Twin(params, family, FIRST, 0.9, known[code]) for code in (FLOAT32, ROOT, PUBLISHED))
    means = [torch.zeros(4096) for _ in params]
    for _ in range(5):
        grads: list[torch.Tensor | None] = [torch.randn(4096, generator=draw) for _ in params]
        for each in (exact, twin, rival):
            each.step(grads)
        for i, grad in enumerate(grads):
            assert grad is not None
            mean = 0.9 * means[i] + (1 if family == "SGD" else 0.1) * grad
            means[i] = ROOT2.decode(*ROOT2.encode(mean), numel=4096)
    same = torch.isclose(twin.moment(name), torch.cat(means), rtol=1e-5)
    assert same.float().mean() > 0.99, "in all but those that lie between two codes"
    assert compared(exact, exact, False, False) == {"error": 0, "turned": 0}
    lion = family == "Lion"
    ours, theirs = (compared(each, exact, lion, False)["error"] for each in (twin, rival))
    assert 0.5 < ours < theirs < 5


def test_the_bias_is_that_of_v_and_the_largest_update_stands_beside_it() -> None:
    params = [torch.nn.Parameter(torch.zeros(4096))]
    exact, twin = (Twin(params, "AdamW", BOTH, 0.999, codes.codes(BOTH, "exp_avg")[FLOAT32]) for _ in range(2))
    grads: list[torch.Tensor | None] = [torch.linspace(-1, 1, 4096)]
    for each in (exact, twin):
        each.step(grads)
    twin.optimizer.state[twin.params[0]]["exp_avg_sq"].mul_(0.5)
    found = compared(twin, exact, False, True)
    assert found == {"error": 0, "turned": 0, "bias": pytest.approx(-69.3, abs=0.1), "worst": pytest.approx(1)}


def row(which: str, decay: float, code: str, error: float, **more: Any) -> dict[str, Any]:
    return {"family": "AdamW", "which": which, "decay": decay, "code": code, "error": error, "turned": 0.1, **more}


def test_errors_stand_beside_those_of_others() -> None:
    rows = [row(FIRST, d, code, e) for d, code, e in ((0.9, ROOT, 2.0), (0.9, PUBLISHED, 3.0), (0.999, ROOT, 9.0))]
    nine, rival, slow = codes.derive(Rows(rows))
    assert (nine["of_nine"], nine["rival"], nine["of_rival"], nine["allowed"]) == (1, 3, pytest.approx(2 / 3), "yes")
    assert (slow["of_nine"], slow["rival"], slow["of_rival"], slow["allowed"]) == (4.5, None, None, "no")
    assert (rival["of_rival"], rival["drawn"]) == (1, FIRST)


@pytest.mark.parametrize(("ours", "bias", "met"), [(1.0, -0.5, True), (3.5, 1.5, False)])
def test_bars_are_met_or_missed(ours: float, bias: float, met: bool) -> None:
    rows = [
        row(BOTH, 0.999, STOCHASTIC, ours, bias=bias), row(BOTH, 0.999, PUBLISHED, 3.0, bias=-9.0),
        row(FIRST, MOST_DECAY, ROOT, ours), row(FIRST, MOST_DECAY, PUBLISHED, 3.0),
    ]  # fmt: skip
    assert [bar.verdict(codes.derive(Rows(rows))).met for bar in codes.BARS] == [met] * 3


def test_what_is_committed_comes_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("codes", "cpu") == 3
    regenerated("int8", tmp_path, monkeypatch)
