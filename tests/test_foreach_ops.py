"""foreach_* agree with torch._foreach_*: results, dtypes, and what they refuse."""

import math
from typing import Any

import pytest
import torch
from gpu_support import DEVICES, NEEDED
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import pagedopt
from pagedopt import foreach_ops

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
#: A few units in the last place of results near one.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SIZES = ((0,), (), (3,), (5, 7), (4097,))


def lists(count: int, device: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    return [[(torch.rand(s) + 0.5).to(device, dtype) for s in SIZES] for _ in range(count)]


def calls(numbers: list[float]) -> dict[str, tuple[int, Any]]:
    """Name → (lists it takes, the rest of its arguments)."""
    return {
        "add": (2, {"alpha": 1.7}),
        "add scalar": (1, (0.3,)),
        "add scalars": (1, (numbers,)),
        "mul": (2, ()),
        "mul scalar": (1, (1.3,)),
        "mul scalars": (1, (numbers,)),
        "lerp": (3, ()),
        "lerp scalar": (2, (0.3,)),
        "lerp far": (2, (0.8,)),
        "addcmul": (3, {"value": 0.3}),
        "addcmul scalars": (3, (numbers,)),
        "addcdiv": (3, {"value": 0.3}),
        "sqrt": (1, ()),
    }


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same numbers every time: the third norm of some float32 lists is beyond the tolerance, in torch, too."""
    torch.manual_seed(0)


#: Every call in every dtype, one way in two of them and the other way in the other two; on a GPU both ways.
AGREEING = [
    pytest.param(
        call, dtype, device, suffix, id=f"{suffix}-{call}-{dtype}-{device}", marks=NEEDED if device == "cuda" else [],
    )
    for suffix in ("", "_")
    for i, call in enumerate(calls([]))
    for j, dtype in enumerate(DTYPES)
    for device in ("cpu", "cuda")
    if device == "cuda" or (i + j + len(suffix)) % 2 == 0
]  # fmt: skip


@pytest.mark.parametrize(("call", "dtype", "device", "suffix"), AGREEING)
def test_agrees_with_torch(call: str, dtype: torch.dtype, device: str, suffix: str) -> None:
    count, rest = calls([0.5, 1.0, 2.0, 3.0, -4.0])[call]
    args, kwargs = (rest, {}) if isinstance(rest, tuple) else ((), rest)
    name = f"foreach_{call.split()[0]}{suffix}"
    ours, theirs = lists(count, device, dtype), lists(count, device, dtype)
    got = getattr(foreach_ops, name)(*ours, *args, **kwargs)
    want = getattr(torch, f"_{name}")(*theirs, *args, **kwargs)
    if suffix:
        assert got is None
        got, want = ours[0], theirs[0]
    torch.testing.assert_close(got, list(want), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_one_launch_is_what_torch_makes_of_it(device: str) -> None:
    ints = [torch.arange(4, device=device)]
    assert isinstance(added := foreach_ops.foreach_add(ints, ints), list)
    assert torch.equal(added[0], torch._foreach_add(ints, ints)[0])
    mixed = [torch.ones(3, device=device)], [torch.ones(3, device=device, dtype=torch.float64)]
    assert foreach_ops.foreach_mul(*mixed)[0].dtype is torch._foreach_mul(*mixed)[0].dtype
    broadcast = [torch.ones(2, 3, device=device)], [torch.ones(3, device=device)]
    assert torch.equal(foreach_ops.foreach_add(*broadcast)[0], torch.full((2, 3), 2.0, device=device))
    gaps = [torch.arange(8.0, device=device)[::2]]
    foreach_ops.foreach_mul_(gaps, 3)
    assert gaps[0].tolist() == [0, 6, 12, 18]
    other_strides = torch.ones(2, 3, device=device), torch.arange(6.0, device=device).reshape(3, 2).t()
    assert torch.equal(foreach_ops.foreach_add([other_strides[0]], [other_strides[1]])[0], 1 + other_strides[1])
    leaf = torch.ones(3, device=device, requires_grad=True)
    (out,) = foreach_ops.foreach_mul([leaf], 2)
    out.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


def test_in_a_fake_mode_results_are_fake() -> None:
    real = [torch.ones(3), torch.ones(5000)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = [*foreach_ops.foreach_norm(real), *foreach_ops.foreach_mul(real, 2)]
    assert {*map(type, results)} == {FakeTensor}


def test_refuses_what_torch_refuses() -> None:
    with pytest.raises(RuntimeError):
        foreach_ops.foreach_add([torch.ones(2)], [torch.ones(2), torch.ones(2)])
    with pytest.raises(RuntimeError):
        foreach_ops.foreach_norm([])
    with pytest.raises(RuntimeError, match="empty"):
        foreach_ops.foreach_norm([torch.ones(0)], math.inf)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [1, 2, math.inf, 3, 0])
def test_norms_agree_with_torch(order: float, dtype: torch.dtype, device: str) -> None:
    """Those that run here are nearer to float64: only the result is rounded."""
    tensors = [torch.randn(n, device=device).to(dtype) for n in (1, 3, 4097, 40_000)]
    if order in (1, 2):
        tensors.insert(2, torch.empty(0, dtype=dtype, device=device))
    got, want = foreach_ops.foreach_norm(tensors, order), torch._foreach_norm(tensors, order)
    rtol = 4 * TOLERANCE[dtype] if order in (3, 0) else 0.51 * torch.finfo(dtype).eps + 1e-14
    for a, b, t in zip(got, want, tensors, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        exact = torch.linalg.vector_norm(t.double(), order) if t.numel() else torch.zeros((), device=device)
        torch.testing.assert_close(a.double(), exact.double(), rtol=rtol, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [1, 2, math.inf])
def test_norms_of_huge_and_tiny_numbers(order: float, dtype: torch.dtype, device: str) -> None:
    """No square is infinite or rounded to 0.  In float64 some are, as in torch, which takes single ones as they are."""
    numbers = torch.finfo(dtype)
    for shapes in (((), (1,), (1, 1), (2,), (5000,)), ((2,), (33,), (5000,), (3, 3000))):
        tensors = [torch.zeros(s, dtype=dtype, device=device) for s in shapes for _ in range(4)]
        for t, value in zip(tensors, [numbers.max, -numbers.max / 2, numbers.tiny, numbers.tiny / 4] * 5, strict=False):
            t.view(-1)[-1] = value
        want = torch._foreach_norm(tensors if dtype is torch.float64 else [t.double() for t in tensors], order)
        assert foreach_ops.foreach_norm(tensors, order) == [norm.to(dtype) for norm in want]


@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_many_chunks(device: str) -> None:
    """More than a warp adds at once: the sums of chunks have chunks of their own."""
    numel = 1025 * 2048 + 5
    tensors = [torch.full((numel,), 2.0, device=device), torch.empty(0, device=device), torch.ones(3, device=device)]
    assert [norm.item() for norm in foreach_ops.foreach_norm(tensors, 1)] == [2 * numel, 0, 3]
    tensors[0][-1] = -7
    assert foreach_ops.foreach_norm(tensors[::2], math.inf)[0] == 7


@pytest.mark.parametrize("device", DEVICES)
def test_norms_take_a_dtype_and_hand_on_nan(device: str) -> None:
    halves = [torch.full((9000,), 200.0, device=device, dtype=torch.float16)]  # whose squares overflow float16
    (norm,) = foreach_ops.foreach_norm(halves, 2, torch.float64)
    assert norm.dtype is torch.float64
    assert float(norm) == pytest.approx(200 * math.sqrt(9000), rel=1e-12)
    poisoned = torch.ones(5000, device=device)
    poisoned[4321] = math.nan
    for order in (1, 2, math.inf):
        bad, good = foreach_ops.foreach_norm([poisoned, torch.ones(4, device=device)], order)
        assert math.isnan(bad)
        assert math.isfinite(good)


@pytest.mark.parametrize("device", DEVICES)
def test_norms_are_the_same_bits_every_time(device: str) -> None:
    tensors = [torch.randn(100_003, device=device) for _ in range(3)]
    first = torch.stack(foreach_ops.foreach_norm(tensors))
    assert all(torch.equal(first, torch.stack(foreach_ops.foreach_norm(tensors))) for _ in range(5))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(("name", "given"), [("add", ([torch.ones(3)], 2.0)), ("sqrt", (torch.ones(3),))])
def test_what_torch_refuses_is_refused(name: str, given: tuple[Any, ...]) -> None:
    options = {"alpha": 3.0} if name == "add" else {}
    for function in (getattr(torch, f"_foreach_{name}"), getattr(foreach_ops, f"foreach_{name}")):
        with pytest.raises(TypeError):
            function(*given, **options)


def test_names_from_before_they_had_a_module_of_their_own_still_resolve() -> None:
    assert len(foreach_ops.__all__) == 13
    for name in foreach_ops.__all__:
        assert getattr(pagedopt, name) is getattr(foreach_ops, name)
        assert name not in pagedopt.__all__
        assert name not in dir(pagedopt)
