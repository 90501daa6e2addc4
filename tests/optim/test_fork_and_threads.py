"""Forked processes, and an interrupt while several threads update one tensor."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import copy
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from forks import in_child
from optim_support import bits, same
from shots import interrupted
from stand_ins import refusal
from support import threads

from pagedopt import PagedAdamW
from pagedopt.optim.rule_optimizer import OptimizerLock
from tests.optim.faults import Scene, Stage, is_same, other_training
from tests.world import numbers

pytestmark = pytest.mark.usefixtures("folder")


def trained(placement: str) -> Stage:
    """After two steps, with gradients for the next."""
    stage = Stage(Scene("state_dict", placement))
    stage.ready()
    return stage


def together(*acts: Callable[[], Any]) -> list[BaseException]:
    """What the acts raise, each in a thread of its own."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(acts))

    def run(act: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            act()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@contextlib.contextmanager
def held_by_another(lock: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """A block in which a thread of its own holds ``lock``; a child that is forked there has no such thread."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("placement", ["resident", "spilled", "half"])
def test_a_forked_child_may_not_write_what_its_parent_sees(placement: str) -> None:
    """It has resident state of its own, and reads, copies and reports what is in a file."""
    stage, twin = trained(placement), trained("resident")
    opt, before, saved = stage.optimizer, stage.values(), other_training(stage.scene)
    writes = [opt.step, lambda: opt.load_state_dict(saved)]
    if placement != "resident":
        writes += [lambda: opt.set_device_budget(None), *([opt.spill] if placement == "half" else [])]

    def child() -> bool:
        torch.save(opt.state_dict(), io.BytesIO())
        own, copies = copy.deepcopy((opt, stage.params))
        for p, original in zip(copies, stage.params, strict=True):  # a copied parameter has no gradient
            p.grad = original.grad
        own.step()
        twin.optimizer.step()
        refused = ["fork" in refusal(act) for act in writes]
        done = all(map(torch.equal, copies, twin.params)) and bool(str(opt.memory_report()))
        return done and set(refused) == {placement != "resident"}

    assert in_child(child)
    assert is_same(stage.values(), before, False)
    for each in (stage, twin):
        each.optimizer.step()
        each.train(2, 5)
    assert is_same(stage.values(), twin.values(), False)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Ones."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("placement", ["resident", "spilled", "half"])
def test_workers_of_a_loader_are_forked_between_steps(placement: str) -> None:
    stage, twin = trained(placement), trained("resident")
    batches = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for number, _ in enumerate(batches):
        for each in (stage, twin):
            each.train(1, number)
    assert is_same(stage.values(), twin.values(), False)


@threads(2)
@pytest.mark.parametrize(("numel", "share"), [(2_000_003, None), (500_003, 0.5)], ids=["resident", "half"])
def test_when_an_interrupt_rises_no_thread_writes_any_more(numel: int, share: float | None) -> None:
    """At twenty moments of a step: what is there then is what was, or what should be, and it stays so."""
    param = torch.nn.Parameter(numbers((numel,), 1))
    optimizer = PagedAdamW([param], lr=0.1, device_budget=None if share is None else int(8 * numel * share))
    param.grad = numbers((numel,), 2)
    optimizer.step()
    start, saved = bits([param], optimizer), copy.deepcopy(optimizer.state_dict())
    begin = time.perf_counter()
    optimizer.step()
    took = time.perf_counter() - begin
    done = bits([param], optimizer)
    for trial in range(20):
        with torch.no_grad():
            param.copy_(start[0])
        optimizer.load_state_dict(saved)
        assert interrupted(optimizer.step, took * 1.1 * trial / 20)
        first = bits([param], optimizer)
        time.sleep(0.02)
        assert same(first, bits([param], optimizer)), "a thread goes on writing"
        assert same(first, done) or same(first, start), "neither before nor after the step"


@pytest.mark.parametrize("placement", ["resident", "spilled", "half"])
def test_a_step_in_another_thread_is_a_step(placement: str) -> None:
    """Where no signal handler ever runs."""
    stage, twin = Stage(Scene("step", placement)), Stage(Scene("step", placement))
    assert together(lambda: (stage.act(), stage.train(2, 5))) == []
    twin.act()
    twin.train(2, 5)
    assert is_same(stage.values(), twin.values(), False)


def test_pages_of_a_file_move_in_the_middle_of_any_pool_s_submit() -> None:
    """The garbage collector may run there, and a queued step of an optimizer that has died is carried out then."""
    p = torch.nn.Parameter(torch.ones(1 << 17))
    opt = PagedAdamW([p], device_budget=0)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    with concurrent.futures.thread._global_shutdown_lock:  # type: ignore[attr-defined]
        step = threading.Thread(target=opt.step)
        step.start()
        step.join(20)
        stuck = step.is_alive()
    step.join()
    assert not stuck
    assert opt.state[p]["step"] == 3


# --- several threads at one optimizer: each step is taken, and nobody is told of a step of another's ------------------


STEPS = 20


def begun(**options: Any) -> tuple[PagedAdamW, torch.nn.Parameter]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 100_000))
    p.grad = torch.linspace(1, 2, 100_000)
    return PagedAdamW([p], **options), p


LOOKS: dict[str, Callable[[PagedAdamW], Any]] = {
    "state_dict": lambda opt: opt.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "set_device_budget": lambda opt: opt.set_device_budget(opt.store.budget.said),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("options", [{}, {"device_budget": 0}, {"device_budget": "50%"}], ids=str)
def test_steps_and_looks_take_turns(options: dict[str, Any], look: str) -> None:
    opt, p = begun(**options)

    def steps() -> None:
        for _ in range(STEPS):
            opt.step()

    def looks() -> None:
        for _ in range(10):
            LOOKS[look](opt)

    assert together(steps, steps, looks) == []
    assert opt.state[p]["step"] == 2 * STEPS
    alone, q = begun(**options)
    for _ in range(2 * STEPS):
        alone.step()
    assert torch.equal(p, q)


def test_a_forked_child_finds_the_turn_open() -> None:
    """Whoever held it is in the parent."""
    opt, _ = begun()
    opt.step()
    with held_by_another(opt._lock()):
        assert in_child(opt.state_dict)


def test_a_turn_is_one_lock_that_its_thread_takes_again() -> None:
    turn = OptimizerLock()
    with turn(), turn():
        assert turn() is turn()
