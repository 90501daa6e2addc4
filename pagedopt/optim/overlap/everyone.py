"""The queued steps of all optimizers: who waits for them before a step of another, a fork and the end."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterable
from typing import Any

import torch

from ...system.interrupts import Uninterrupted
from ..step.launches import PreparedStep
from ..step.pending import memory_of
from . import hooks

#: Overlaps whose step is queued.  They outlive their optimizers until it is done.
with_queued: set[Any] = set()


def wait_for_others(step: PreparedStep, own: object | None) -> None:
    """Wait for queued steps of other optimizers that update the same parameters."""
    for other in hooks.all_known():
        if other is not own and (queued := other.queued) is not None:
            tensors = (t for update in step.updates for t in update.seen if t is not None)
            if queued.updates_any(memory for t in tensors if (memory := memory_of(t)) is not None):
                other.wait()


def start_all() -> None:
    """Launch what queued steps have left for the next forward: it has begun, be it that of another model."""
    for overlap in list(with_queued):
        queued = overlap.queued
        if queued is not None and not queued.on_host and not torch.cuda.is_current_stream_capturing():
            queued.start()


def _before_fork() -> None:
    """Carry out steps queued on CPUs: a child must neither repeat them nor read parameters from before them."""
    on_host = (each for each in list(with_queued) if (queued := each.queued) is not None and queued.on_host)
    _wait_for_each(on_host)


def _before_exit() -> None:
    """Finish queued steps while the threads that move pages still run, and before users' exit handlers."""
    _wait_for_each(list(with_queued))


def _wait_for_each(overlaps: Iterable[Any]) -> None:
    """Wait for the queued steps of all, even if one fails or a signal comes meanwhile."""
    with Uninterrupted(gives_way=True), contextlib.ExitStack() as stack:
        for overlap in overlaps:
            stack.callback(overlap.wait)


os.register_at_fork(before=_before_fork)
getattr(threading, "_register_atexit", atexit.register)(_before_exit)
