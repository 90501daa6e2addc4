"""When is func3, pasted from the text of func1 and func2, what one does after the other?

Answer: see notes/custom_op.md.

Two kernels as text are launched one after the other, and pasted to one, in Numba, Triton and
CUDA C++.  *Right* has the same bits.  Beside each, the same as rules, in two launches and composed to one.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.lab import Page, Row, Rows, Run
from pagedopt import Rule, RuleError, compose, multi_tensor_apply

# --- pointwise kernels as text, in three languages, and the lecture's ``func3``: two of them pasted to one

#: Statements: a local name, or y, and what it is.
Body = Sequence[tuple[str, str]]
Launch = Callable[[torch.Tensor, torch.Tensor, float], None]
NUMBA, TRITON, CUDA = LANGUAGES = "Numba", "Triton", "CUDA C++"
#: What is left for each thread of a single block of Triton's.
MOST = 1024
HEADS = {
    NUMBA: ["def {name}(inp, out, n, a):", "    for i in range(n):", "        x = inp[i]"],
    TRITON: [
        "import triton", "import triton.language as tl", "@triton.jit",
        "def {name}(inp, out, n, a, BLOCK: tl.constexpr):", "        i = tl.arange(0, BLOCK)",
        "        x = tl.load(inp + i, i < n, other=0.0).to(tl.float32)",
    ],
    CUDA: [
        "template <class T> __device__ float sum(const T* inp, long long n) {{",
        "    float total = 0; for (long long k = 0; k < n; ++k) total += inp[k]; return total; }}",
        'extern "C" __global__ void {name}(const {inp}* inp, {out}* out, long long n, float a) {{',
        "    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;", "    if (i < n) {{",
        "        float x = inp[i], y;",
    ],
}  # fmt: skip
TAILS = {
    NUMBA: ["        out[i] = y"],
    TRITON: ["        tl.store(out + i, y, i < n)"],
    CUDA: ["        out[i] = y;", "    }}", "}}"],
}
#: What stands for the sum of all that is read, and for its last element but i.
SUM, MIRRORED = "SUM", "MIRRORED"
ATOMS = {
    NUMBA: {SUM: "inp.sum()", MIRRORED: "inp[n - 1 - i]"},
    TRITON: {SUM: "tl.sum(tl.load(inp + i, i < n, other=0.0), 0)", MIRRORED: "tl.load(inp + n - 1 - i, i < n)"},
    CUDA: {SUM: "sum(inp, n)", MIRRORED: "inp[n - 1 - i]"},
}
TYPES = {torch.float32: "float", torch.int32: "int"}
LOADS, STORES = re.compile(r"^\s+(float )?x = "), re.compile(r"out\[i\] = |tl\.store\(")


def text(language: str, name: str, body: Body, inp: torch.dtype, out: torch.dtype) -> list[str]:
    """The lines of a kernel."""
    lines = []
    for left, right in body:
        for atom, written in ATOMS[language].items():
            right = right.replace(atom, written)
        declared = f"float {left}" if language == CUDA and left != "y" else left
        lines.append(f"        {declared} = {right}{';' if language == CUDA else ''}")
    known = {"name": name, "inp": TYPES[inp], "out": TYPES[out]}
    return [
        *(line.format(**known) for line in HEADS[language]),
        *lines,
        *(line.format(**known) for line in TAILS[language]),
    ]


def paste(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The lines of a kernel that does what the first does, and to its result what the second does."""
    stored = next(i for i, line in enumerate(first) if STORES.search(line))
    loaded = next(i for i, line in enumerate(second) if LOADS.search(line))
    glue = "        x = y;" if first[stored].endswith(";") else "        x = y"
    return [*first[:stored], glue, *second[loaded + 1 :]]


