"""Steps in CUDA graphs: when a step may be captured, and what a captured one needs to be told."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from ..system.cuda import virtual
from ..system.warn import outside
from .capture import CapturedStep, alive, capture
from .locks import LockedOptimizer, locked

_MESSAGE = (
    "This instance was constructed with capturable=True or some of all the param_groups came with capturable=True, but "
    "step() is running without CUDA graph capture. If you never intend to graph-capture this instance, capturable=True "
    "can impair performance, and you should set capturable=False."
)


class CapturingOptimizer(LockedOptimizer):
    """What an optimizer offers beside ``torch.cuda.graph``."""

    _captures: list[weakref.ref[CapturedStep]]
    _warned_capturable_if_run_uncaptured = False

    @locked
    def refresh(self) -> None:
        """Tell captured steps of today's gradients, learning rates, norm to clip to and other numbers, in stream order.

        Replays that are queued on the current stream afterwards use them; replays that were queued before do not.
        Tensors on the device (a learning rate that is one, step counts) need no refresh: each replay reads them.

        Raises:
            RuntimeError: no captured step is alive; one is void, as parameters, groups or state were replaced; tables
                are passed by value (``transport="struct"``).
            ValueError, TypeError: a gradient does not fit its parameter, or has another dtype than when captured.

        Example:
            >>> with torch.cuda.graph(graph):
            ...     optimizer.step()
            >>> loss.backward()      # new gradients, somewhere else
            >>> optimizer.refresh()
            >>> graph.replay()
        """
        steps = self._alive()
        if not steps:
            raise RuntimeError(f"no captured step of this {type(self).__name__} is alive: there is nothing to refresh")
        for step in steps:
            step.refresh(self)

    @locked
    def check_capture(self) -> None:
        """Check that a replay would do what a step does now.

        Raises:
            RuntimeError: something has changed since the capture, or the last :meth:`refresh`; the message names it.
        """
        if found := self._changes():
            raise RuntimeError(f"since the step was captured {'; '.join(found)}. {_ADVICE}")

    def _alive(self) -> list[CapturedStep]:
        steps = list(alive(self._captures))
        self._captures = [weakref.ref(step) for step in steps]
        return steps

    def _changes(self) -> list[str]:
        return [text for step in self._alive() for text in step.changes(self)]

    def _captured(self) -> bool:
        """Capture the step if the current stream is being captured into a graph, and return whether it is."""
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            if self._captures:
                self._tell_of_captures()
            if virtual.dead:
                virtual.free_dead()
            if "capturable" in self.defaults and not self._warned_capturable_if_run_uncaptured:
                self._warn_if_capturable()
            return False
        if not all(group.get("capturable", True) for group in self.param_groups):
            raise RuntimeError(
                f"Attempting CUDA graph capture of step() for an instance of {type(self).__name__} but param_groups' "
                "capturable is False."
            )
        self._captures.append(weakref.ref(capture(self)))
        return True

    def _tell_of_captures(self) -> None:
        """Warn, in an eager step, of changes that captured steps do not know."""
        if found := self._changes():
            text = f"a captured step does not know that {'; '.join(found)}. {_ADVICE}"
            warnings.warn(text, RuntimeWarning, stacklevel=outside())

    def _warn_if_capturable(self) -> None:
        """Warn once, as torch does, that a capturable step runs eagerly."""
        groups: list[dict[str, Any]] = self.param_groups
        if all(group.get("capturable") for group in groups) and torch.cuda.is_available():
            self._warned_capturable_if_run_uncaptured = True
            warnings.warn(_MESSAGE, stacklevel=outside())

    def _refuse_moves(self, what: str) -> None:
        """Raise RuntimeError if a captured step is alive, whose graph updates state where it lies now."""
        if self._captures and self._alive():
            raise RuntimeError(
                f"{what} would move state that a captured step updates where it lies: delete the graph first"
            )


_ADVICE = "Call refresh() before the next replay, or capture again"
