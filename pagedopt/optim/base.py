"""What every paged optimizer shares: a step is one launch per combination of dtypes, over one pointer list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..arenas import check_placement
from ..formats import StateFormat, check_format
from ..rules import Rule
from ..transport import TRANSPORTS
from .bucket import Bucket
from .state import Arenas, copy_state, create_state

Group = dict[str, Any]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of optimizer state, by the place they are in (``device``, ``managed``, ``host``)."""

    by_place: Mapping[str, int]

    def __str__(self) -> str:
        parts = [f"{nbytes / 2**20:,.1f} MiB on {place}" for place, nbytes in self.by_place.items()]
        return "optimizer state: " + (", ".join(parts) or "none yet")


class PagedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` made from a rule.

    A subclass names its rule and, if they are not simply the group's values, its scalars::

        class SignDescent(PagedOptimizer):
            rule = sign_descent                      # a function decorated with pagedopt.rule
            def __init__(self, params, lr=1e-3, **options):
                super().__init__(params, {"lr": lr}, **options)

    The rule's first input is the parameter, its second the gradient, the others are state, created with zeros in the
    first step in which the parameter has a gradient.

    Args:
        params: parameters or groups, as for any torch optimizer.
        defaults: hyperparameters of groups that do not set their own.
        state_format: ``"float32"`` or ``"bfloat16"``, or one per state name; None: the parameter's dtype, as torch.
        placement: ``"device"``, or ``"managed"`` for CUDA managed memory (resident on the device, and at most a
            quarter of what is free there).
        transport: how the pointer table reaches the kernel (see :func:`pagedopt.multi_tensor_apply`).

    Raises:
        ValueError: an option has an unknown value.
    """

    rule: ClassVar[Rule]
    #: Whether state holds the number of steps under the key "step", as torch's Adam does.
    has_step: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        state_format: StateFormat = None,
        placement: str = "device",
        transport: str = "managed",
    ) -> None:
        self._configure(state_format, placement, transport)
        super().__init__(params, defaults)

    def _configure(self, state_format: StateFormat, placement: str, transport: str) -> None:
        check_format(state_format)
        check_placement(placement)
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}; there are {', '.join(sorted(TRANSPORTS))}")
        self.state_format, self.placement, self.transport = state_format, placement, transport
        self._arenas = Arenas(placement)
        self._buckets: list[Bucket] | None = None
        self._waiting: list[torch.Tensor] = []
        self._rules: list[Rule] = []

    def rule_of(self, group: Group) -> Rule:
        """The rule for a parameter group."""
        return self.rule

    def scalars(self, group: Group, step: float) -> dict[str, float]:
        """The rule's hyperparameters for ``group`` in its step number ``step`` (from 1), computed in double."""
        known = {**group, "step": step}
        return {name: float(known[name]) for name in self.rule_of(group).scalars if name in known}

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors of a parameter in ``group``."""
        return self.rule_of(group).inputs[2:]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, on the current stream, without waiting for it.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            RuntimeError: a gradient is sparse, or the stream is being captured into a CUDA graph.
            ValueError, TypeError: a parameter or gradient changed its size, dtype, device or lost its memory; nothing
                has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() cannot be captured into a CUDA graph: its step count and learning rate "
                "live on the host. Capture the model and step outside of the graph"
            )
        buckets = self._current_buckets()
        for bucket in buckets:
            bucket.refresh()
        for bucket in buckets:
            bucket.run(self)
        return loss

    def _current_buckets(self) -> list[Bucket]:
        """The prepared launches; made anew when groups were added or changed, or a parameter has its first gradient."""
        rules = [self.rule_of(group) for group in self.param_groups]
        stale = self._buckets is None or rules != self._rules or any(p.grad is not None for p in self._waiting)
        if stale:
            self._refuse_sparse()
            self._buckets = None
            with torch.no_grad():
                self._waiting, fresh = create_state(self, self._arenas)
                self._buckets = Bucket.partition(self, fresh)
            self._rules = rules
        assert self._buckets is not None
        return self._buckets

    def _refuse_sparse(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.layout is not torch.strided:
                    raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the torch optimizer it stands for.

        Values are copied into existing state tensors where there are any; state keeps its format and placement.

        Raises:
            ValueError: groups, parameters or shapes differ; the optimizer is unchanged then.
        """
        loaded: dict[Any, dict[str, Any]] = {}
        before = dict(self.state)

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(given["state"])
            self._check_loadable(given)
            return {**given, "state": {}}

        def fill(_: torch.optim.Optimizer) -> None:
            with torch.no_grad():
                copy_state(self, self._arenas, loaded, before)

        # Registered here, so that they run behind and before the hooks that others have registered.
        hooks = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(fill, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_loadable(self, state_dict: dict[str, Any]) -> None:
        mine, theirs = self.param_groups, state_dict["param_groups"]
        if [len(g["params"]) for g in mine] != [len(g["params"]) for g in theirs]:
            return  # torch says it best
        for group, other in zip(mine, theirs, strict=True):
            for p, key in zip(group["params"], other["params"], strict=True):
                for name in self.state_names(other) if key in state_dict["state"] else ():
                    value = state_dict["state"][key].get(name)
                    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                    if value is not None and shape != tuple(p.shape):
                        raise ValueError(
                            f"loaded {name} of parameter {key} is {shape}, the parameter is {tuple(p.shape)}"
                        )

    def __getstate__(self) -> dict[str, Any]:
        options = {"state_format": self.state_format, "placement": self.placement, "transport": self.transport}
        return {**super().__getstate__(), "_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if options := state.pop("_options", None):
            self._configure(**options)
        super().__setstate__(state)
        self._buckets = None

    def memory_report(self) -> MemoryReport:
        """Bytes of state by place."""
        places: dict[str, int] = {}
        for group in self.param_groups:
            for p in group["params"]:
                for name in self.state_names(group):
                    if isinstance(value := self.state.get(p, {}).get(name), torch.Tensor):
                        place = self._arenas.place_of(value)
                        places[place] = places.get(place, 0) + value.nbytes
        return MemoryReport(places)
