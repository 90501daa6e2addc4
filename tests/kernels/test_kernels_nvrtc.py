"""NVRTC takes every variant of every kernel, for architectures that need not be there.

The whole product of dtypes, tables and threads is compiled for adamw on sm_90, most of it by `make test-long`.
Elsewhere a covering part is: what depends on the rule (its functor) does not depend on how the table travels, and what
depends on the architecture (the code NVRTC makes of loads, conversions and shuffles) does not depend on the rule.
"""

from __future__ import annotations

import itertools
import locale
from collections.abc import Iterator
from pathlib import Path

import nvrtc_support
import pytest
import torch
from kernel_names import instance, sums_instance
from often import long_but
from rules_under_test import PARTS, carrying, copied, filled, steps, swap
from support import BF16, DTYPES, F16, F32, F64
from users_module import module

from pagedopt.kernels import nvrtc, source
from pagedopt.rules import RULES, Rule
from pagedopt.tables.layout import BLOCK, table_type
from pagedopt.transports.by_value import ARGUMENT_BYTES

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
#: The first and the last of them; the others take the time.
ENDS = long_but(ARCHITECTURES, (ARCHITECTURES[0], ARCHITECTURES[-1]).__contains__)
TABLES = tuple(map(table_type, (0, *ARGUMENT_BYTES)))
THREADS = (32, 512)


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    nvrtc_support.nvrtc()


def compile_all(text: str, names: list[str], arch: str) -> None:
    """One program with all instances: the text is read once."""
    known = nvrtc_support.nvrtc().nvrtcGetSupportedArchs()[1]
    if int(arch[3:]) not in known:
        pytest.skip(f"this NVRTC compiles for {known}, not for {arch}")
    cubin, symbols = nvrtc.compile_cuda(text, tuple(names), arch)
    assert cubin[:4] == b"\x7fELF"
    assert len(set(symbols)) == len(set(names)), "two variants share a symbol"
    assert all(symbol.encode() in cubin for symbol in symbols)


def state_mixes(rule: Rule) -> Iterator[tuple[torch.dtype, ...]]:
    """Every pair of parameter and gradient dtypes, with state in float32, bfloat16 and the parameter's dtype."""
    states = len(rule.inputs) - 2
    for param, grad in itertools.product(DTYPES, DTYPES):
        for state in dict.fromkeys((F32, BF16, param)) if states else (F32,):
            yield (param, grad, *[state] * states)


@pytest.mark.parametrize("part", long_but((0, 1, 2), (0,).__contains__))
def test_adamw_in_every_combination_of_dtypes_compiles(part: int) -> None:
    """The first part has every pair of dtypes of a parameter, its gradient and its state; tables and group sizes go
    around."""
    rule = RULES["adamw"]
    mixes = list(state_mixes(rule))
    assert len(mixes) == 40
    first = covering(mixes)
    rest = [mix for mix in mixes if mix not in first]
    parts = (first, rest[::2], rest[1::2])
    around = itertools.cycle(itertools.product(TABLES, THREADS))
    names = [instance(rule, dtypes, *next(around)[::-1]) for dtypes in parts[part]]
    compile_all(source.text(rule), names, "sm_90")


def covering(mixes: list[tuple[torch.dtype, ...]]) -> list[tuple[torch.dtype, ...]]:
    """Few of them, with all pairs that they have of parameter and gradient, parameter and state, gradient and state."""
    found: list[tuple[torch.dtype, ...]] = []
    left = {pair for mix in mixes for pair in itertools.combinations(enumerate(mix[:3]), 2)}
    while left:
        best = max(mixes, key=lambda mix: len(left & {*itertools.combinations(enumerate(mix[:3]), 2)}))
        left -= {*itertools.combinations(enumerate(best[:3]), 2)}
        found.append(best)
    return found


@pytest.mark.parametrize("arch", ENDS)
def test_adamw_compiles_for_every_architecture(arch: str) -> None:
    """Each dtype as parameter, gradient and state, each table and group size once."""
    rule = RULES["adamw"]
    mixes = [(F32,) * 4, (F64,) * 4, (BF16, F16, F32, F32), (F16, BF16, BF16, BF16)]
    around = itertools.cycle(itertools.product(TABLES, THREADS))
    names = [instance(rule, dtypes, *next(around)[::-1]) for dtypes in mixes + mixes[:2]]
    compile_all(source.text(rule), names, arch)