def compiled(language: str, lines: Sequence[str], name: str) -> Launch:
    """A launch of the kernel; over up to :data:`MOST` elements.

    Raises:
        Exception: whatever the compiler says, here or at the first launch.
    """
    written = "\n".join(lines) + "\n"
    if language == NUMBA:
        known: dict[str, Any] = {}
        exec(written, known)
        numba, numpy = importlib.import_module("numba"), importlib.import_module("numpy")
        loop = numba.njit(known[name])
        return lambda inp, out, a: loop(inp.numpy(), out.numpy(), inp.numel(), numpy.float32(a))
    if language == TRITON:
        kernel = getattr(_module(written), name)
        return lambda inp, out, a: kernel[(1,)](inp, out, inp.numel(), a, BLOCK=MOST)
    cupy, numpy = importlib.import_module("cupy"), importlib.import_module("numpy")
    raw = cupy.RawKernel(written, name, options=("-fmad=false",))

    def launch(inp: torch.Tensor, out: torch.Tensor, a: float) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            raw((MOST // 256,), (256,), (inp.data_ptr(), out.data_ptr(), inp.numel(), numpy.float32(a)))

    return launch


def _module(written: str) -> Any:
    """Triton reads the source of a kernel from its file."""
    path = Path(tempfile.mkdtemp(prefix="pagedopt-pasted-")) / "pasted.py"
    path.write_text(written)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the question

# --- pairs of functions to be one: as text that is pasted, and as rules that are composed

WORKS, NAME, LOCAL, REDUCTION, ELSEWHERE, ROUNDED, TWICE = (
    "pointwise", "a local has the name of an argument", "both have a local of one name", "a reduction between",
    "the second reads other elements", "the list between rounds", "the list between is read later",
)  # fmt: skip
SQUARED: Body = [("y", "x * x")]
#: What each is made of; "a" is an argument.
CASES: dict[str, tuple[Body, Body]] = {
    WORKS: ([("t", "x * a"), ("y", "t * t")], [("y", "x * x")]),
    NAME: ([("a", "x * x"), ("y", "a * x")], [("y", "x * a")]),
    LOCAL: ([("t", "x * a"), ("y", "t * t")], [("t", "x * x"), ("y", "t * a")]),
    REDUCTION: (SQUARED, [("y", f"x / {SUM}")]),
    ELSEWHERE: (SQUARED, [("y", f"x - {MIRRORED}")]),
    ROUNDED: ([("y", "x * a")], SQUARED),
    TWICE: (SQUARED, [("y", "x * a")]),
}
N, A = 1000, 3.3


def as_text(language: str, case: str, device: torch.device) -> Callable[[], bool]:
    """Whether the pasted kernel leaves what the two leave."""
    first, second = CASES[case]
    between = torch.int32 if case == ROUNDED else torch.float32
    one = text(language, "func", first, torch.float32, between)
    two = text(language, "func", second, between, torch.float32)
    three = paste(one, text(language, "func", second, torch.float32, torch.float32))
    if language == CUDA:  # func3 stores what func2 stores
        three = [line.replace("int* out", "float* out") for line in three]
    x = torch.linspace(0.5, 2, N, device=device)

    def same() -> bool:
        want, got = ([torch.zeros_like(x, dtype=between), torch.zeros_like(x)] for _ in range(2))
        compiled(language, one, "func")(x, want[0], A)
        compiled(language, two, "func")(want[0], want[1], A)
        compiled(language, three, "func")(x, got[1], A)
        return torch.equal(got[1], want[1]) and (case != TWICE or torch.equal(got[0], want[0]))

    return same


def times(x, *, a):
    t = x * a
    return t * t


def squared(x):
    return x * x


def local_a(x):
    a = x * x
    return a * x


def by_a(x, *, a):
    return x * a


def t_again(x, *, a):
    t = x * x
    return t * a


def reduced(x):
    return x / sum(x)


def mirrored(x):
    return x - x[-1]


def kept(x, kept):
    kept = x * x
    x = kept
    return x, kept


#: The same as functions on scalars; of all elements, or of another, no scalar knows.
PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    WORKS: (times, squared), NAME: (local_a, by_a), LOCAL: (times, t_again), REDUCTION: (squared, reduced),
    ELSEWHERE: (squared, mirrored), ROUNDED: (by_a, squared), TWICE: (kept, by_a),
}  # fmt: skip


def as_rules(case: str, device: torch.device) -> Callable[[], bool]:
    """Whether composed rules leave what one after the other leaves; a list of float16 rounds."""

    def same() -> bool:
        rules = [Rule(function) for function in PARTS[case]]
        dtype = torch.float16 if case == ROUNDED else torch.float32
        want, got = ([torch.linspace(0.5, 2, N, device=device).to(dtype) for _ in range(2)] for _ in range(2))
        for rule in rules:
            multi_tensor_apply(rule, [[t] for t in want[: len(rule.inputs)]], {"a": A} if rule.scalars else {})
        one = compose(*rules)
        multi_tensor_apply(one, [[t] for t in got[: len(one.inputs)]], {"a": A} if one.scalars else {})
        return all(torch.equal(a, b) for a, b in zip(want, got, strict=True))

    return same


# --- the question

MEASURES = ("kernels",)
NOTE = "custom_op"
RIGHT, WRONG, REFUSED, RULES = "right", "wrong, without a word", "refused", "rules, composed (ours)"


def measure(run: Run) -> Iterator[Row]:
    """A row per language and case."""
    languages = [NUMBA] if run.device.type == "cpu" else [TRITON, CUDA]
    if left := [language for language in LANGUAGES if language not in languages]:
        run.leave_out(f"{', '.join(left)}: {'need a GPU' if run.device.type == 'cpu' else 'is for the CPU'}")
    for language in (*languages, RULES):
        for case in run.each(CASES):
            same = as_rules(case, run.device) if language == RULES else as_text(language, case, run.device)
            found, said = REFUSED, ""
            try:
                found = RIGHT if same() else WRONG
            except Exception as error:  # a compiler's may be anything
                lines = [line for line in str(error).splitlines() if "error" in line or "cannot" in line]
                said = f"{type(error).__name__}: {(lines or [''])[0].rpartition('/')[2]}"[:160]
                expected = (RuleError,) if language == RULES else (Exception,)
                found = REFUSED if isinstance(error, expected) else WRONG
            yield {"language": language, "case": case, "device": run.device.type, "found": found, "said": said}


def derive(rows: Rows) -> Rows:
    """Whether it is wrong without a word."""
    return Rows({**row, "silent": int(row["found"] == WRONG)} for row in rows)


def report(page: Page, rows: Rows) -> None:
    """A table and what is held to a limit."""
    page.grid("func1 and func2 as one, on {device}", rows, "case", "language", "found", "what they are", str)
    page.detail.table("func1 and func2 as one, in {language} on {device}", rows,
        {"what they are": "case", "pasted, or composed": "found", "in words": "said"}, by=("language", ))  # fmt: skip
    page.bar("composed rules that are wrong without a word", rows.where(language=RULES),
        lambda rows: sum(row["silent"] for row in rows), at_most=0)  # fmt: skip
    page.bar(
        "pasted texts that are wrong without a word",
        rows,
        lambda rows: max(
            sum(row["silent"] for row in rows if row["language"] == language) for language in rows.values("language")
        ),
        at_least=4,
    )
