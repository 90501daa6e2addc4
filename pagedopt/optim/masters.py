"""The float32 numbers that bfloat16 parameters stand for with what they have lost (``param_format``): masters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter

import torch

from ..formats.sixteen import PARAM
from ..system.warn import warn_once
from ..tables.misfit import misfit
from ..tables.shards import local
from .locks import locked
from .saving import SavingOptimizer
from .state.encoding import decode
from .state.rule_optimizer import occurrences
from .step.preallocate import preallocate

Named = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
_version = attrgetter("_version")


class MasterOptimizer(SavingOptimizer):
    """What an optimizer offers beside parameters that are stored with what they have lost."""

    #: Version counters of parameters behind the last step; None: none are compared.
    _versions: list[int] | None = None
    _told_of_writes = False

    @locked
    def master(self, p: torch.Tensor) -> torch.Tensor:
        """Return the numbers that a parameter stands for: a new float32 tensor in its shape, on its device.

        Of a parameter beside which nothing is kept these are its own, in their dtype if that has 32 bits or more.  A
        DTensor has a DTensor.

        Args:
            p: the parameter.

        Raises:
            ValueError: it is no parameter of this optimizer.

        Example:
            >>> optimizer = pagedopt.PagedAdamW(model.parameters(), param_format="bfloat16+16")
            >>> exact = optimizer.master(model.weight)
        """
        self._check_own([p])
        return self._master(p, p.device)

    @locked
    def master_state_dict(self, named: Named) -> dict[str, torch.Tensor]:
        """Return the numbers that parameters stand for, by name, on the host: one after the other leaves the device.

        Args:
            named: names and parameters, as ``model.named_parameters()``; those of no group of this optimizer have
                their own numbers.

        Example:
            >>> torch.save(optimizer.master_state_dict(model.named_parameters()), "float32.pt")
        """
        return {name: self._master(p, torch.device("cpu")) for name, p in dict(named).items()}

    @locked
    def load_master(self, masters: Mapping[str, torch.Tensor], named: Named) -> None:
        """Set parameters, and what is kept beside them, so that they stand for these numbers.

        ``"bfloat16+8"`` rounds to nearest.  State that is not there yet is made, as by the first step.  A parameter
        that requires no gradient, or beside which nothing is kept, is rounded to its dtype.

        Args:
            masters: a floating-point tensor for each name, in the parameter's shape, on any device; of a DTensor one
                that is placed as it is.
            named: names and parameters, as ``model.named_parameters()``; others than those in ``masters`` stay.

        Raises:
            ValueError: a name is unknown, its parameter is of no group of this optimizer, or a tensor has another
                shape; nothing is changed.
            MemoryError, torch.OutOfMemoryError: there is no room for new state; nothing is changed.

        Example:
            >>> optimizer.load_master(torch.load("float32.pt"), model.named_parameters())
        """
        params = dict(named)
        if unknown := [name for name in masters if name not in params]:
            raise ValueError(f"no parameter is called {', '.join(map(repr, unknown))}; there are {', '.join(params)}")
        given = {name: (params[name], values) for name, values in masters.items()}
        self._check_own(p for p, _ in given.values())
        for name, (p, values) in given.items():
            if found := misfit(values, p.shape, placed=p, memory=False):
                raise ValueError(f"the master of {name} {found.why}")
        wanted = {id(p) for p, _ in given.values() if not self.state.get(p)}
        for index, group in enumerate(self.param_groups):
            if any(id(p) in wanted for p in group["params"]):
                preallocate(self, index)
        self.state.update({p: self.preallocated.pop(p) for p, _ in given.values() if p in self.preallocated})
        with torch.no_grad():
            for p, values in given.values():
                self._set(p, values)
        self._versions = None

    @locked
    def reset_master(self, p: torch.Tensor) -> None:
        """Forget what a parameter has lost: it stands for its own numbers, which somebody has written, say.

        Args:
            p: the parameter.

        Raises:
            ValueError: it is no parameter of this optimizer.
        """
        self._check_own([p])
        if (lost := self._lost(p)) is not None:
            lost.zero_()
            self.store.drop()

    def _check_own(self, params: Iterable[torch.Tensor]) -> None:
        own = {id(p) for _, _, p in occurrences(self)}
        for p in params:
            if id(p) not in own:
                raise ValueError(f"a tensor of shape {tuple(p.shape)} is no parameter of this optimizer")

    def _lost(self, p: torch.Tensor) -> torch.Tensor | None:
        """Return the column of what a parameter has lost; None: it has none so far."""
        form = self.form_of(p)
        if form is None or form.remainder is None:
            return None
        found: torch.Tensor | None = (self.state.get(p) or {}).get(form.columns[1].key(PARAM))
        return found

    def _master(self, p: torch.Tensor, device: torch.device) -> torch.Tensor:
        form, lost = self.form_of(p), self._lost(p)
        if form is not None and lost is not None:
            return decode(form, [p.detach(), lost], p, device)
        dtype = p.dtype if p.dtype.itemsize >= 4 else torch.float32
        return p.detach().to(device, dtype, copy=True)

    def _set(self, p: torch.Tensor, values: torch.Tensor) -> None:
        """Write numbers into a parameter and what it loses, through the host: a device needs no room for them."""
        form, lost, own = self.form_of(p), self._lost(p), local(p)
        if form is None or lost is None:
            own.copy_(local(values))
            return
        high, low = form.encode(local(values).detach().to("cpu", torch.float32).reshape(-1))
        own.copy_(high.view(own.shape))
        local(lost).copy_(low.view(own.shape))
        self.store.drop()

    def _note_versions(self) -> None:
        """Note, behind a step, which version counters parameters have, if a write may be told from an update."""
        quiet = self.param_format is None or self._told_of_writes
        self._versions = None if quiet or self._overlap or self._within else self._versions_now()

    def _look_for_writes(self) -> None:
        """Warn, once in a process, of parameters that others have written since the last step."""
        if self._versions is None or (now := self._versions_now()) == self._versions or now is None:
            return
        params = [p for _, _, p in occurrences(self)]
        written = [i for i, (a, b) in enumerate(zip(now, self._versions, strict=False)) if a != b]
        self._versions = None
        if len(params) == len(now) and any(self._lost(params[i]) is not None for i in written):
            self._told_of_writes = True
            warn_once(
                "written parameters",
                f"parameter {written[0]} was written since the last step, and what it had lost of the number before, "
                "half of its last bit at most, still counts; reset_master(p) forgets it, load_master() writes float32",
            )

    def _versions_now(self) -> list[int] | None:
        try:
            return [*map(_version, chain.from_iterable(group["params"] for group in self.param_groups))]
        except RuntimeError:  # tensors of inference mode count no versions
            return None
