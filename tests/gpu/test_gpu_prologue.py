"""Hyperparameters computed by the device: the host's after rounding to float32, and read again at each replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_support import NEEDED
from prologue_rows import UNTOUCHED, Launch, Rows, check_runs, mixed_rows, same_bits
from prologue_rules import EXACT, SUBJECTS, common_sets, signed_sets

from pagedopt.kernels import cuda
from pagedopt.rules import RULES, Rule
from pagedopt.system import internals

pytestmark = NEEDED

#: Of so many sets one may round to another float32: a device's ``pow`` is not the C library's.
ONE_IN = 1000


def launch_of(subject: Rule) -> Launch:
    """Launches on the current stream."""
    index = torch.cuda.current_device()
    kernel = cuda.prologue_kernel(subject, index)
    return lambda argument, rows: kernel(argument, rows, cuda.Stream(internals.current_stream(index)))


def sets_of_adamw(count: int) -> list[dict[str, float]]:
    """Random hyperparameters, near their ends, too."""
    generator = np.random.default_rng(11)
    columns = {
        "lr": 10 ** generator.uniform(-6, 0, count),
        "beta1": 1 - 10 ** generator.uniform(-3, -0.2, count),
        "beta2": 1 - 10 ** generator.uniform(-5, -0.5, count),
        "eps": 10 ** generator.uniform(-12, -3, count),
        "weight_decay": np.where(generator.random(count) < 0.2, 0, generator.uniform(0, 0.3, count)),
        "step": np.ceil(10 ** generator.uniform(0, 5, count)),
        "maximize": generator.integers(0, 2, count).astype(float),
    }
    assert tuple(columns) == RULES["adamw"].scalars
    return [dict(zip(columns, values, strict=True)) for values in np.column_stack([*columns.values()]).tolist()]


def test_numbers_of_adamw_round_to_the_hosts() -> None:
    subject, sets = RULES["adamw"], sets_of_adamw(ONE_IN)
    steps = [s["step"] for s in sets]
    assert min(steps) < 5
    assert 50_000 < max(steps) <= 100_000
    single = np.zeros((len(sets), 1 + len(subject.scalars)), bool)
    single[:, 0] = True  # torch's step counts
    device = Rows(subject, sets, single, device="cuda").run(launch_of(subject))
    host = np.array([subject.uniforms(s) for s in sets])
    np.testing.assert_allclose(device, host, rtol=1e-9, atol=0)
    got, want = device.astype(np.float32), host.astype(np.float32)
    apart = got != want
    assert apart.any(axis=1).sum() <= len(sets) / ONE_IN, f"{apart.sum(axis=0)} of {len(sets)} for each number"
    assert np.array_equal(np.nextafter(want, got)[apart], got[apart]), "more than one float32 apart"


def test_means_that_are_never_corrected() -> None:
    """beta2 = 1 needs the smallest number of all as a divisor."""
    subject = RULES["adamw"]
    sets = [{**s, "beta2": 1.0} for s in common_sets(subject, 3)]
    got = Rows(subject, sets, device="cuda").run(launch_of(subject))
    host = np.array([subject.uniforms(s) for s in sets])
    assert np.isinf(host).any(axis=1).all()
    assert np.array_equal(got.astype(np.float32), host.astype(np.float32))


@pytest.mark.parametrize("subject", EXACT, ids=lambda r: r.name)
def test_operations_that_ieee_rounds_have_the_hosts_bits(subject: Rule) -> None:
    sets = signed_sets(subject, 1000)
    got = Rows(subject, sets, device="cuda").run(launch_of(subject))
    assert same_bits(got, np.array([subject.uniforms(s) for s in sets]))


@pytest.mark.parametrize("name", ["smooth", "nadam", "adam_amsgrad"])
def test_other_functions_are_near(name: str) -> None:
    subject = SUBJECTS[name]
    sets = common_sets(subject, 1000)
    got = Rows(subject, sets, device="cuda").run(launch_of(subject))
    np.testing.assert_allclose(got, [subject.uniforms(s) for s in sets], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("count", [1, 128, 300])
@pytest.mark.parametrize("name", ["lion", "sgd_momentum", "carrying"])
def test_numbers_are_read_and_written_in_their_types(name: str, count: int) -> None:
    """Rules without powers: to the bit."""
    subject = SUBJECTS[name]
    check_runs(mixed_rows(subject, common_sets(subject, count), device="cuda"), launch_of(subject))


def test_a_replay_reads_the_numbers_of_then() -> None:
    """Step counts go on, and a learning rate that has changed is taken."""
    subject = RULES["sgd_momentum"]
    rows = mixed_rows(subject, common_sets(subject, 300), device="cuda")
    launch, lr_at = launch_of(subject), 1 + subject.scalars.index("lr")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.start(launch)
    assert (rows.table == UNTOUCHED).all()
    for lr in (0.5, 0.25, 0.125):
        rows.wide[:, lr_at] = lr
        rows.narrow[:, lr_at] = lr
        table, numbers = rows.expected()
        graph.replay()
        assert same_bits(rows.table.cpu().numpy(), table)
        assert same_bits(rows.numbers(), numbers)
        assert (table == -lr).any()
