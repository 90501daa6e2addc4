"""A step on a GPU whose memory is refused, whose copies fail, whose kernel does not compile, or that Ctrl-C meets.

It is right, or nothing has changed, or what is damaged says so; and CUDA keeps no error for those who come after.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, all_of_the_card_in_the_end, assert_clean, everything, parameters, same, steps
from optim_support import ADAMW
from staged import call_by_call
from stand_ins import raising

from pagedopt import PagedAdamW
from pagedopt.kernels import cuda, source
from pagedopt.kernels.nvrtc import CompileError
from pagedopt.placements import store
from pagedopt.system import driver
from pagedopt.system.copies import Copy
from tests.optim.faults import Scene, Stage, expected

pytestmark = [*NEEDED, call_by_call]

STAGED = [Scene("step", placement, case, "cuda") for placement in ("spilled", "half") for case in ("adamw", "momentum")]
#: How many of the copies of a step are hit.
HITS = 8


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    yield
    assert_clean()


def set_up(scene: Scene) -> Stage:
    """A stage, after what it must come to is known."""
    expected(scene)
    return Stage(scene)


class Hit:
    """Stands in for ``Copy.queue``: calls ``act`` in the place of copy number ``at``; 0: of none."""

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        self.at, self.act, self.count, self.queue = at, act, 0, Copy.queue

    def put_in_place(self, patch: pytest.MonkeyPatch) -> Hit:
        patch.setattr(Copy, "queue", lambda copy, stream: self(copy, stream))
        return self

    def __call__(self, copy: Copy, stream: int) -> None:
        self.count += 1
        if self.count == self.at:
            self.act()
        self.queue(copy, stream)


def hit_with(
    act: Callable[[], Any], scene: Scene, patch: pytest.MonkeyPatch, error: type[BaseException] = KeyboardInterrupt
) -> Iterator[tuple[int, Stage]]:
    """Act in some of the copies that the operation makes, which raises then; the stage behind each."""
    stage, counting = set_up(scene), Hit(0, lambda: None)
    with patch.context() as here:
        counting.put_in_place(here)
        stage.act()
    assert counting.count >= 2, "nothing is staged"
    for at in range(1, counting.count + 1, max(1, counting.count // HITS)):
        stage = Stage(scene)
        with patch.context() as here:
            Hit(at, act).put_in_place(here)
            with pytest.raises(error, match="says the test" if error is driver.CudaError else None):
                stage.act()
        assert_clean()
        yield at, stage


@pytest.mark.parametrize("scene", STAGED, ids=str)
def test_a_copy_that_fails_is_heard_of(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = raising(driver.CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE", "refused, says the test"))
    for at, stage in hit_with(refuse, scene, monkeypatch, driver.CudaError):
        assert stage.verdict(may_be_damaged=True) in ("before", "damaged"), f"copy {at}"


@pytest.mark.parametrize("scene", STAGED, ids=str)
def test_an_interrupt_in_a_staged_sweep_waits_for_its_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for at, stage in hit_with(lambda: signal.raise_signal(signal.SIGINT), scene, monkeypatch):
        assert stage.verdict(may_be_damaged=False) == "after", f"copy {at}"


def test_no_room_for_the_slots_of_a_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = set_up(Scene("first step", "spilled", "adamw", "cuda"))
    with monkeypatch.context() as here:
        here.setattr(store, "ring_for", raising(torch.OutOfMemoryError("no slots, says the test")))
        with pytest.raises(torch.OutOfMemoryError, match="says the test"):
            stage.act()
    assert_clean()
    assert stage.verdict(may_be_damaged=False) == "before"


@pytest.mark.exclusive
@pytest.mark.parametrize("placement", ["resident", "spilled", "half"])
@pytest.mark.parametrize("operation", ["first step", "step", "load fresh", "load used", "deepcopy"])
def test_a_full_device_refuses_or_nothing_is_asked_of_it(operation: str, placement: str) -> None:
    """torch's own allocator refuses, as it does where a model has taken everything."""
    stage = set_up(Scene(operation, placement, "adamw", "cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    error: BaseException | None = None
    with all_of_the_card_in_the_end():
        torch.cuda.set_per_process_memory_fraction(1e-6)
        try:
            stage.act()
        except (MemoryError, torch.OutOfMemoryError) as refused:
            error = refused.with_traceback(None)
    assert_clean()
    found = stage.verdict(may_be_damaged=False)
    assert found == "after" or error is not None, "nobody heard of it"


class Scarce:
    """Stands in for an allocation of the driver: the ``at``-th that any of them is asked for, and all later, fail."""

    def __init__(self, name: str, at: int, asked: list[str]) -> None:
        self.name, self.at, self.asked, self.allocate = name, at, asked, getattr(driver, name)

    def __call__(self, *given: Any) -> Any:
        self.asked.append(self.name)
        if len(self.asked) >= self.at:
            raise driver.CudaError(self.name, "CUDA_ERROR_OUT_OF_MEMORY", "refused, says the test")
        return self.allocate(*given)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("operation", ["first step", "step"])
def test_no_memory_for_a_pointer_table(operation: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a first launch is there before anything changes; behind a launch a step may be damaged, and says so."""
    stage, error = set_up(Scene(operation, "resident", "adamw", "cuda")), None
    asked: list[str] = []
    with monkeypatch.context() as here:
        for name in ("allocate_managed", "allocate_mapped", "allocate_pinned"):
            here.setattr(driver, name, Scarce(name, at, asked))
        try:
            stage.act()
        except (RuntimeError, MemoryError) as refused:
            error = refused.with_traceback(None)
    assert_clean()
    assert asked or operation == "step", "no table was made"
    first = operation == "first step" and at == 1
    found = stage.verdict(may_be_damaged=not first)
    assert found == "after" or error is not None, "nobody heard of it"
    assert found == "before" or not first


OPTIONS: list[dict[str, Any]] = [{}, {"device_budget": 0}, {"device_budget": "50%", "host_access": "in_place"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_kernel_that_does_not_compile_changes_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, twin = parameters(), parameters()
    opt, plain = PagedAdamW(params, **options, **ADAMW), PagedAdamW(twin, **ADAMW)
    text = source.text

    def broken(*given: Any, **named: Any) -> str:
        return text(*given, **named) + "\n#error no kernel, says the test\n"

    for rule in ("its first", "another"):
        before = everything(params, opt)
        with monkeypatch.context() as here:
            here.setattr(source, "text", broken)
            cuda.multi_tensor_kernel.cache_clear()
            for _ in range(2):
                with pytest.raises(CompileError, match="says the test"):
                    steps(params, opt, 1, gaps=False)
        assert_clean()
        assert same(before, everything(params, opt)), rule
        assert bool(opt.state) == (rule == "another")
        for ps, o in ((params, opt), (twin, plain)):
            steps(ps, o, 3, gaps=False)
        assert same(everything(params, opt), everything(twin, plain)), rule
        for o in (opt, plain):
            o.param_groups[0]["decoupled_weight_decay"] = False  # which is Adam's rule
