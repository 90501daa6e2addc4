"""Compare a paged optimizer with torch's on the user's own model, and leave the model as it was."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch

from ...common.kind_of import kind_of
from ...common.units import text_of_bytes, text_of_seconds
from ..adamw import PagedAdamW
from ..base import PagedOptimizer
from ..options import Options
from ..registry import OPTIMIZERS
from ..step.budget_advice import near_place

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
#: A smaller difference in bytes of state is reported as "nothing saved".
LITTLE = 1 << 10


@dataclass(frozen=True)
class Shadow:
    """What :func:`shadow` measured.  In each pair torch's value is first.

    Attributes:
        names: of the two classes; torch's with its implementation (loop, foreach, fused).
        losses: of every step.
        difference: the largest absolute difference between the two's parameters after the last step; NaN if either has
            become NaN.
        where: the name of the parameter with that difference.
        change: the largest change of a parameter by torch's steps, a yardstick for ``difference``.
        state_bytes: of state beside the parameters (on their device; on a CPU in RAM), a ring of slots included.
        seconds: of ``step()``, synchronized, the median without the first step (unless there is only one).
        torch_way: another implementation of torch's class, as a yardstick: how far is torch from itself?  "" if
            none was tried, as for complex parameters, a learning rate that is a tensor, and ``capturable`` groups.
        torch_difference, torch_losses: as ``difference`` and ``losses``, of torch's two implementations.

    Example:
        >>> print(pagedopt.shadow(model, optimizer, itertools.islice(loader, 5), device_budget="50%"))
    """

    names: tuple[str, str]
    losses: tuple[tuple[float, ...], tuple[float, ...]]
    difference: float
    where: str
    change: float
    state_bytes: tuple[int, int]
    seconds: tuple[float, float]
    torch_way: str = ""
    torch_difference: float = math.nan
    torch_losses: tuple[float, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """How much less state lies beside the parameters than with torch; negative if it is more."""
        return self.state_bytes[0] - self.state_bytes[1]

    def __str__(self) -> str:
        (one, other), steps = self.names, len(self.losses[0])
        losses = _apart(*self.losses)
        bytes_ = " and ".join(text_of_bytes(n) for n in self.state_bytes)
        times = " and ".join(text_of_seconds(s) for s in self.seconds)
        saved = f"{text_of_bytes(abs(self.saved_bytes))} {'saved' if self.saved_bytes > 0 else 'more'}"
        if abs(self.saved_bytes) < LITTLE:
            saved = "nothing saved"
        own = ""
        if self.torch_way:
            far = (
                f"{self.torch_difference:.2g} of a parameter, {_apart(self.losses[0], self.torch_losses):.2g} of a loss"
            )
            own = f"{one} and ({self.torch_way}) differ by {far}\n"
        return (
            f"{one} and {other}, {steps} steps on the same batches:\n"
            f"largest absolute difference: {self.difference:.2g} of a parameter ({self.where}; these steps moved one "
            f"by {self.change:.2g} at most), {losses:.2g} of a loss\n{own}"
            f"state beside the parameters: {bytes_}, {saved}\n"
            f"a step: {times}"
        )


def shadow(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    steps: int = 10,
    **options: Unpack[Options],
) -> Shadow:
    """Train with torch's optimizer, then from the same start with the paged one, then restore everything.

    torch's uses the implementation that the groups' flags choose (``foreach``, ``fused``), else its default.  Each step
    differs by a few roundings, and in float32 those of the paged one are the smaller ones (notes/arithmetic.md).  Where
    the paged one has ``max_grad_norm``, ``clip_grad_norm_`` comes before torch's step.  As
    training amplifies them, a third run, with another of torch's implementations, says how far torch is from itself.

    Each run has state of its own, which begins as a copy of ``optimizer``'s.  The device needs room for one such state
    more, and the host for three copies of the parameters.  Restored are parameters, gradients, buffers, modes and
    random number generators of torch, NumPy and Python; ``optimizer`` and its state are never touched.  Batches taken
    from an iterator are gone.

    Args:
        optimizer: over the model's parameters: one of torch's that has a paged counterpart, or a paged one.
        batches: at most ``steps`` of them are used, each in every run.
        loss: function (model, batch) that returns a tensor of one element; None: call ``model(**batch)`` for a dict,
            ``model(*batch)`` for a tuple or list, else ``model(batch)``, and use ``loss`` of the result if it has one.
        options: options of the paged optimizer (:class:`Options`); they override those of a paged ``optimizer``.

    Raises:
        TypeError: ``optimizer`` has no counterpart, a loss is not one number, or ``batches`` is not iterable.
        ValueError: there is no batch, or ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    pair, ours = _pair(optimizer, options)
    decay = {"decoupled_weight_decay": False} if pair[0] is torch.optim.Adam else {}  # torch 2.6 lacks it in groups
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches are {batches!r}; give a list of batches, or a loader")
    taken = list(itertools.islice(batches, steps))
    if not taken:
        raise ValueError("there is no batch in batches (an iterator that was used up gives none)")
    runs: list[tuple[Any, Options, dict[str, Any]]] = [(pair[0], {}, {}), (pair[1], ours, {})]
    if other := _other_implementation(optimizer):
        runs.append((pair[0], {}, other))
    seen, ends = [], []
    with _restored(model, optimizer) as restart:
        for kind, more, flags in runs:
            restart()
            twin = kind([dict(group) for group in optimizer.param_groups], **more)
            saved = optimizer.decoded_state_dict() if isinstance(optimizer, PagedOptimizer) else optimizer.state_dict()
            saved = {**saved, "param_groups": [{**group, **flags} for group in saved["param_groups"]]}
            # torch's optimizer goes on in the tensors that it loads, which may be those of `optimizer`.
            twin.load_state_dict(copy.deepcopy(saved) if kind is pair[0] else saved)
            del saved
            for group, given in zip(twin.param_groups, optimizer.param_groups, strict=True):
                group.update(
                    {**decay, **given, **flags, "params": group["params"]}
                )  # loading into AdamW changes Adam's decay
            clip = None if kind is pair[1] else ours.get("max_grad_norm")
            seen.append(_train(model, twin, taken, loss or _loss, clip))
            ends.append({name: p.detach().cpu().clone() for name, p in _named(model, optimizer)})
            del twin
    difference, where = _largest(*ends[:2])
    change, _ = _largest(ends[0], {name: p.detach() for name, p in _named(model, optimizer)})  # restored by now
    losses, nbytes, seconds = zip(*seen, strict=True)
    names = (f"torch's {pair[0].__name__} ({_implementation(optimizer)})", pair[1].__name__)
    found = Shadow(names, losses[:2], difference, where, change, nbytes[:2], seconds[:2])
    if not other:
        return found
    name, (apart, _) = "fused" if other["fused"] else "foreach", _largest(ends[0], ends[2])
    return replace(found, torch_way=name, torch_difference=apart, torch_losses=losses[2])


