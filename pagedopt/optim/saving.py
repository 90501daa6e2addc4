"""State dicts: torch's, out of an optimizer and into it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .columns import decoded
from .loading.check import check_is_dict
from .loading.load import load
from .locks import locked
from .options import drop_formats
from .overlapping import OverlappingOptimizer
from .rule_optimizer import RuleOptimizer, check_whole

#: Changes a new state dict of an optimizer in place, or returns another.
Change = Callable[[RuleOptimizer, dict[str, Any]], dict[str, Any] | None]


class SavingOptimizer(OverlappingOptimizer):
    """What an optimizer offers to checkpoints."""

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, or what a hook returns.  Tensors are the optimizer's, each with its own storage.

        State in int8 is codes, whose strides say where their blocks lie: store them with their strides, as torch.save
        does.  Any ``state_format`` loads them; torch's optimizers raise ``KeyError: 'exp_avg'`` in their step and need
        :meth:`decoded_state_dict`.

        Raises:
            RuntimeError: state is damaged, or an update was lost (see :meth:`wait`); a backward has begun a step that
                :meth:`step` has not ended (see :meth:`attach`; so do loads, copies, moves and new groups).
        """
        self._tell_misuse()
        self._check_whole()
        with self._changing(drop_formats):
            return super().state_dict()

    @locked
    def decoded_state_dict(self) -> dict[str, Any]:
        """Return :meth:`state_dict` with all state as plain numbers, for torch's optimizer or any ``state_format``.

        State in a floating-point format is not copied.  Decoded state is new: float32 (or what its format computes in),
        on the host.  Hooks on :meth:`state_dict` see it.  Raises RuntimeError if state is damaged.

        Example:
            >>> theirs = torch.optim.AdamW(model.parameters())
            >>> theirs.load_state_dict(optimizer.decoded_state_dict())
        """
        with self._changing(decoded):
            return self.state_dict()

    @contextlib.contextmanager
    def _changing(self, change: Change) -> Iterator[None]:
        """A ``with`` block in which ``change`` alters state dicts before hooks of others see and replace them."""
        changes = [change]  # emptied at the end: an interrupt may leave the hook behind
        hook = self.register_state_dict_post_hook
        try:
            with hook(lambda _, found: changes[0](self, found) if changes else None, prepend=True):
                yield
        finally:
            changes.clear()

    @locked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of the torch optimizer it replaces, or of a 32-bit one of bitsandbytes.

        Values are copied into existing state tensors that still fit the parameter and ``state_format``, else into new
        ones, and no reference to the dict or to these values remains.  Placement, budget and formats stay; ``seed`` and
        ``rounding`` of a loaded group replace its own.  As in torch, state of a bfloat16 or float16 parameter is
        rounded to its dtype, unless ``state_format`` says otherwise.  State in int8 is loaded into any
        ``state_format``, decoded and rounded once; its bits are copied into int8, unless the parameter has other
        strides and so other blocks.

        What wrappers keep beside such state is taken over as in torch.  Under a key that is no parameter it stays the
        same object.  In the entry of a parameter tensors go to its device and dtype, containers are made anew, and
        all else stays the same object, parameters of this optimizer too.

        Once copying has begun, it ends before a signal is handled.  A second Ctrl-C ends it in the middle and leaves
        the optimizer damaged, and so does a copy that fails (full disk).

        Args:
            state_dict: what :meth:`state_dict` returned, here or in a run before.

        Raises:
            ValueError: groups, parameters, shapes or names differ, or double precision would be rounded to float32
                without a ``state_format`` that asks for it; the optimizer is unchanged.
            MemoryError, torch.OutOfMemoryError: there is no room for the state; the optimizer is unchanged.
            RuntimeError: the process was forked from the one that made state in a file.
        """
        self.store.check_owner()
        check_is_dict(state_dict)
        load(self, self.store, state_dict, super().load_state_dict)
        if self._overlap is not None:
            self._overlap.misuse = ""  # the step it was done to is gone
        self.preallocated = {p: entry for p, entry in self.preallocated.items() if p not in self.state}

    @locked  # a step sets `damaged` while it runs, so wait for a step in another thread
    def _check_whole(self) -> None:
        """Raise RuntimeError if state is damaged."""
        check_whole(self)
