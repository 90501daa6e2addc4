"""The calls of hooked modules that a thread is in, and the recorder of the outermost one.

Once it is known where a module waits (:mod:`.stops`), its calls within others are not pushed.

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
    """The calls of one thread.

    A signal handler may call modules at any line of this class.  When it returns, these calls have ended; so a method
    reads the stack once and sets it once, whatever a handler has left there meanwhile.

    Attributes:
        stack: the calls that go on, the outermost first.
    """

    def __init__(self) -> None:
        self.stack: tuple[Call, ...] = ()

    @property
    def outermost(self) -> Call | None:
        """The outermost call; None outside of all."""
        stack = self.stack
        return stack[0] if stack else None

    @property
    def innermost(self) -> Call | None:
        """The innermost call; None outside of all."""
        return next(reversed(self.stack), None)

    def within_compiled(self) -> bool:
        """Return whether one of the calls is of a compiled module."""
        self.forget_ended()
        return any(hooks.is_compiled(call.module) for call in self.stack)

    def push(self, module: torch.nn.Module) -> Call:
        """A call has begun; called by a hook of the module.  Return the outermost call."""
        stack = self.stack = (*self.stack, Call(module, _frame_of_call()))
        return stack[0]

    def pop(self, module: torch.nn.Module) -> bool:
        """A call has ended, and all within it; return False if it is unknown.

        The hooks of a module may say so twice.  The second time it may be in another call, which goes on.
        """
        stack, caller = self.stack, _frame_of_call()
        for at, call in reversed([*enumerate(stack)]):
            if call.module is module:
                if call.frame is not caller and _is_running(call.frame):
                    return False
                self.stack = stack[:at]
                return True
        return False

    def forget_ended(self) -> None:
        """Forget calls whose end no hook has told, and take their recorders, of any overlap, off torch's stack."""
        recorders = [mode for mode in internals.function_modes() if isinstance(mode, Recorder)]
        stack = self.stack
        if not stack and not recorders:
            return
        last = stack[-1].frame if stack and not recorders else None
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
        while stack and id(stack[-1].frame) not in frames:
            stack = stack[:-1]
        self.stack = stack


def _frame_of_call() -> FrameType:
    """Return the frame of torch, or of :class:`hooks.Compiled`, that has called the hook."""
    frame = sys._getframe(3)  # behind push() and Overlap.enter(), or pop() and leave()
    return frame.f_back if frame.f_code in _HOOKS and frame.f_back is not None else frame


_HOOKS = frozenset(hook.__call__.__code__ for hook in (hooks.Enter, hooks.Leave, hooks.Raised))


def _is_running(frame: FrameType) -> bool:
    """Return whether a frame is on the stack of this thread."""
    found: FrameType | None = sys._getframe(1)
    while found is not None and found is not frame:
        found = found.f_back
    return found is not None