def _pair(optimizer: torch.optim.Optimizer, options: Options) -> tuple[tuple[Any, Any], Options]:
    """Return (torch's class, the paged class), and the options of the paged one."""
    known: list[tuple[Any, Any]] = [(entry.torch, entry.optimizer) for entry in OPTIMIZERS if entry.torch]
    known.append((torch.optim.Adam, PagedAdamW))
    for theirs, ours in known:
        if isinstance(optimizer, PagedOptimizer) and isinstance(optimizer, ours):
            given: Options = optimizer.__getstate__()["_options"]
            return (theirs, type(optimizer)), {**given, **options}
        if type(optimizer) is theirs:
            return (theirs, ours), options
    names = ", ".join(f"torch.optim.{theirs.__name__} or {ours.__name__}" for theirs, ours in known)
    raise TypeError(f"optimizer is {kind_of(optimizer)}, which has no counterpart; there are {names}")


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    """Return the implementation that the groups' flags choose; without a flag torch's default."""
    chosen = set()
    for group in optimizer.param_groups:
        default = any(p.is_cuda for p in group["params"]) if group.get("foreach") is None else group["foreach"]
        chosen.add("fused" if group.get("fused") else "foreach" if default else "loop")
    return " and ".join(sorted(chosen))


def _other_implementation(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return flags that choose another implementation of torch; {} if these groups may not allow one."""
    for group in optimizer.param_groups:
        numbers = (group["lr"], *group.get("betas", ()))
        if group.get("capturable") or any(isinstance(number, torch.Tensor) for number in numbers):
            return {}
        if not all(p.is_floating_point() for p in group["params"]):
            return {}
    fused = "fused" not in _implementation(optimizer)
    return {"foreach": not fused, "fused": fused}


def _apart(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference between losses, NaN if one is not a number."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart)


def _named(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model, parameter) for the parameters of an optimizer."""
    names = {id(p): name for name, p in model.named_parameters()}
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        yield names.get(id(p), f"parameter {index}"), p


def _loss(model: torch.nn.Module, batch: Any) -> Any:
    """Return the loss of a model that returns it, or has it as ``loss`` of its result."""
    if isinstance(batch, Mapping):
        found = model(**batch)
    else:
        found = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    return found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", found)


def _train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    loss: Loss,
    clip: float | None = None,
) -> tuple[tuple[float, ...], int, float]:
    """Return losses, bytes of state beside the parameters, and seconds of a step; ``clip``: the norm to clip to."""
    losses, times = [], []
    devices = {p.device for group in optimizer.param_groups for p in group["params"] if p.is_cuda}
    with torch.enable_grad():
        for batch in batches:
            optimizer.zero_grad()
            found = loss(model, batch)
            if not isinstance(found, torch.Tensor) or found.numel() != 1:
                what = f"a tensor of {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
                raise TypeError(f"the loss of a batch is {what}, not one number; give loss=, a function(model, batch)")
            found.backward()
            begin = _now(devices)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
            optimizer.step()
            times.append(_now(devices) - begin)
            losses.append(float(found.detach()))
    return tuple(losses), _near_bytes(optimizer), statistics.median(times[1:] or times)


