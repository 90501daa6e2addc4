"""What tests of clients share: where state lives, torch's AdamW beside every step, and a new process that resumes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import python
from gpu_support import NEEDED
from overlapped import SmallPages

from pagedopt import PagedAdamW
from pagedopt.system import driver

Tensors = Iterable[torch.Tensor]
#: Nothing at its default and nothing zero; an epsilon with which noise in a gradient that should be zero moves nothing.
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2}
#: Where state lives.
PLACES: dict[str, dict[str, Any]] = {"resident": {}, "away": {"device_budget": 0}}
#: Where it lived when it was saved, and where it lives from then on.
MOVES = (("resident", "resident"), ("away", "away"), ("away", "resident"))
#: The first step is plain, as no forward was seen before it.
NOT_QUEUED = pytest.mark.filterwarnings("ignore:this step was not queued.*no forward")
#: Names of AdamW's state in the shape of a parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")

_CUDA = pytest.param("cuda", marks=NEEDED)


def everywhere(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test runs on each ``device``, with state in each ``place``."""
    return on_devices(pytest.mark.parametrize("place", PLACES)(test))


def on_devices(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test runs on each ``device``."""
    return pytest.mark.parametrize("device", ["cpu", _CUDA])(test)


def on_cuda(test: Callable[..., Any]) -> Callable[..., Any]:
    """The test runs on a GPU alone, with state in each ``place``."""
    return pytest.mark.parametrize("device", [_CUDA])(pytest.mark.parametrize("place", PLACES)(test))


def torchs(params: Any, **options: Any) -> torch.optim.AdamW:
    """Torch's AdamW, to train beside."""
    return torch.optim.AdamW(params, **{**ADAMW, "fused": True, **options})


def kinds(place: str) -> tuple[tuple[Any, dict[str, Any]], ...]:
    """Ours, with state in a place, and torch's: class and options."""
    return (Watched, {**ADAMW, **PLACES[place]}), (torch.optim.AdamW, {**ADAMW, "fused": True})


def both(place: str) -> list[Callable[[Any], Any]]:
    """What makes ours, with state in a place, and torch's."""
    return [functools.partial(kind, **options) for kind, options in kinds(place)]


class Watched(PagedAdamW):
    """Ours, with torch's fused AdamW beside it: each step is taken by both, from the same parameters, gradients and
    moments.  Step counts are each one's own.  What ours divides by a scale, clips or skips is done to torch's before.

    Attributes:
        watched: steps that have been compared.

    Raises:
        AssertionError: from ``step``: the two differ by more than roundings.
    """

    watched: int = 0

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **{**ADAMW, **options})
        self._twin: torch.optim.AdamW | None = None
        self.register_step_pre_hook(type(self)._before)
        self.register_step_post_hook(type(self)._after)

    def _before(self, *_: Any) -> None:
        if self._twin is None or _kinds(self._twin) != _kinds(self):  # parameters have joined or moved
            self._twin = self._torchs()
        for group, twins in zip(self.param_groups, self._twin.param_groups, strict=True):
            twins.update({name: value for name, value in group.items() if name != "params"}, fused=True)
        for p, q, _ in self._pairs():
            q.data.copy_(p.data)
            for name in MOMENTS if self._twin.state[q] else ():
                self._twin.state[q][name].copy_(self.state[p][name])

    def _torchs(self) -> torch.optim.AdamW:
        """Torch's, in the state in which this one is."""
        groups = [{**group, "params": [_copy(p) for p in group["params"]]} for group in self.param_groups]
        made = torch.optim.AdamW(groups, fused=True)
        saved = self.state_dict()
        state = {i: {k: _copy(v) for k, v in entry.items()} for i, entry in saved["state"].items()}
        fused = [{**group, "fused": True} for group in saved["param_groups"]]
        made.load_state_dict({"state": state, "param_groups": fused})
        return made

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Each parameter with torch's and its learning rate."""
        assert self._twin is not None
        for group, twins in zip(self.param_groups, self._twin.param_groups, strict=True):
            for p, q in zip(group["params"], twins["params"], strict=True):
                yield p, q, float(group["lr"])

    def _after(self, *_: Any) -> None:
        assert self._twin is not None
        before = {}
        factor, skipped = self._factor()
        for p, q, lr in self._pairs():
            q.grad = (
                None if p.grad is None else (p.grad.detach() * factor).to(p.dtype)
            )  # of a closure: there since then
            if q.grad is not None:
                mean = self._twin.state[q].get("exp_avg", torch.zeros_like(q))
                before[p] = {"": q.detach().abs() + lr, "exp_avg": mean.abs() + q.grad.abs(), "exp_avg_sq": 0}
        if skipped:
            assert all(torch.equal(p, q) for p, q, _ in self._pairs()), "a step was to be skipped"
            return
        self._twin.step()
        for p, q, _ in self._pairs():
            if p.grad is None:
                assert torch.equal(p, q), "a parameter without gradient has moved"
                continue
            same("a parameter", p, q, before[p][""])
            for name in MOMENTS:
                same(name, self.state[p][name], self._twin.state[q][name], before[p][name])
        self.watched += 1

    def _factor(self) -> tuple[float, bool]:
        """By what ours has multiplied gradients, and whether it was to skip the step."""
        given: Any = vars(self)
        scale = 1.0 if given.get("grad_scale") is None else float(given["grad_scale"])
        coefficient = 1.0
        if self.max_grad_norm is not None:
            squares = sum(
                float((p.grad.double() / scale).square().sum()) for p, *_ in self._pairs() if p.grad is not None
            )
            coefficient = min(1.0, self.max_grad_norm / (squares**0.5 + 1e-6))
        return coefficient / scale, bool(given.get("found_inf"))


