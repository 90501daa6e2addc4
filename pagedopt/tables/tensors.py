"""What tensors are for a table: memory, strides, this process's part of each, and whether they fit together."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple, NoReturn, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch

from ..system.internals import shard_of

TensorList = Sequence[torch.Tensor | None]
Tensors = tuple[torch.Tensor | None, ...]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage is as large as sizes and strides ask for: it may have been resized or freed."""
    if not (reach := tensor.numel()):
        return True
    if not tensor.is_contiguous():
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + reach) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is one of ``FakeTensorMode``, which claims a device and has no memory there."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # while it is not loaded, there are no fake tensors
    return module is not None and isinstance(tensor, module.FakeTensor)


def widest_first(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions by falling stride: permuted so, a dense tensor is contiguous."""
    return sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is dense; else a meta tensor with the strides of ``torch.empty_like``."""
    return tensor if is_dense(tensor) else torch.empty_like(tensor, device="meta", requires_grad=False)


def same_layout(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether two strides address the same elements: those of dimensions of size one do not count."""
    return a == b or all(x == y for x, y, size in zip(a, b, shape, strict=True) if size != 1)


_BASE_CLASSES = (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: object) -> TypeGuard[Any]:
    """Return whether ``tensor`` is a DTensor, in any placement."""
    if type(tensor) in _BASE_CLASSES:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor if type(tensor) in _BASE_CLASSES or not is_sharded(tensor) else shard_of(tensor)


def like_shard(shard: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Return a DTensor placed like ``of`` whose local shard is ``shard``; ``shard`` itself if ``of`` is none."""
    if not is_sharded(of):
        return shard
    if shard.device.type != of.device_mesh.device_type:  # offloaded: from_local() would copy it to the device
        made = torch.empty_like(of, dtype=shard.dtype, requires_grad=False)
        local(made).data = shard
        return made
    return type(of).from_local(
        shard, of.device_mesh, of.placements, run_check=False, shape=of.size(), stride=of.stride()
    )


def placed_alike(tensor: torch.Tensor, p: torch.Tensor) -> bool:
    """Return whether both are DTensors on the same mesh with the same placements, or neither is one."""
    if type(tensor) in _BASE_CLASSES and type(p) in _BASE_CLASSES:
        return True
    if is_sharded(tensor) and is_sharded(p):
        return tensor.placements == p.placements and tensor.device_mesh == p.device_mesh
    return not (is_sharded(tensor) or is_sharded(p))


def is_partial(tensor: torch.Tensor) -> bool:
    """Return whether a DTensor holds this process's term of a sum (or other reduction) that is still to be made."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)


def first_element(tensor: torch.Tensor) -> int | None:
    """Return where in the whole tensor this process's part begins; None: its elements do not follow each other there.

    They do in what is replicated, and in contiguous parts that are sharded once, by their first dimension.
    """
    if not is_sharded(tensor):
        return 0
    shards = [(i, placement) for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if not shards:
        return 0
    (i, placement), *others = shards
    plain = type(placement) is sys.modules["torch.distributed.tensor"].Shard and placement.dim == 0
    if others or not plain or not local(tensor).is_contiguous():
        return None
    rows = -(-tensor.shape[0] // tensor.device_mesh.size(i)) * tensor.device_mesh.get_local_rank(i)
    return int(min(rows, tensor.shape[0]) * tensor.shape[1:].numel())


def placement_of(tensor: object) -> str:
    """Return a DTensor's placements (torch's word) and mesh as text; "no DTensor" for other tensors."""
    return f"a DTensor of {tensor.placements} over {tensor.device_mesh}" if is_sharded(tensor) else "no DTensor"


def local_grad(p: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this process's shard of the DTensor ``p``; RuntimeError (as torch) if it is no DTensor."""
    grad: Any = p.grad
    if grad is None:
        return None
    if not is_sharded(grad):
        raise RuntimeError(
            f"a parameter of shape {tuple(p.shape)} is {placement_of(p)}, its gradient none, but an ordinary tensor of "
            f"shape {tuple(grad.shape)}; use DTensor.from_local() or distribute_tensor()"
        )
    if not placed_alike(grad, p):  # e.g. partial sums: redistribute them, a collective operation
        whole: Any = p
        grad = grad.detach().redistribute(whole.device_mesh, whole.placements)
    return local(grad)


class Misfit(NamedTuple):
    """Why a tensor is not what is asked for.

    Attributes:
        aspect: what does not fit; callers choose an exception by it.
        why: the rest of a sentence that begins with the tensor's name.
    """

    aspect: Literal["type", "shape", "placement", "device", "dtype", "expanded", "memory"]
    why: str


def misfit(
    value: object,
    shape: torch.Size,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    of: str = "the parameter",
    shaped_by: str = "",
    placed: torch.Tensor | None = None,
    memory: bool = True,
) -> Misfit | None:
    """Return why a value is no dense tensor that is as asked; None: it is.

    Args:
        value: the value.
        shape: of the tensor; of a DTensor, of all of it.
        dtype, device: of the tensor; None: any.
        of, shaped_by: who asks for it, and for its shape if that is another, for the text.
        placed: a tensor that is a DTensor if this is one, placed as it is; None: any.
        memory: whether each of its elements needs memory of its own.
    """
    if not isinstance(value, torch.Tensor):
        return Misfit("type", f"is {type(value).__name__}, not a tensor")
    if value.layout is not torch.strided:
        return Misfit("type", f"is sparse ({value.layout}); only dense tensors are supported")
    if value.shape != shape:
        return Misfit("shape", f"has shape {tuple(value.shape)}, {shaped_by or of} has {tuple(shape)}")
    if placed is not None and not placed_alike(value, placed):
        return Misfit("placement", f"is {placement_of(value)}, {of} is {placement_of(placed)}")
    if device is not None and value.device != device:
        return Misfit("device", f"is on {value.device}, {of} is on {device}: they must be on the same device")
    if dtype is not None and value.dtype is not dtype:
        return Misfit("dtype", f"is {value.dtype}; it should be {dtype}")
    if memory:
        return _without_memory(local(value))
    return None


def _without_memory(tensor: torch.Tensor) -> Misfit | None:
    if tensor.is_contiguous():  # the usual case, in few calls
        reach = tensor.storage_offset() + tensor.numel()
        if reach * tensor.itemsize <= tensor.untyped_storage().nbytes():
            return None
    if is_expanded(tensor):
        return Misfit("expanded", "is expanded: several of its elements are one in memory, and cannot be updated")
    if not has_memory(tensor):
        return Misfit("memory", "has no memory for all of it: its storage was freed or resized")
    return None


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements along a dimension are one in memory."""
    if tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class ShapeError(ValueError, RuntimeError):
    """Shapes of corresponding tensors differ: a ValueError, and a RuntimeError as in torch's operations."""


class DtypeError(TypeError, RuntimeError):
    """Dtypes of corresponding tensors differ: a TypeError, and a RuntimeError as in torch's operations."""


class LayoutError(ValueError):
    """A tensor of the right shape has other strides than the first list's, or is a view of negated numbers."""


_dtype, _device, _layout, _shape = map(attrgetter, ("dtype", "device", "layout", "shape"))
_ERRORS: dict[str, type[Exception]] = {
    "type": TypeError, "shape": ShapeError, "dtype": DtypeError, "device": ValueError,
}  # fmt: skip


class Common:
    """Device, shapes and strides that all lists share, taken from the first; and the dtype of each list.

    Args:
        names: the lists' names, for errors.
        first: the first list, without absent tensors.
        per: for each list, consecutive elements of the first list that share one of its entries; None: one.

    Attributes:
        device: of every tensor; None if there is none.
        numels: elements of each tensor, (tensors,).
        dtypes: of each list; None while all its tensors have been absent.
    """

    __slots__ = ("_alike", "device", "dtypes", "names", "numels", "per")

    def __init__(self, names: Sequence[str], first: TensorList, per: Sequence[int] | None = None) -> None:
        self.names, self.per = names, per or [1] * len(names)
        self.dtypes: list[torch.dtype | None] = [None] * len(names)
        tensors = [self._tensor(0, i, t) for i, t in enumerate(first)]
        for i, tensor in enumerate(tensors):
            if not tensor.is_contiguous() and not is_dense(tensor):
                self.fail(
                    ValueError, 0, i,
                    f"of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps or overlaps itself; "
                    "use a contiguous tensor",
                )  # fmt: skip
        self.device = tensors[0].device if tensors else None
        self.numels = np.array([t.numel() for t in tensors], np.int64)
        self._alike = tuple([t.shape for t in tensors]), tuple([t.stride() for t in tensors])

    def check(self, j: int, tensors: Sequence[Any], absent: Sequence[int] = ()) -> None:
        """Check that list ``j`` is like the first; take its dtype if it has none yet."""
        if not self._agree(j, tensors, absent):
            for i, tensor in enumerate(tensors):
                if tensor is not None or j == 0:
                    self._check_tensor(j, i, tensor)

    def fail(self, kind: type[Exception], j: int, i: int, why: str) -> NoReturn:
        """Raise ``kind`` for tensor ``i`` of list ``j``."""
        raise kind(f"tensor {i} of {self.names[j]} {why}")

    def _tensor(self, j: int, i: int, value: Any) -> torch.Tensor:
        shape = value.shape if isinstance(value, torch.Tensor) else torch.Size()
        if found := misfit(value, shape, memory=False):
            self.fail(_ERRORS[found.aspect], j, i, found.why)
        return cast(torch.Tensor, value)

    def _expected(self, j: int) -> tuple[tuple[torch.Size, ...], tuple[tuple[int, ...], ...]]:
        """Return shapes and strides of list ``j``."""
        if self.per[j] == 1:
            return self._alike
        return tuple([torch.Size([n]) for n in self.entries(j).tolist()]), ((1,),) * len(self.numels)

    def entries(self, j: int) -> npt.NDArray[np.int64]:
        """Return the number of entries of each tensor of list ``j``, (tensors,)."""
        return -(-self.numels // self.per[j])

    def _agree(self, j: int, tensors: Sequence[Any], absent: Sequence[int]) -> bool:
        """Return whether all tensors that are there are as expected: a fast check that may say no wrongly."""
        shapes, strides = self._alike if self.per[j] == 1 else self._expected(j)
        if j and absent:
            here = np.delete(np.arange(len(tensors)), absent).tolist()
            tensors = [tensors[i] for i in here]
            shapes, strides = tuple([shapes[i] for i in here]), tuple([strides[i] for i in here])
            if not here:
                return True
        try:
            dtypes = {*map(_dtype, tensors)}
            alike = (
                len(dtypes) == 1
                and (self.dtypes[j] is None or self.dtypes[j] in dtypes)
                and {*map(_device, tensors)} == {self.device}
                and {*map(_layout, tensors)} == {torch.strided}
                and (*map(_shape, tensors),) == shapes
                and (*map(torch.Tensor.stride, tensors),) == strides
                and not any(map(torch.is_neg, tensors))
            )
        except (AttributeError, TypeError):  # absent, or no tensor
            return False
        if alike:
            (self.dtypes[j],) = dtypes
        return alike

    def _check_tensor(self, j: int, i: int, value: Any) -> None:
        shapes, all_strides = self._expected(j)
        shape, strides = shapes[i], all_strides[i]
        if found := misfit(value, shape, self.dtypes[j], self.device, of="the table", memory=False):
            self.fail(_ERRORS[found.aspect], j, i, found.why)
        tensor = self._tensor(j, i, value)
        if tensor.numel() > 1 and not same_layout(shape, tensor.stride(), strides):
            self.fail(
                LayoutError, j, i,
                f"has strides {tensor.stride()}, {self.names[0]} has {strides}: they must be laid out alike",
            )  # fmt: skip
        if tensor.is_neg():
            self.fail(LayoutError, j, i, "is a view of negated numbers, which are not in memory; use resolve_neg()")
        if self.dtypes[j] is None:
            self.dtypes[j] = tensor.dtype


def checked_writes(writes: Collection[int], lists: int) -> tuple[int, ...]:
    """Check that ``writes`` are indices of ``lists`` lists, and return them as a tuple."""
    if not isinstance(writes, Collection) or not all(issubclass(t, int | np.integer) for t in {*map(type, writes)}):
        raise TypeError(f"writes is {writes!r}; give the indices of the lists that are overwritten, e.g. writes=[0]")
    if wrong := [int(j) for j in writes if not 0 <= j < lists]:
        there = f"0 to {lists - 1}" if lists > 1 else "0 alone" if lists else "none, as there is no list"
        raise ValueError(f"writes names list {', '.join(map(str, wrong))}; there is {there}")
    return writes if isinstance(writes, tuple) else tuple(int(j) for j in writes)


def check_overlap(common: Common, writes: Collection[int], addresses: npt.NDArray[np.uint64]) -> None:
    """Check that a written tensor overlaps no other, except one of its own row with exactly the same memory.

    ``addresses`` is (tensors, lists), 0 for an absent tensor.
    """
    if not writes:
        return
    live = (addresses != 0).all(axis=1) & (common.numels > 0)
    sizes = [np.uint64(d.itemsize if d else 0) for d in common.dtypes]
    nbytes = [common.entries(j)[live].astype(np.uint64) * size for j, size in enumerate(sizes)]
    if _apart(addresses[live].T.ravel(), np.concatenate(nbytes)):
        return
    index = np.flatnonzero(live).astype(np.int64)
    start = np.concatenate([addresses[live, j] for j in writes])
    end = np.concatenate([addresses[live, j] + nbytes[j] for j in writes])
    order = np.argsort(start, kind="stable")
    start, end, which = start[order], end[order], np.tile(index, len(writes))[order]
    for at in np.flatnonzero(end[:-1] > start[1:]):
        _overlap(common.names, int(which[at]), int(which[at + 1]))
    for j in set(range(len(nbytes))) - set(writes):
        begin = addresses[live, j]
        stop = begin + nbytes[j]
        at = np.searchsorted(start, stop, side="left").astype(np.int64) - 1  # the last written that starts below stop
        hit = (at >= 0) & (end[at] > begin)
        same = (which[at] == index) & (start[at] == begin) & (end[at] == stop)
        for position in np.flatnonzero(hit & ~same):
            _overlap(common.names, int(index[position]), int(which[at[position]]))


def _apart(start: npt.NDArray[np.uint64], nbytes: npt.NDArray[np.uint64]) -> bool:
    """Return whether no two stretches of memory overlap: the usual case."""
    order = start.argsort()
    start, nbytes = start[order], nbytes[order]
    return not ((start + nbytes)[:-1] > start[1:]).any()


def _overlap(names: Sequence[str], a: int, b: int) -> NoReturn:
    raise ValueError(
        f"tensors {a} and {b} of the lists {list(names)} overlap in memory and cannot be updated in place; "
        "give each tensor once, with memory of its own"
    )
