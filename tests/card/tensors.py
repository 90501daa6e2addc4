"""torch on a played card: tensors whose memory is the card's say that they are on ``cuda:0``, and what torch does with
them is work of the current stream.

Such an operation begins as early as it may, and what it writes is there as late as possible.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from pagedopt.system import internals
from tests.card.driver import Driver
from tests.card.order import NOTHING, Event, Graph, Memory, Order, Range, Touched

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class Stream:
    """In the place of ``torch.cuda.Stream``."""

    order: Order  # of the card that is played now

    def __init__(self, device: Any = None, priority: int = 0, handle: int | None = None) -> None:
        self.cuda_stream = self.order.stream() if handle is None else handle
        self.device, self.device_index = CUDA, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        self.order.record(event, other.cuda_stream)
        self.order.hold(self.cuda_stream, event)

    def synchronize(self) -> None:
        self.order.wait(dict(self.order.behind(self.cuda_stream)))


class PlayedGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    driver: Driver

    def __init__(self) -> None:
        self.graph: Graph | None = None

    def replay(self) -> None:
        assert self.graph is not None, "nothing was captured"
        self.driver.order.replay(self.graph, internals.current_stream(0))

    def reset(self) -> None:
        self.__del__()

    def __del__(self) -> None:
        if self.graph is not None:
            self.driver.destroy(self.graph)
            self.graph = None


class Current(threading.local):
    """The current stream of a thread."""

    handle = 0


class Torch:
    """The part of torch that knows of CUDA."""

    def __init__(self, order: Order, memory: Memory, driver: Driver) -> None:
        self.order, self.memory, self.driver = order, memory, driver
        self._current = Current()
        self.users: dict[int, set[int]] = {}  # streams that memory was recorded for, by where it begins
        self.on_host = self.closed = False  # no more memory is given back then

    @property
    def current(self) -> int:
        """The handle of the current stream."""
        return self._current.handle

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Stream, "order", self.order, raising=False)
        monkeypatch.setattr(PlayedGraph, "driver", self.driver, raising=False)
        played = {
            "Stream": Stream, "CUDAGraph": PlayedGraph, "graph": self.capture,
            "stream": lambda stream: self.on_handle(stream.cuda_stream),
            "current_stream": lambda device=None: Stream(handle=self.current), "current_device": lambda: 0,
            "device": lambda device: contextlib.nullcontext(), "synchronize": self.synchronize,
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
            "is_current_stream_capturing": lambda: self.current in self.order.captures,
            "get_device_capability": lambda device=None: (9, 0), "mem_get_info": lambda device=None: (1 << 30, 1 << 31),
            "memory_stats": lambda device=None: {}, "empty_cache": lambda: None,
        }  # fmt: skip
        for name, instead in played.items():
            monkeypatch.setattr(torch.cuda, name, instead)

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:  # torch's own takes only streams of its own
            if (users := self.users.get(tensor.untyped_storage().data_ptr())) is not None:
                users.add(stream.cuda_stream)  # of memory that is not of torch's allocator it knows nothing

        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
        monkeypatch.setattr(internals, "current_device", lambda: 0)
        monkeypatch.setattr(internals, "current_stream", lambda index: self.current)

    def synchronize(self, device: object = None) -> None:
        if error := self.driver.cuCtxSynchronize():
            raise RuntimeError(f"CUDA error: {error.name}")

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    @contextlib.contextmanager
    def on_handle(self, handle: int) -> Iterator[None]:
        before, self._current.handle = self.current, handle
        try:
            yield
        finally:
            self._current.handle = before

    @contextlib.contextmanager
    def capture(self, graph: PlayedGraph) -> Iterator[None]:
        self.order.wait()
        with self.on_handle(self.order.stream()):
            captured = self.order.capture(self.current)
            try:
                yield
            finally:
                self.order.end_capture(captured)
            graph.graph = captured

    # --- tensors

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the card."""
        with torch._C.DisableTorchFunction():
            return tensor.layout is torch.strided and self.memory.knows(tensor.untyped_storage().data_ptr())

    def view(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        """Memory of the card as a tensor (uint8)."""
        raw = self.memory.at(address, max(1, nbytes))
        raw.owner = owner
        return torch.frombuffer(raw, dtype=torch.uint8)[:nbytes]

    def empty_like(self, value: torch.Tensor) -> torch.Tensor:
        """New memory of torch's allocator, for a tensor with the sizes and strides of another."""
        nbytes = span(value)[1] - span(value)[0]
        address, stream = self.memory.take(nbytes), self.current
        raw = self.memory.at(address, max(1, nbytes))
        self.order.allocate(stream, (address, address + max(1, nbytes)))
        users = self.users[address] = set()
        weakref.finalize(raw, self._free, address, stream, users).atexit = False
        return _over(raw, value)

    def _free(self, address: int, stream: int, users: set[int]) -> None:
        if self.closed:
            return
        del self.users[address]

        def end() -> None:
            first, last = self.memory.drop(address)
            ctypes.memset(first, NOTHING, last - first)

        size = self.memory.size(address)
        self.order.free(stream, users, (address, address + size), end)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, kept alive by nobody."""
        first, end = span(tensor)
        return _over(self.memory.at(first, max(1, end - first)), tensor)

    def upload(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the host to the card; it is pageable, and so read now."""
        made = self.empty_like(value)
        self._submit("copy to the card", [], [self.alias(made)], [value.clone()])
        return made

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host, which waits."""
        with self.for_host():
            return tensor.clone()

    @contextlib.contextmanager
    def for_host(self) -> Iterator[None]:
        """A block whose results go to the host, whatever the operands."""
        self.on_host = True
        try:
            yield
        finally:
            self.on_host = False

    # --- operations

    def operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out what torch does with tensors on the card, on the current stream."""
        schema, name = func._schema, func.name().partition("::")[2]
        names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if name.startswith("set_") or (not names and any(r.alias_info for r in schema.returns)):
            return func(*args, **kwargs)  # no bytes are touched
        by_name = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        written, given = _tensors([by_name[n] for n in names if n in by_name]), _tensors((args, kwargs))
        unread = {id(t) for t in written} if name.startswith(_OVERWRITES) else set()
        reads = [span(t) for t in given if self.has(t) and t.numel() and id(t) not in unread]
        bytes_of = {id(t): self.alias(t) if self.has(t) else t for t in given}
        changing = {id(t) for t in written}

        def compute() -> tuple[Any, list[torch.Tensor]]:
            """The result, and the new values of what is written."""
            now = {k: t.clone() if k in changing else t for k, t in bytes_of.items()}
            result = func(*_replaced(args, now), **_replaced(kwargs, now))
            return result, [now[id(t)] for t in written]

        capturing = self.current in self.order.captures
        if not capturing:
            self.order.run(dict(self.order.behind(self.current)))
        result, values = compute()
        stay = {id(v): t for v, t in zip(values, written, strict=True)}
        fresh = [x for x in _tensors(result) if id(x) not in stay and not self.has(x) and not self.on_host]
        made = {id(x): self.empty_like(x) for x in fresh}
        outputs = _replaced(result, stay | made)
        if "empty" in name:
            return outputs
        targets = [bytes_of[id(t)] for t in written] + [self.alias(made[id(x)]) for x in fresh]
        if capturing:  # what it reads then will be other bytes

            def again() -> Touched:
                result, values = compute()
                news = [x for x in _tensors(result) if not any(x is v for v in values)]
                return self._write(reads, targets, [*values, *news])

            self.order.submit(self.current, f"torch's {name}", again)
            return outputs
        self._submit(name, reads, targets, [*values, *fresh])
        if not targets or not all(self.has(t) for t in targets):
            self.order.wait(dict(self.order.behind(self.current)))  # the host gets it
        return outputs

    def _submit(self, name: str, reads: list[Range], targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self.order.submit(self.current, f"torch's {name}", lambda: self._write(reads, targets, values))

    def _write(self, reads: list[Range], targets: list[torch.Tensor], values: list[torch.Tensor]) -> Touched:
        """Let targets have their values; return the bytes that were read and written."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)
        written = [span(target) for target in targets if target.numel() and self.has(target)]
        self.memory.check("torch", *reads, *written)
        return reads, written


#: Operations that do not read what they write.
_OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def _replaced(tree: Any, by_id: dict[int, torch.Tensor]) -> Any:
    """A tree with other tensors in the place of some."""
    return tree_map(lambda x: by_id.get(id(x), x), tree)


def _over(raw: Any, like: torch.Tensor) -> torch.Tensor:
    """Memory as a tensor with the dtype, sizes and strides of another."""
    storage = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.size(), like.stride())


def span(tensor: torch.Tensor) -> Range:
    """The bytes from a tensor's first element to the end of its last."""
    with torch._C.DisableTorchFunction():
        first = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        if not tensor.numel():
            return first, first
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        return first, first + (last + 1) * tensor.element_size()


class _Operations(TorchDispatchMode):
    """What torch computes, backward passes included."""

    def __init__(self, card: Torch) -> None:
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(self.card.has, _tensors((args, kwargs)))):
            with torch._C.DisableTorchFunction():
                return self.card.operate(func, args, kwargs)
        return func(*args, **kwargs)


_TO = {torch.Tensor.cpu: CPU, torch.Tensor.cuda: CUDA}


class _Functions(TorchFunctionMode):
    """What torch says of tensors, and where it makes them."""

    def __init__(self, card: Torch) -> None:
        super().__init__()
        self.card = card
        has = card.has
        self._played: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda t: CUDA if has(t) else t.device,
            torch.Tensor.is_cuda.__get__: has,
            torch.Tensor.is_cpu.__get__: lambda t: not has(t),
            torch.Tensor.get_device: lambda t: 0 if has(t) else -1,
            torch.Tensor.tolist: lambda t: (card.download(t) if has(t) else t).tolist(),
            torch.Tensor.numpy: self._numpy,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (played := self._played.get(func)) is not None:
            return played(*args, **kwargs)
        if func in _TO or func is torch.Tensor.to:
            return self._to(func, args, dict(kwargs))
        if (device := kwargs.get("device")) is None:
            return func(*args, **kwargs)
        kwargs = {**kwargs, "device": "cpu"}
        if torch.device(device).type != "cuda":
            with self.card.for_host():
                return func(*args, **kwargs)
        if func is torch.as_tensor and hasattr(args[0], "__cuda_array_interface__"):
            interface = args[0].__cuda_array_interface__
            return self.card.view(interface["data"][0], interface["shape"][0], args[0])
        made = func(*args, **kwargs)
        if not self.card.has(made):
            empty = getattr(func, "__name__", "").startswith("empty")
            with torch._C.DisableTorchFunction(), torch.no_grad():
                plain = made.detach()
                made.data = self.card.empty_like(plain) if empty else self.card.upload(plain)
        return made

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given, *rest = args
        tensor, copy = given, kwargs.pop("copy", False)
        if func in _TO:
            device, dtype = _TO[func], None
        elif isinstance(example := rest[0] if rest else kwargs.get("other"), torch.Tensor):
            device, dtype = (CUDA if self.card.has(example) else CPU), example.dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
        if device is not None and (device.type == "cuda") != self.card.has(tensor):
            tensor = _Moved.apply(tensor, self.card)
        tensor = tensor if dtype is None else tensor.to(dtype)
        return tensor.clone() if copy and tensor is given else tensor

    def _numpy(self, tensor: torch.Tensor, **_: Any) -> Any:
        if self.card.has(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return tensor.numpy(**_)


class _Moved(torch.autograd.Function):
    """A copy between card and host, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, card: Torch) -> torch.Tensor:
        ctx.card = card
        return card.download(tensor) if card.has(tensor) else card.upload(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (ctx.card.download(grad) if ctx.card.has(grad) else ctx.card.upload(grad)), None
