"""What `python -m pagedopt train` is made of: corpus, batches, model, learning rates, and the comparison of curves."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import parameter_count

from pagedopt.commands.contest import bits_equal, curves_agree, tolerance
from pagedopt.commands.gpt import build_model, learning_rate, load_corpus, sample_batch, to_device
from pagedopt.commands.parser import UsageError
from pagedopt.planning.sizes import SIZES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_corpus_is_the_library_without_its_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "pkg/c.py", "pkg/tests/d.py", "test/e.py", "site-packages/f.py", "g.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    assert bytes(load_corpus(3, tmp_path)) == b"<a.py><b.py><pkg/c.py>"
    with pytest.raises(UsageError, match="holds 22 bytes of Python's sources; a sequence takes 23"):
        load_corpus(22, tmp_path)


def test_batches_depend_on_seed_and_step_alone() -> None:
    text = load_corpus(64)
    first = sample_batch(text, 4, 64, seed=1, step=2)
    assert first.shape == (4, 65)
    assert torch.equal(first, sample_batch(text, 4, 64, seed=1, step=2))
    assert not torch.equal(first, sample_batch(text, 4, 64, seed=1, step=3))
    assert not torch.equal(first, sample_batch(text, 4, 64, seed=2, step=2))
    inputs, targets = to_device(first, CPU)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_model_is_causal_and_counted() -> None:
    size = replace(SIZES["tiny"], block=16)
    model = build_model(size, seed=3, device=CPU)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(size)
    assert 124e6 < parameter_count(SIZES["gpt2"]) < 125e6
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    for text in (tokens, changed):
        model(text, tokens)
    assert torch.equal(seen[0][:, :9], seen[1][:, :9])
    assert not torch.isclose(seen[0][:, 9:], seen[1][:, 9:]).all(dim=-1).any()
    assert torch.equal(model.tokens.weight, build_model(size, 3, CPU).tokens.weight)


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert max(rates) == rates[9]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [rates[0], rates[9], rates[-1], learning_rate(0, 1, 2.0)] == pytest.approx([0.2, 2.0, 0.2, 2.0])


def contender(*losses: float, weight: float = 1.0) -> Any:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return SimpleNamespace(name="one", losses=list(losses), model=model)


@pytest.mark.parametrize(
    ("losses", "agree", "said"),
    [
        ((3.0, 2.25, 1.125), False, "The curves DO NOT AGREE: the losses of one and one differ by at most 0.25 (step"),
        ((3.0, 2.0, 1.125), True, "The curves agree: the losses of one and one differ by at most 0.12 (step 3 of 3)"),
        ((3.0, math.nan, math.inf), False, "differ by at most inf (step 2 of 3)"),
    ],
)  # fmt: skip
def test_curves_are_compared_at_every_step(losses: tuple[float, ...], agree: bool, said: str) -> None:
    found, sentence = curves_agree(contender(3.0, 2.0, 1.0), contender(*losses), 0.2)
    assert found is agree
    assert said in sentence
    assert sentence.endswith("the tolerance is 0.2.")


def test_without_torchs_curve_losses_have_to_be_finite() -> None:
    for last, agree in ((2.0, True), (math.nan, False)):
        found, sentence = curves_agree(None, contender(3.0, last), 0.2)
        assert (found, sentence) == (agree, f"torch has no such optimizer; the loss went from 3.000 to {last:.3f}.")


def test_bits_are_those_of_losses_and_weights() -> None:
    """Zeros of two signs differ, and a NaN has the bits of itself."""
    for one, other, equal in (
        (contender(3.0, math.nan), contender(3.0, math.nan), True),
        (contender(3.0), contender(3.0000005), False),
        (contender(3.0, weight=0.0), contender(3.0, weight=-0.0), False),
    ):
        assert bits_equal(one, other)[0] is equal


def test_the_tolerance_is_that_of_the_arithmetic() -> None:
    for how, wanted in {
        (CPU, None, 1): 5e-4, (CPU, "fp64", 60): 6e-4, (CPU, "float32", 10**6): 0.05, (CUDA, None, 60): 0.25,
        (CPU, "8bit", 60): 1.0, (CUDA, "bf16", 60): 1.0,
    }.items():  # fmt: skip
        assert tolerance(*how) == pytest.approx(wanted)
