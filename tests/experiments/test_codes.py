"""State in 8 bits beside float32: a real run of toys, the published code, and what is made of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import judged, regenerated, run_quick

from experiments.harness.rows import Rows
from experiments.step import codes
from experiments.step.codes import BOTH, FIRST, FLOAT32, OURS, RIVAL, Twin, compared
from experiments.works import codes_8_bits
from pagedopt.formats import int8
from pagedopt.formats.int8 import BLOCK, MAX_DECAY


@pytest.mark.long
def test_toys_of_every_decay_and_code_are_measured_on_a_cpu(tmp_path: Path) -> None:
    rows = Rows(run_quick("codes", tmp_path, plots=["errors"])["parts"]["codes"]["rows"])
    asked = [(family, which, decay) for (family, which), decays in codes.DECAYS.items() for decay in decays]
    found = [(row["family"], row["which"], (row["beta1"], row["decay"]) if row["beta1"] else row["decay"])
             for row in rows.where(code=FLOAT32)]  # fmt: skip
    assert found == asked
    for row in rows:
        assert (row["error"] == row["turned"] == 0) is (row["code"] == FLOAT32)
        assert row["error"] < 5, "no step but the last few was taken in another code"
        assert ("bias" in row) is ("worst" in row) is (row["which"] == BOTH)
        assert abs(row.get("bias", 0)) < 1
    both, first = (list(table.shown(codes.derive(rows))) for table in codes.TABLES)
    assert (len(both[0][2]), len(first[0][2])) == (27, 18)


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
        codes_8_bits.published(found, signed)
        torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-6, atol=0)
        assert (found[values < 0] < 0).all()
        assert not torch.equal(found, values)


@pytest.mark.parametrize(("family", "name"), [("AdamW", "exp_avg"), ("SGD", "momentum_buffer"), ("Lion", "exp_avg")])
def test_a_twin_decodes_updates_and_encodes(family: str, name: str) -> None:
    """A first moment in its code, against the same in plain tensors; whatever lies in the parameters."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4096, generator=draw)) for _ in range(2)]
    known = codes.codes(family, FIRST)
    exact, twin, rival = (Twin(params, family, 0.9, known[code]) for code in (FLOAT32, OURS, RIVAL))
    form: int8.Root3 = known[OURS][0]["state_format"][name]
    assert form is int8.FIRST["by step" if family == "AdamW" else "by data"]
    means = [torch.zeros(4096) for _ in params]
    for _ in range(5):
        grads: list[torch.Tensor | None] = [torch.randn(4096, generator=draw) for _ in params]
        for each in (exact, twin, rival):
            each.step(grads)
        for i, grad in enumerate(grads):
            assert grad is not None
            means[i] = 0.9 * means[i] + (1 if family == "SGD" else 0.1) * grad
    off = (twin.moment(name) - torch.cat(means)).abs() / torch.cat(means).abs().max()
    assert 0 < off.max() < 2.5 * 3 / 127, "the noise of a few steps, each of a code's distance at most"
    assert twin.moment(name).unique().numel() < 255 * 32 + 1
    assert compared(exact, exact, False, False) == {"error": 0, "turned": 0}
    ours, theirs = (compared(each, exact, family == "Lion", False)["error"] for each in (twin, rival))
    assert 0.5 < ours < 8
    assert 0.5 < theirs < 8