def _now(devices: Iterable[torch.device]) -> float:
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _near_bytes(optimizer: torch.optim.Optimizer) -> int:
    near = near_place(optimizer.param_groups)
    if isinstance(optimizer, PagedOptimizer):
        report = optimizer.memory_report()
        return report.by_place.get(near, 0) + report.ring
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, Mapping)]
    tensors = [t for entry in entries for t in entry.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors if t.is_cuda == (near == "device"))


def _largest(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest absolute difference, NaN if there is any, and the name of its tensor."""
    most, where = 0.0, next(iter(one))
    for name, tensor in one.items():
        if tensor.numel():
            wide = torch.promote_types(tensor.dtype, torch.float64)
            found = float((tensor.to(wide) - other[name].cpu().to(wide)).abs().max())
            if not (found <= most or math.isnan(most)):
                most, where = found, name
    return most, where


@contextlib.contextmanager
def _restored(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Yield a function that restores the model in place and sets grads to None; after the block, restore grads too."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *(p for _, p in _named(model, optimizer)))}
    values = [(t, t.detach().cpu().clone()) for t in tensors.values()]
    grads = [(t, t.grad) for t in tensors.values() if t.is_leaf]
    modules = [(m, m.training, dict(m._buffers)) for m in model.modules()]
    numbers = random.getstate(), np.random.get_state()

    def restore() -> None:
        with torch.no_grad():
            for t, value in values:
                t.copy_(value)
        for t, _ in grads:
            t.grad = None
        for module, mode, buffers in modules:
            module.training = mode
            module._buffers.update(buffers)
        random.setstate(numbers[0])
        np.random.set_state(numbers[1])
        torch.set_rng_state(generator)
        if torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all(generators)

    with torch.random.fork_rng():
        generator = torch.get_rng_state()
        generators = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        try:
            yield restore
        finally:
            restore()
            for t, grad in grads:
                t.grad = grad


__all__ = ["Loss", "Shadow", "shadow"]
