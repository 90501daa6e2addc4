"""The arithmetic of the CUDA source, with no GPU, and Numba's: g++ compiles the text and fibers play its threads."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernel_texts import instance
from often import MARKS
from rules_to_the_bit import CASES, assert_same_bits, dtypes_of, name_of, sets_in, special_lists
from rules_under_test import (
    MANY,
    PARTS,
    carrying,
    copied,
    filled,
    many,
    same_values,
    special_inputs,
    steps,
    steps_in_torch,
    swap,
)
from support import AFTER, BF16, F16, F32, F64, SIZES, Lists, assert_updated, clone, lists_for, same_bits, scalars_for

from pagedopt import Sweep, multi_tensor_apply
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import BLOCK, Geometry, HostTable, table_type
from tests.card.kernels import Play, build, functors, launch

AnyLists = Sequence[Sequence[torch.Tensor | None]]
ADAMW = RULES["adamw"]
MIXES = {str(dtype)[6:]: (dtype,) * 4 for dtype in (F32, F64, BF16, F16)} | {
    "bfloat16 and float32": (BF16, BF16, F32, F32),
    "float16 and float64": (F16, F64, F32, BF16),
}
#: Then chunk i is row i, and the table has no list of chunks.
ONE_CHUNK_EACH = (700, 1, 3, 33, 1024) * 40
#: Warps share a block in the first; in the second the last chunk of 4,097 elements holds one.
SHAPES = {32: Geometry(1024, 32), 512: Geometry(2048, BLOCK)}

ADAMW_VARIANTS = [(dtypes, threads, 0) for dtypes in MIXES.values() for threads in SHAPES]
ADAMW_VARIANTS += [(MIXES["float32"], threads, nbytes) for threads in SHAPES for nbytes in (4096, 32764)]
ADAMW_VARIANTS += [(MIXES["bfloat16 and float32"], 512, nbytes) for nbytes in (4096, 32764)]


def sweep_over(rule: Rule, lists: AnyLists, threads: int, sets: int = 1) -> Sweep:
    return Sweep(rule, lists, geometry=SHAPES[threads], sets=sets)


def run_both(
    rule: Rule,
    played: AnyLists,
    by_numba: AnyLists,
    scalars: Sequence[dict[str, float]],
    play: Callable[[HostTable], Any],
    threads: int = 512,
) -> list[int]:
    """Play the kernel over some lists and run Numba's over the others; returns the set of each row."""
    sets = [i % len(scalars) for i in range(len(played[0]))]
    uniforms = [rule.uniforms(s) for s in scalars]
    for lists in (played, by_numba):
        sweep = sweep_over(rule, lists, threads, sets=len(scalars))
        sweep.table.host.set_sets(sets)
        if lists is by_numba:
            sweep.run(uniforms)
        else:
            sweep.table.host.set_scalars(uniforms)
            play(sweep.table.host)
    return sets


def play_of_adamw(variant: int) -> Play:
    names = tuple(instance(ADAMW, dtypes, threads, table_type(nbytes)) for dtypes, threads, nbytes in ADAMW_VARIANTS)
    return build(names, functors([ADAMW]))[variant]


#: Which way threads run, elements in front of each list or of all, whether a gradient is absent, and other sizes.
HOW: dict[str, dict[str, Any]] = {
    "aligned": {},
    "one off, backwards": {"gap": 1, "backwards": True},
    "three off": {"gap": 3},
    "gradients off": {"gap": (0, 5, 0, 0)},
    "state aligned": {"gap": (1, 2, 3, 0), "backwards": True},
    "each its own": {"gap": (3, 0, 5, 1)},
    "absent": {"absent": True},
    "one chunk each": {"sizes": ONE_CHUNK_EACH},
}


def is_often_run(dtypes: tuple[torch.dtype, ...], nbytes: int, how: str) -> bool:
    """Many small tensors take long; how tensors lie and how the table travels do not know each other."""
    if how == "one chunk each":
        return dtypes in (MIXES["float32"], MIXES["bfloat16"])
    return not nbytes or how == "absent"


VARIANTS_HOW = [
    pytest.param(v, how, id=f"{threads}-{nbytes}-{v}-{how}", marks=MARKS[is_often_run(dtypes, nbytes, how)])
    for v, (dtypes, threads, nbytes) in enumerate(ADAMW_VARIANTS)
    for how in HOW
]