def _kinds(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    return [[(p.device, p.dtype, p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def same(what: str, mine: torch.Tensor, theirs: torch.Tensor, size: torch.Tensor | float) -> None:
    """No element differs by more than four roundings of itself and of the ``size`` of what it was made of."""
    mine, theirs = mine.detach().double(), theirs.detach()
    rounding = (theirs.abs() + size).double() * torch.finfo(theirs.dtype).eps
    off = float(((mine - theirs.double()).abs() / (rounding + 1e-30)).max())
    assert off <= 4, f"{what} of {tuple(mine.shape)} is {off} roundings off"


def moved_alike(ours: Tensors, theirs: Tensors, start: Tensors, near: float) -> None:
    """The ends of two trainings are nearer to each other than the share ``near`` of the way from their start."""
    off = way = 0.0
    for a, b, s in zip(ours, theirs, start, strict=True):
        a, b, s = (t.detach().double().cpu() for t in (a, b, s))
        off, way = off + float((a - b).square().sum()), way + float((b - s).square().sum())
    assert way > 0, "nothing has moved"
    assert off**0.5 < near * way**0.5, f"{(off / way) ** 0.5} of the way between ours and torch's"


def steps(opt: Any, numbers: Iterable[int], loss_of: Callable[[int], Any], after: Any = None) -> list[float]:
    """A step for each number, behind which ``after`` is called; the losses."""
    losses = []
    for number in numbers:
        loss = loss_of(number)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if after is not None:
            after(number)
    return losses


def agree(ends: list[Any], steps: int, near: float, start: Tensors, moved: float = 0.0, skips: bool = False) -> None:
    """Losses, tensors and optimizer at the end of a training, of ours and of torch's; ``moved``: see
    :func:`moved_alike`, ``near`` if left out; ``skips``: a scaler may leave steps out."""
    (losses, tensors, optimizer), (their_losses, their_tensors, _) = ends
    assert optimizer.watched == steps or (skips and optimizer.watched >= 2)
    assert losses == pytest.approx(their_losses, rel=near)
    moved_alike(tensors, their_tensors, start, moved or near)


def alike_when_attached(run: Callable[[Callable[[torch.nn.Module], PagedAdamW]], Any]) -> None:
    """With its update queued under the next forward a training has the bits of plain steps; nothing reads a parameter
    too early, and pages are hidden.

    Args:
        run: trains a model with what the function that it is given makes of it; returns losses and the model.
    """
    ends = []
    for attached in (True, False):
        made: list[PagedAdamW] = []
        with contextlib.ExitStack() as watching:
            losses, model = run(functools.partial(_away, made, attached, watching))
        made[0].wait()
        ends.append((losses, values(model), made[0]))
    (losses, weights, opt), (plain_losses, plain_weights, _) = ends
    assert losses == plain_losses
    assert all(map(torch.equal, weights, plain_weights))
    assert opt.overlap_report().hidden > sum(arena.layout.pages for arena in opt.store.arenas)
    assert not opt.overlap_report().plain


def _away(made: list[PagedAdamW], attached: bool, watching: contextlib.ExitStack, model: torch.nn.Module) -> PagedAdamW:
    """An optimizer with all state away, ``made`` for a model."""
    opt = PagedAdamW(model.parameters(), **ADAMW, placement=SmallPages, device_budget=0)
    if attached:
        opt.attach(model)
        watching.enter_context(opt.watch_reads())
    made.append(opt)
    return opt


def forget_accelerate() -> None:
    """What accelerate shares in a process, device and precision among it, is as if nobody had used it."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def gpt2() -> Any:
    """A GPT-2 of transformers' with two layers and dropout."""
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 61}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="eager"))


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of a model's parameters and buffers, on the CPU."""
    return [t.detach().cpu().clone() for t in model.state_dict().values() if isinstance(t, torch.Tensor)]


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One number for all bits of a model and of an optimizer's state."""
    found = hashlib.sha256()
    tensors = list(model.state_dict().values())
    for entry in optimizer.state_dict()["state"].values():
        tensors += entry.values()
    for tensor in tensors:
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def full_card(monkeypatch: pytest.MonkeyPatch) -> torch.OutOfMemoryError:
    """What a step raises where the card has no room for its state."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10, 100))
    with pytest.raises(torch.OutOfMemoryError) as found, driver.explained(0, 1000, driver.Location.DEVICE):
        raise driver.CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    return found.value


def goes_on(file: str, folder: Path, device: str, run: Callable[[str], str], timeout: float = 110) -> None:
    """What was saved in ``folder`` goes on in a new process, in each of ``MOVES``, to the bits of the whole run.

    Args:
        file: of the test, which as a program is a :func:`child`.
        run: trains with state in a place, saves in the middle, and returns the digest of the end.
    """
    whole = {place: run(place) for place in PLACES}
    assert whole["away"] == whole["resident"]
    python(file, folder, device, timeout=timeout)
    found = json.loads((folder / "answer.json").read_text())
    assert found == {f"{before} to {after}": whole["resident"] for before, after in MOVES}


def exact() -> None:
    """A card computes in float32 what is float32, in one order."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def child(go_on: Callable[[Path, str, str, str], str]) -> None:
    """The program: ``go_on(folder, device, before, after)`` is a digest, that of what was saved with state in the place
    ``before`` and has gone on with it in the place ``after``."""
    exact()
    folder, device = Path(sys.argv[1]), sys.argv[2]
    found = {f"{before} to {after}": go_on(folder, device, before, after) for before, after in MOVES}
    (folder / "answer.json").write_text(json.dumps(found))
