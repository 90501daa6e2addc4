"""What `python -m pagedopt train` is made of: corpus, batches, model, learning rates, the comparison of curves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedopt.commands.main import UsageError
from pagedopt.commands.train import contender
from pagedopt.commands.train.compare import FACTOR, compare
from pagedopt.commands.train.data import load_corpus, sample_batch, to_device
from pagedopt.commands.train.gpt import build_model
from pagedopt.commands.train.schedule import learning_rate
from pagedopt.planning.sizes import SIZES, parameter_count


def test_corpus_is_the_library_without_its_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "pkg/c.py", "pkg/tests/d.py", "test/e.py", "site-packages/f.py", "g.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    corpus = load_corpus(3, tmp_path)
    assert bytes(corpus.validation) == b"<a.py>"  # the first of every ten
    assert bytes(corpus.train) == b"<b.py><pkg/c.py>"
    with pytest.raises(UsageError, match="--block 6 needs at least 7"):
        load_corpus(6, tmp_path)


def test_batches_depend_on_seed_and_step_alone() -> None:
    text = load_corpus(64).train
    first = sample_batch(text, 4, 64, seed=1, step=2)
    assert first.shape == (4, 65)
    assert torch.equal(first, sample_batch(text, 4, 64, seed=1, step=2))
    assert not torch.equal(first, sample_batch(text, 4, 64, seed=1, step=3))
    assert not torch.equal(first, sample_batch(text, 4, 64, seed=2, step=2))
    inputs, targets = to_device(first, torch.device("cpu"))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_model_is_causal_and_counted() -> None:
    size = SIZES["tiny"]
    model = build_model(size, 16, seed=3, device=torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(size, 16)
    assert 124e6 < parameter_count(SIZES["gpt2"], 1024) < 125e6
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    for text in (tokens, changed):
        model(text, tokens)
    assert torch.equal(seen[0][:, :9], seen[1][:, :9])
    assert not torch.isclose(seen[0][:, 9:], seen[1][:, 9:]).all(dim=-1).any()
    assert torch.equal(model.tokens.weight, build_model(size, 16, 3, torch.device("cpu")).tokens.weight)


def test_norms_and_biases_do_not_decay() -> None:
    model = build_model(SIZES["tiny"], 16, seed=0, device=torch.device("cpu"))
    options: Any = type(
        "Some",
        (),
        {
            "weight_decay": 0.3,
            "lr": 0.1,
            "placement": None,
            "device_budget": "all",
            "state_format": None,
            "overlap": None,
        },
    )
    decayed, plain = contender.build_optimizer("paged", model, options).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert {id(p) for p in plain["params"]} == {id(p) for p in model.parameters() if p.dim() == 1}


def test_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert max(rates) == rates[9]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [rates[0], rates[9], rates[-1], learning_rate(0, 1, 2.0)] == pytest.approx([0.2, 2.0, 0.2, 2.0])


def test_comparison_finds_the_worst_step() -> None:
    found = compare([3.0, 2.0, 1.0], [3.0, 2.25, 1.125], tolerance=0.2)
    assert (found.max_difference, found.at_step, found.mean_difference, found.agree) == (0.25, 2, 0.125, False)
    assert compare([3.0, 2.0], [3.0, 2.1], tolerance=0.2).agree
    shown = compare([3.0, 2.0], [3.0, 2.5], tolerance=None)
    assert (shown.agree, shown.needs_yardstick) == (None, False)
    assert shown.sentence(2, "ours", "theirs").startswith(
        "The losses of ours and theirs differ by at most 0.5 in 2 steps"
    )
    broken = compare([3.0, math.nan, 1.0], [3.0, 2.0, 9.0], tolerance=0.2)
    assert (broken.agree, broken.at_step, broken.needs_yardstick) == (False, 2, False)


def test_a_yardstick_only_widens_the_tolerance() -> None:
    found = compare([3.0, 2.0], [3.0, 2.5], tolerance=0.2)
    assert found.needs_yardstick
    for own, tolerance in ((0.001, 0.2), (0.25, FACTOR * 0.25), (math.nan, 0.2), (math.inf, 0.2)):
        assert found.beside(own).tolerance == tolerance
    assert found.beside(0.001).sentence(2, "ours", "theirs").endswith("by 0.001; the tolerance is 0.2.")