@pytest.mark.parametrize(("variant", "how"), VARIANTS_HOW)
def test_adamw_in_every_variant(variant: int, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The played kernel agrees with the reference, and with Numba to the last bit."""
    (dtypes, threads, nbytes), play = ADAMW_VARIANTS[variant], play_of_adamw(variant)
    backwards, gap = HOW[how].get("backwards", False), HOW[how].get("gap", 0)
    before, played, by_numba = (lists_for(ADAMW, HOW[how].get("sizes", SIZES), dtypes, gap=gap) for _ in range(3))
    if "absent" in HOW[how]:
        for lists in (before, played, by_numba):
            lists[1][3] = None
    scalars = [scalars_for(ADAMW, step) for step in (3, 1, 8)]
    sets = run_both(ADAMW, played, by_numba, scalars, lambda table: launch(play, table, nbytes, backwards), threads)
    assert "runtime error" not in (said := capfd.readouterr().err), said
    assert_updated(ADAMW, before, played, *scalars, sets=sets)
    for j, (mine, others, old) in enumerate(zip(played, by_numba, before, strict=True)):
        for i, (a, b, c) in enumerate(zip(mine, others, old, strict=True)):
            where = f"{ADAMW.inputs[j]} {i}"
            if a is None or b is None or c is None:
                continue
            assert same_values(a, b), f"{where}: not Numba's bits"
            if any(tensors[i] is None for tensors in before) or j not in ADAMW.writes:
                assert torch.equal(a, c), f"{where} was written"
            for t in (a, b) if gap and a.numel() else ():
                begin = t.storage_offset()
                around = t.as_strided((begin + t.numel() + AFTER,), (1,), 0)
                assert (around[:begin] == 7).all(), f"{where}: written before its beginning"
                assert (around[begin + t.numel() :] == 7).all(), f"{where}: written past its end"


@pytest.mark.parametrize(("nbytes", "least"), [(4096, 8), pytest.param(32764, 2, marks=pytest.mark.long)])
@pytest.mark.parametrize("threads", SHAPES)
def test_a_table_split_over_launches(threads: int, nbytes: int, least: int) -> None:
    """Several hundred tensors: rows and chunks are renumbered in each launch."""
    sizes = [(i * 37) % 101 if i % 5 else 0 for i in range(600)] + [5000]
    before = lists_for(ADAMW, sizes, MIXES["float32"])
    results = []
    for argument_bytes in (0, nbytes):
        lists = clone(before)
        sweep = sweep_over(ADAMW, lists, threads)
        sweep.table.host.set_scalars([ADAMW.uniforms(scalars_for(ADAMW))])
        play = play_of_adamw(ADAMW_VARIANTS.index((MIXES["float32"], threads, argument_bytes)))
        launches = launch(play, sweep.table.host, argument_bytes)
        assert launches >= (least if argument_bytes else 1)
        results.append(lists)
    assert_updated(ADAMW, before, results[0], scalars_for(ADAMW))
    assert same_bits(*results)


@pytest.mark.parametrize("numel", [2**31 + 4104, 2**32 + 4104])
@pytest.mark.parametrize("threads", [None, *SHAPES], ids=["Numba", *map(str, SHAPES)])
def test_offsets_beyond_32_bits(threads: int | None, numel: int) -> None:
    """The last chunks of a tensor of bfloat16, of which a few pages exist: they alone are updated."""
    rule, reach = RULES["mul_scalar"], 5000
    no_reserve = 0x4000  # of Linux; the module names it from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    room = torch.frombuffer(mmap.mmap(-1, 2 * numel, flags=flags), dtype=BF16)
    room[-reach:] = 3  # from an even multiple of 8 on, as chunks begin
    sweep = Sweep(rule, [[room[:reach], room[:0]]], geometry=threads and SHAPES[threads])
    table = sweep.table.host
    assert table.rows["numel"].tolist() == [reach, 0]
    table.rows["numel"][0] = numel
    table.chunks["offset"] += numel - reach
    table.rows_changed()
    if threads is None:
        sweep.run({"scalar": 2.0})
    else:
        (play,) = build((instance(rule, (BF16,), threads, "TableAt"),), functors([rule]))
        table.set_scalars([[2.0]])
        launch(play, table)
    assert (room[-reach:] == 6).all()
    assert (room[: 2 * reach] == 0).all()


OUT = [(RULES[name].out_of_place, (dtype,) * len(RULES[name].out_of_place.inputs), threads)
       for name in ("adamw", "lerp", "sgd_momentum") for dtype, threads in ((F32, 512), (BF16, 32))]  # fmt: skip


@pytest.mark.parametrize("variant", range(len(OUT)), ids=lambda v: f"{OUT[v][0].name}-{OUT[v][2]}")
def test_results_go_to_other_lists(variant: int) -> None:
    plays = build(tuple(instance(*each, "TableAt") for each in OUT), functors(dict.fromkeys(rule for rule, *_ in OUT)))
    rule, dtypes, threads = OUT[variant]
    by_numba = lists_for(rule, SIZES, dtypes)
    played = clone(by_numba)
    run_both(rule, played, by_numba, [scalars_for(rule)], functools.partial(launch, plays[variant]), threads)
    assert same_bits(by_numba, played)


#: In all storages; any other rule in one, as storage and operations do not know each other (a GPU does all in all).
IN_ALL = ("adamw", "sgd_momentum", "lion")


def is_often(rule: Rule) -> bool:
    """Whether a case is no long one: AdamW's relatives are."""
    return rule.name in IN_ALL or not rule.name.startswith("adam")


PLAYED = [(rule, stored) for rule, stored in CASES if rule.name in IN_ALL or stored == "float32"]
_BY_CASE = [pytest.param(*each, id=name_of(each), marks=MARKS[is_often(each[0])]) for each in PLAYED]


@pytest.mark.parametrize(("rule", "stored"), _BY_CASE)
def test_the_bits_of_several_steps_are_numbas(rule: Rule, stored: str) -> None:
    """Special values included; of a NaN only that it is one."""
    alike = [each for each in PLAYED if is_often(each[0]) == is_often(rule)]  # `make test` compiles its own alone
    names = tuple(instance(each, dtypes_of(each, dtype), 512, "TableAt") for each, dtype in alike)
    play = build(names, functors(dict.fromkeys(each for each, _ in alike)))[alike.index((rule, stored))]
    before, played, by_numba = (special_lists(rule, stored) for _ in range(3))
    for step in (2, 1, 3):  # ADOPT leaves parameters in its first
        run_both(rule, played, by_numba, sets_in(rule, step), functools.partial(launch, play))
        assert_same_bits(rule, before, played, by_numba)


# ---- the language of rules ----

LANGUAGE = [(r, (d,) * len(r.inputs)) for r, _, _ in PARTS.values() for d in (F32, F64)]
LANGUAGE += [(steps, (F64, F64)), (swap, (F32, F32)), (many, (F64, F64)), (filled, (F32, BF16)), (carrying, (F64, F64))]
LANGUAGE += [(copied, pair) for pair in ((BF16, F32), (F32, BF16), (F64, BF16), (F16, F32), (F64, F16), (F64, F32))]


def play_language(rule: Rule, lists: Lists, scalars: dict[str, float] | None = None) -> None:
    dtypes = tuple(x[0].dtype for x in lists if x[0] is not None)
    rules = {r.name: r for r, _ in LANGUAGE}
    plays = build(tuple(instance(r, d, 512, "TableAt") for r, d in LANGUAGE), functors(rules.values()))
    sweep = sweep_over(rule, lists, 512)
    sweep.table.host.set_scalars([rule.uniforms(scalars or {})])
    launch(plays[LANGUAGE.index((rule, dtypes))], sweep.table.host)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_the_language(name: str, dtype: torch.dtype) -> None:
    """By Numba, by g++, and in the reference."""
    rule, in_torch, roundings = PARTS[name]
    inputs = special_inputs(rule, dtype)
    played, by_numba = ([[t.clone()] for t in inputs] for _ in range(2))
    play_language(rule, played)
    multi_tensor_apply(rule, by_numba)
    for j, want, reference in zip(rule.writes, in_torch(*inputs), rule.reference(*inputs), strict=True):
        for found in (played[j][0], by_numba[j][0], reference.to(dtype).expand_as(want).contiguous()):
            assert same_values(found, want, roundings), f"{rule.inputs[j]}: {found} is not {want}"


#: A rule, the dtypes of its lists, and hyperparameters.
WHOLE: list[tuple[Rule, tuple[torch.dtype, torch.dtype], dict[str, float]]] = [
    (steps, (F64, F64), {"rate": 0.3, "flag": 0.0}), (steps, (F64, F64), {"rate": 0.3, "flag": 1.0}),
    (swap, (F32, F32), {}), (many, (F64, F64), MANY), (filled, (F32, BF16), {"value": 3.0}),
    (carrying, (F64, F64), {"scale": 0.7, "rate": 0.3, "count": 5.0}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "dtypes", "scalars"), WHOLE, ids=lambda x: getattr(x, "name", ""))
def test_a_rule_is_its_reference(rule: Rule, dtypes: tuple[torch.dtype, ...], scalars: dict[str, float]) -> None:
    """Whose results read each other, or are hyperparameters, of which there are more than a warp has threads."""
    inputs = [torch.linspace(-4, 4, 3001).to(dtype) for dtype in dtypes]
    played, by_numba = ([[t.clone()] for t in inputs] for _ in range(2))
    play_language(rule, played, scalars)
    multi_tensor_apply(rule, by_numba, scalars)
    assert same_bits(played, by_numba)
    want = steps_in_torch(*inputs, **scalars) if rule is steps else rule.reference(*inputs, **scalars)
    for (found,), expect in zip([played[j] for j in rule.writes], want, strict=True):
        torch.testing.assert_close(found, expect.to(found.dtype).expand_as(found), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("source", "target"), [d for r, d in LANGUAGE if r is copied], ids=str)
def test_conversions_are_those_of_torch(source: torch.dtype, target: torch.dtype) -> None:
    bits = torch.arange(-(1 << 31), 1 << 31, 65_521, dtype=torch.int64).to(torch.int32)
    values = torch.cat([bits.view(F32), bits[::7].view(F32).bfloat16().float() * 1.00390625]).to(source)
    got = torch.zeros(len(values), dtype=target)
    play_language(copied, [[values], [got]])
    assert same_values(got.float(), values.to(target).float())