@pytest.mark.parametrize("variant", ["in place", pytest.param("out of place", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["adamw_amsgrad", "lion", "square_root"])
def test_a_rule_compiles_in_every_dtype(name: str, variant: str) -> None:
    """The rule with most lists, one with state, one with none and a function of the library; in float32 all of them
    compile together, and in bfloat16 by g++."""
    rule = RULES[name] if variant == "in place" else RULES[name].out_of_place
    count = len(rule.inputs)
    mixes = [(d,) * count for d in DTYPES] + [tuple(itertools.islice(itertools.cycle((BF16, F32, F16)), count))]
    tables = itertools.cycle(zip((512, 32, 512), TABLES, strict=True))
    names = [instance(rule, dtypes, *next(tables)) for dtypes in mixes]
    compile_all(source.text(rule), names, "sm_90")


def test_compiling_leaves_the_encoding_of_text_files_as_it_was() -> None:
    before = locale.getencoding()
    nvrtc.compile_cuda("", (), "sm_90")
    assert locale.getencoding() == before


@pytest.mark.parametrize("arch", long_but(ARCHITECTURES, ("sm_100",).__contains__))
def test_all_rules_compile_together_for_every_architecture(arch: str) -> None:
    """A cross-check of names as well: no functor collides with another or with the kernel's own words."""
    text = "\n".join([source.text(None), *(r.cuda_source() for r in RULES.values())])
    compile_all(text, [instance(r, (F32,) * len(r.inputs), 512, "TableAt") for r in RULES.values()], arch)


def test_the_whole_language_of_rules_compiles() -> None:
    rules = [*(part[0] for part in PARTS.values()), filled, steps, swap, carrying]
    text = "\n".join([source.text(None), *(r.cuda_source() for r in (*rules, copied))])
    names = [instance(r, (d,) * len(r.inputs), 512, "TableAt") for r in rules for d in (F32, F64)]
    names += [instance(copied, pair, 512, "TableAt") for pair in itertools.permutations(DTYPES, 2)]
    compile_all(text, names, "sm_75")


@pytest.mark.parametrize("arch", ENDS)
def test_sums_compile(arch: str) -> None:
    every = itertools.product((0, 1, 2), DTYPES, THREADS)
    names = [sums_instance(*each, table) for each, table in zip(every, itertools.cycle(TABLES), strict=False)]
    compile_all(source.text(None, kernel="sums.cu"), [*names, f"total<{BLOCK}>"], arch)


NAMES = ["load", "store", "update", "Row", "Chunk", "word", "fetch", "double", "apply", "lists"]


def test_a_rule_may_have_any_name(tmp_path: Path) -> None:
    texts = [f"def {name}(word, table, *, address):\n    return word + address * table\n" for name in NAMES]
    own = module("\n\n".join(texts), tmp_path)
    rules = [Rule(getattr(own, name)) for name in NAMES]
    text = "\n".join([source.text(None), *(each.cuda_source() for each in rules)])
    compile_all(text, [instance(each, (F32, F16), 512, "TableAt") for each in rules], "sm_90")


def test_an_error_of_nvrtc_says_what_and_where() -> None:
    text = source.text(None) + '\n#line 1 "mine"\nint broken() { return nothing_of_that_name; }\n'
    with pytest.raises(nvrtc.CompileError, match=r'mine\(1\): error: identifier "nothing_of_that_name" is undefined'):
        nvrtc.compile_cuda(text, (), "sm_90")


def test_denormals_are_kept_and_nothing_is_fused_unasked() -> None:
    """torch's kernels keep denormals, CuPy's default would not; fused products would make bits depend on alignment."""
    assert not any(word in option for option in nvrtc.OPTIONS for word in ("ftz=true", "fast_math", "fmad=true"))
    assert "--fmad=false" in nvrtc.OPTIONS
