"""Hyperparameters that a rule returns: their new values, and what it computes before and behind the change."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from rules_under_test import carrying, carrying_in_python

from pagedopt import multi_tensor_apply

SCALARS = {"scale": 0.7, "rate": 0.3, "count": 5.0}


def test_new_values_are_computed_in_double() -> None:
    uniforms = carrying.uniforms(SCALARS)
    assert list(carrying.carried) == ["scale", "count"]
    assert [uniforms[i] for i in carrying.carried.values()] == [0.7 / 2 * 0.3, 3.0]
    assert 0.7 * 0.3 in uniforms
    assert carrying.writes == (0, 1)


@pytest.mark.parametrize("count", [3, 20])
def test_those_of_many_sets_have_the_same_bits(count: int) -> None:
    scales = np.linspace(0.1, 2, count)
    sets = carrying.uniform_sets({**SCALARS, "scale": scales})
    assert sets[:, carrying.carried["scale"]].tolist() == [scale / 2 * 0.3 for scale in scales.tolist()]
    assert sets.tolist() == [carrying.uniforms({**SCALARS, "scale": scale}) for scale in scales.tolist()]


def test_tensors_take_old_and_new_values_as_they_are_written() -> None:
    a, b = torch.randn(2, 50, dtype=torch.float64)
    want = carrying_in_python(a, b, **SCALARS)
    torch.testing.assert_close(carrying.reference(a, b, **SCALARS), want[:2], rtol=1e-15, atol=1e-15)
    first = carrying(float(a[0]), float(b[0]), **SCALARS)
    assert (first[1], first[3]) == want[2:]
    multi_tensor_apply(carrying, [[a], [b]], SCALARS)
    torch.testing.assert_close((a, b), want[:2], rtol=1e-14, atol=1e-14)


def test_results_can_go_elsewhere_and_pickles_find_the_rule() -> None:
    a, b = torch.randn(2, 50)
    outs = [[torch.empty(50)], [torch.empty(50)]]
    want = carrying_in_python(a, b, **SCALARS)
    multi_tensor_apply(carrying, [[a], [b]], SCALARS, out=outs)
    torch.testing.assert_close((outs[0][0], outs[1][0]), want[:2])
    assert pickle.loads(pickle.dumps(carrying)).carried == carrying.carried == carrying.out_of_place.carried
