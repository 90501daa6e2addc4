"""A step on a GPU whose memory is refused, whose copies fail, whose kernel does not compile, or that Ctrl-C meets.

It is right, or nothing has changed, or what is damaged says so; and CUDA keeps no error for those who come after.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_support import NEEDED, all_of_the_card_in_the_end, assert_clean, everything, parameters, same, steps, trained
from often import call_by_call
from optim_support import ADAMW
from stand_ins import raising

from pagedopt import PagedAdamW
from pagedopt.kernels import cuda, source
from pagedopt.kernels.nvrtc import CompileError
from pagedopt.system import driver
from pagedopt.system.copies import Copy
from tests.optim.faults import Scene, Stage, expected

pytestmark = [*NEEDED, call_by_call]

STAGED = [Scene("step", placement, case, "cuda") for placement in ("spilled", "half") for case in ("adamw", "momentum")]


@pytest.fixture(autouse=True)
def no_error_is_left() -> Iterator[None]:
    yield
    assert_clean()


def set_up(scene: Scene) -> Stage:
    """A stage, after what it must come to is known."""
    expected(scene)
    return Stage(scene)


def hit_copy(at: int, act: Callable[[], Any], step: Callable[[], Any], patch: pytest.MonkeyPatch) -> int:
    """Act in front of copy number ``at`` of a step; returns how many copies it has begun."""
    queue, begun = Copy.queue, 0

    def hit(copy: Copy, stream: int) -> None:
        nonlocal begun
        begun += 1
        if begun == at:
            act()
        queue(copy, stream)

    with patch.context() as here:
        here.setattr(Copy, "queue", hit)
        step()
    return begun


#: What is done in the place of a copy, what rises then, and what has become of the step.
REFUSED = driver.CudaError("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE", "says the test")
HITS: dict[str, tuple[Callable[[], Any], type[BaseException], tuple[str, ...]]] = {
    "fails": (raising(REFUSED), driver.CudaError, ("before", "damaged")),
    "interrupted": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, ("after",)),
}


@pytest.mark.parametrize("how", HITS)
@pytest.mark.parametrize("scene", STAGED, ids=str)
def test_each_copy_of_a_staged_sweep_is_hit(scene: Scene, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt waits for the end of the sweep."""
    act, error, found = HITS[how]
    copies = hit_copy(0, act, set_up(scene).act, monkeypatch)
    assert copies >= 2, "nothing is staged"
    for at in range(1, copies + 1):
        stage = set_up(scene)
        with pytest.raises(error):
            hit_copy(at, act, stage.act, monkeypatch)
        assert_clean()
        assert stage.verdict(may_be_damaged=how == "fails") in found, f"copy {at}"


@pytest.mark.parametrize("nth", [2, 3, 8])
def test_a_copy_that_is_torn_between_sections_brings_nothing_back(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose second section is not in its slot must not be copied home: there is another page's there."""
    formats = {"exp_avg": "bfloat16", "exp_avg_sq": "float32"}  # else all sections are one copy
    params, opt = trained(3, placement="mapped", device_budget=0, state_format=formats)
    before = everything(params, opt)
    with pytest.raises(KeyboardInterrupt):
        hit_copy(nth, raising(KeyboardInterrupt()), opt.step, monkeypatch)
    assert not opt.damaged
    assert same(before, everything(params, opt))


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
    assert stage.verdict(may_be_damaged=False) == "after" or error is not None, "nobody heard of it"


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
