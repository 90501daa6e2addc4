"""State in 8 bits beside float32: the published codes, and a twin whose moments are in one."""

from __future__ import annotations

import pytest
import torch

from experiments.step import codes
from experiments.step.codes import BOTH, FIRST, FLOAT32, OURS, RIVAL, Twin, compared
from experiments.works import codes_8_bits
from pagedopt.formats import int8
from pagedopt.formats.int8 import BLOCK


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
