"""Work in a fork of this process."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any


def in_child(work: Callable[[], Any], user: int | None = None, umask: int | None = None, **environment: str) -> Any:
    """What ``work`` returns in a fork of this process.  (What it imports was imported here: others may not read it.)"""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(60)
        try:
            os.environ.update(environment)
            if umask is not None:
                os.umask(umask)
            if user is not None:
                os.setgroups([])
                os.setegid(user)
                os.seteuid(user)
            result = pickle.dumps((True, work()))
        except BaseException:
            result = pickle.dumps((False, traceback.format_exc()))
        with open(writer, "wb") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        well, result = pickle.loads(pipe.read() or pickle.dumps((False, "the child was killed")))
    os.waitpid(child, 0)
    assert well, result
    return result