def test_a_code_by_a_root_is_int8_s() -> None:
    """Root 3 to the nearest and root 4 to the nearest are the formats'; at random the mean is the number."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3 * BLOCK + 5, generator=draw) ** 3
    values[BLOCK : 2 * BLOCK] = 0
    for root, form, some in ((3, int8.FIRST["nearest"], values), (4, int8.SECOND["nearest"], values.square())):
        found = some.clone()
        codes_8_bits.rooted(found, root, random=False, signed=root == 3)
        want = form.decode(*form.encode(some), numel=len(some))
        assert torch.isclose(found, want, rtol=1e-5, atol=0).float().mean() > 0.99, "all but those between two codes"
    many = values[:BLOCK].repeat(4000)
    codes_8_bits.rooted(many, 2, random=True)
    mean, levels = many.view(4000, BLOCK).mean(0), many.view(4000, BLOCK).unique(dim=0)
    top = values[:BLOCK].abs().max()
    assert (mean - values[:BLOCK]).abs().max() < 5 * top * 2 / 127 / 2 / 4000**0.5
    assert len(levels) > 3000
    assert ((levels.abs() / top).sqrt() * 127 % 1 - 0.5).abs().min() > 0.49


def test_flashoptim_s_code_is_what_it_says() -> None:
    """In float64, element by element; a block of 32 has a scale in float16."""
    draw = torch.Generator().manual_seed(0)
    for signed in (True, False):
        values = torch.randn(100, generator=draw).square() * (torch.randn(100, generator=draw).sign() if signed else 1)
        values[32:64] = 0
        want = []
        for block in values.double().split(32):
            known = block if signed else block.sqrt()
            scale = known.abs().max()
            for number in known.tolist():
                share = number / float(scale) if scale else 0.0
                level = 2 * share / (1 + abs(share)) * 127 if signed else share * 255
                back = torch.tensor(level + 0.5).floor() / (127 if signed else 255)
                made = (back / (2 - back.abs()) if signed else back) * float(scale.half())
                want.append(float(made if signed else made**2))
        found = values.clone()
        codes_8_bits.flash(found, signed)
        assert torch.allclose(found, torch.tensor(want), rtol=1e-4, atol=1e-7)
        assert not torch.equal(found, values)


def test_the_bias_is_that_of_v_and_the_largest_update_stands_beside_it() -> None:
    params = [torch.nn.Parameter(torch.zeros(4096))]
    exact, twin = (Twin(params, "AdamW", (0.9, 0.999), codes.codes("AdamW", BOTH)[FLOAT32]) for _ in range(2))
    grads: list[torch.Tensor | None] = [torch.linspace(-1, 1, 4096)]
    for each in (exact, twin):
        each.step(grads)
    twin.optimizer.state[twin.params[0]]["exp_avg_sq"].mul_(0.5)
    found = compared(twin, exact, False, True)
    assert found == {"error": 0, "turned": 0, "bias": pytest.approx(-69.3, abs=0.1), "worst": pytest.approx(1)}


def row(which: str, decay: float, code: str, error: float, **more: Any) -> dict[str, Any]:
    beta1 = 0.9 if which == BOTH else None
    return {
        "family": "AdamW",
        "which": which,
        "beta1": beta1,
        "decay": decay,
        "code": code,
        "error": error,
        "turned": 0.1,
        **more,
    }


def test_errors_stand_beside_those_of_others() -> None:
    rows = [row(FIRST, d, code, e) for d, code, e in ((0.9, OURS, 2.0), (0.9, RIVAL, 3.0), (0.999, OURS, 9.0))]
    nine, rival, slow = codes.derive(Rows(rows))
    assert (nine["of_nine"], nine["rival"], nine["of_rival"], nine["allowed"]) == (1, 3, pytest.approx(2 / 3), "yes")
    assert (slow["of_nine"], slow["rival"], slow["of_rival"], slow["allowed"]) == (4.5, None, None, "no")
    assert (rival["of_rival"], rival["drawn"]) == (1, FIRST)


@pytest.mark.parametrize(("ours", "bias", "met"), [(1.0, -0.5, True), (3.5, 1.5, False)])
def test_bars_are_met_or_missed(ours: float, bias: float, met: bool) -> None:
    rows = [
        row(BOTH, 0.999, OURS, ours, bias=bias), row(BOTH, 0.999, RIVAL, 3.0, bias=-9.0),
        row(FIRST, MAX_DECAY, OURS, ours), row(FIRST, MAX_DECAY, RIVAL, 3.0),
    ]  # fmt: skip
    assert [bar.verdict(codes.derive(Rows(rows))).met for bar in codes.BARS] == [met] * 3


def test_what_is_committed_comes_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("codes", "cpu") == 3
    regenerated("int8", tmp_path, monkeypatch)
