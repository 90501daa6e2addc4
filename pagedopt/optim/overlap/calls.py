"""The calls of hooked modules that a thread is in.

An error in the forward ends calls without a word, all but the outermost; a KeyboardInterrupt ends that one so, too.
Each call is therefore kept with a frame that lasts as long: if the frame is not on the stack, the call has ended.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch

from . import hooks
from .record import Recorder


class Calls(threading.local):
    """The stack of one thread, the outermost call first.

    Attributes:
        recorder: records the outermost call; None: it is not recorded.
        grad: whether gradients were enabled when the outermost call began.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[torch.nn.Module, FrameType]] = []
        self.recorder: Recorder | None = None
        self.grad = False

    def __len__(self) -> int:
        return len(self._stack)

    @property
    def outermost(self) -> torch.nn.Module:
        """The module of the outermost call."""
        return self._stack[0][0]

    @property
    def innermost(self) -> torch.nn.Module:
        """The module of the innermost call."""
        return self._stack[-1][0]

    def within_compiled(self) -> bool:
        """Return whether one of the calls is of a compiled module."""
        self.forget_ended()
        return any(hooks.is_compiled(module) for module, _ in self._stack)

    def push(self, module: torch.nn.Module) -> None:
        """A call has begun; called by a hook of the module."""
        self._stack.append((module, _frame_of_call()))

    def pop(self, module: torch.nn.Module) -> bool:
        """A call has ended, and all within it; return whether it was the outermost."""
        if not any(called is module for called, _ in self._stack):
            return False
        while self._stack.pop()[0] is not module:
            pass
        return not self._stack

    def forget_ended(self) -> None:
        """Forget calls that ended without a word, and their recorder with the outermost."""
        if not self._stack:
            return
        last, frames = self._stack[-1][1], set[int]()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is last:
                return
            frames.add(id(frame))
            frame = frame.f_back
        while self._stack and id(self._stack[-1][1]) not in frames:
            self._stack.pop()
        if not self._stack:
            self.stop_recording()

    def stop_recording(self) -> bool:
        """Return whether the outermost call was recorded, and end that."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
        return recorder is not None


def _frame_of_call() -> FrameType:
    """Return the frame of torch, or of :class:`hooks.Compiled`, that has called the hook."""
    frame = sys._getframe(3)  # behind push() and Overlap.enter()
    hook = hooks.Enter.__call__.__code__
    return frame.f_back if frame.f_code is hook and frame.f_back is not None else frame
