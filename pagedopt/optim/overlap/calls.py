"""The calls of hooked modules that a thread is in, and the recorder of the outermost one.

If a forward raises, torch runs no hooks of inner modules; after KeyboardInterrupt, none at all.  So each call is stored
with a frame that lasts as long as the call: if the frame is not on the stack, the call has ended.  A recorder is put on
torch's stack of modes by one hook and taken off by another, so the same holds for it.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType

import torch

from ...system import internals
from . import hooks
from .record import Recorder


@dataclass(slots=True)
class Call:
    """A call of a module.

    Attributes:
        frame: of torch, or of :class:`hooks.Compiled`, that has called the hook.
        grad: of an outermost call: whether gradients were enabled when it began.
        recorder: of an outermost call: what records it; None: it is not recorded.
    """

    module: torch.nn.Module
    frame: FrameType
    grad: bool = False
    recorder: Recorder | None = None


class Calls(threading.local):
    """The stack of one thread, the outermost call first."""

    def __init__(self) -> None:
        self._stack: list[Call] = []

    @property
    def outermost(self) -> Call | None:
        """The outermost call; None outside of all."""
        return self._stack[0] if self._stack else None

    @property
    def innermost(self) -> Call | None:
        """The innermost call; None outside of all."""
        return self._stack[-1] if self._stack else None

    def within_compiled(self) -> bool:
        """Return whether one of the calls is of a compiled module."""
        self.forget_ended()
        return any(hooks.is_compiled(call.module) for call in self._stack)

    def push(self, module: torch.nn.Module) -> Call:
        """A call has begun; called by a hook of the module.  Return the outermost call."""
        self._stack.append(Call(module, _frame_of_call()))
        return self._stack[0]

    def pop(self, module: torch.nn.Module) -> bool:
        """A call has ended, and all within it; return False if it is unknown."""
        if not any(call.module is module for call in self._stack):
            return False
        while self._stack.pop().module is not module:
            pass
        return True

    def forget_ended(self) -> None:
        """Forget calls that ended without a word, and take recorders of such calls, whoever put them there, off torch's
        stack of modes."""
        recorders = [mode for mode in internals.function_modes() if isinstance(mode, Recorder)]
        if not self._stack and not recorders:
            return
        last = self._stack[-1].frame if self._stack and not recorders else None
        frames = set[int]()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is last:
                return
            frames.add(id(frame))
            frame = frame.f_back
        for recorder in recorders:
            if id(recorder.frame) not in frames:
                recorder.stop()
        while self._stack and id(self._stack[-1].frame) not in frames:
            self._stack.pop()


def _frame_of_call() -> FrameType:
    """Return the frame of torch, or of :class:`hooks.Compiled`, that has called the hook."""
    frame = sys._getframe(3)  # behind push() and Overlap.enter()
    hook = hooks.Enter.__call__.__code__
    return frame.f_back if frame.f_code is hook and frame.f_back is not None else frame
