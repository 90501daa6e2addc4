"""Steps that are held to float64, and to a copy of their bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from experiments.clock import Case
from experiments.comparing import by_clock_of, over
from experiments.lab import Row, Run
from experiments.works.models import COPY, OURS, Build, Work
from experiments.works.reference import Reference


def checked(
    run: Run, work: Work, builds: Mapping[str, Build], device: torch.device
) -> tuple[list[Case], dict[str, float]]:
    """A case per contender, each over parameters of its own, after four of its updates; and their errors.

    Raises:
        AssertionError: our update is not right.
    """
    first = work.parameters(device)
    grads = [p.grad for p in first if p.grad is not None]
    reference = Reference(first)
    cases, errors = [], {}
    for name, build in builds.items():
        is_ours = name.startswith(OURS)
        params = work.parameters(device, grads)
        with run.attempt(f"{work.name}, {name}", () if is_ours else (Exception,)):  # others' code may raise anything
            contender = build(params)
            errors[name] = reference.error(params, contender)
            cases.append(Case(name, contender.step))
        if not errors.get(name, 0.0) <= work.tolerance:
            what = f"{work.name}, {name}: its update is off by {errors[name]:.2g} of itself, allowed {work.tolerance:g}"
            if is_ours:
                raise AssertionError(what)
            run.leave_out(f"{what}; timed all the same")
    return cases, errors


def copy_of_bytes(work: Work, device: torch.device) -> Case:
    """Read half the bytes of an update and write the other half."""
    source = torch.rand(int(work.bytes_each * work.numel) // 8, device=device)
    target = torch.empty_like(source)
    return Case(COPY, lambda: target.copy_(source))


def of_copy(row: Row, copy: Row | None) -> float | None:
    """How fast a row is, in % of a copy of as many bytes, by the row's clock; None where there is no copy, or on a CPU.

    There a copy is no floor: a CPU reads a line of memory before it writes into it.  So a copy also reads its target,
    and nobody counts that; a step has read whatever it writes.
    """
    share = None if row["device"] == "cpu" else over(by_clock_of(row, copy), row["time"])
    return share and 100 * share
