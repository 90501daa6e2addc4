"""Private parts of torch and CPython, each with a public substitute for versions that lack it.

Those that compare tensors are in :mod:`.compare_tensors`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.overrides
from torch.utils._device import DeviceContext

#: The index of the current CUDA device, and the handle of a device's current stream, without an object for either.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
#: Decorator: ``torch.compile`` does not trace into the function.  The private form does not import Dynamo.
opaque: Callable[[Any], Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)
#: What puts a function mode on the stack of this thread, or takes the innermost away.
push_function_mode: Callable[[Any], None] = torch.overrides._push_mode
pop_function_mode: Callable[[], Any] = torch.overrides._pop_mode
Call = TypeVar("Call", bound=Callable[..., Any])
_callback: Callable[[], object] | None
try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as _callback
except ImportError:
    _callback = None


def dynamo_is_at_work() -> bool:
    """Return whether Dynamo traces this call or would trace the frames that it makes; True if unknown."""
    return torch.compiler.is_dynamo_compiling() or _callback is None or _callback() is not None


def breaks_graph(function: Call, why: str) -> Call:
    """Return the function for code that Dynamo traces: its graph breaks there, and ``fullgraph=True`` raises ``why``.

    As ``torch.compiler.disable(function, reason=why)``, which imports Dynamo.  torch 2.6 does not tell the reason.
    """
    untraced: Any = opaque(function)
    untraced._torchdynamo_disable, untraced._torchdynamo_disable_msg = True, why
    return cast(Call, untraced)


@functools.cache
def keep_capturable(optimizers: type) -> None:
    """Keep Dynamo from setting ``capturable`` in the groups of these optimizers.

    It sets the flag in all groups that it reads, for steps that it traces, as torch's.
    """
    try:
        from torch._dynamo.variables.optimizer import OptimizerVariable

        sets = OptimizerVariable._set_capturable
    except (ImportError, AttributeError):
        return

    @functools.wraps(sets)
    def set_capturable(self: Any, tx: Any) -> None:
        if not isinstance(self.value, optimizers):
            sets(self, tx)

    OptimizerVariable._set_capturable = set_capturable  # type: ignore[method-assign]


def in_fake_mode() -> bool:
    """Return whether a ``FakeTensorMode`` is active, in which tensors get no memory."""
    try:
        return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    except AttributeError:
        return "Fake" in type(torch.empty(0, device="cpu")).__name__


#: Whether a function mode of this thread is active: how many there are.
has_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
#: Whether the current stream is being captured into a CUDA graph.
is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing


def in_backward() -> bool:
    """Return whether this thread is within a backward pass, as hooks of gradients are; False if torch does not tell."""
    task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def hooks_behind_gradients(param: torch.Tensor) -> list[Any]:
    """Return the hooks that run behind the accumulation of a parameter's gradient; none if torch does not tell."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def only_default_devices() -> bool:
    """Return whether the function modes of this thread are those that choose a device for new tensors."""
    return all(type(mode) is DeviceContext for mode in function_modes())


def function_modes() -> list[Any]:
    """Return the function modes of this thread, the innermost last."""
    return torch.overrides._get_current_function_mode_stack() if has_function_modes() else []


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this process's shard of a DTensor: as ``to_local()``, but faster and without ``no_grad()``, which an
    interrupt may leave open."""
    found = getattr(tensor, "_local_tensor", None)
    if found is None:
        found = tensor.detach().to_local()
    if type(found) in (torch.Tensor, torch.nn.Parameter):
        return found
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return found.wait() if isinstance(found, AsyncCollectiveTensor) else found  # on its way from other processes


class OpenMP(NamedTuple):
    """``GOMP_parallel(function, argument, threads, flags)``, and the addresses of two functions for its threads."""

    parallel: Any
    thread_num: int
    num_threads: int


@functools.cache
def openmp() -> OpenMP | None:
    """Return torch's OpenMP; None where torch has none, or one without GCC's interface."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOLOAD)
        parallel, numbers = library.GOMP_parallel, (library.omp_get_thread_num, library.omp_get_num_threads)
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return OpenMP(parallel, *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in numbers))


# The functions behind signal.getsignal and signal.signal, which wrap every value in an enum: too slow for a step, which
# asks for the handlers of all signals.
try:
    import _signal as _signals  # type: ignore[import-not-found]
except ImportError:
    _signals = signal
handler_of, set_handler = _signals.getsignal, _signals.signal
