"""What a question measures, as fingerprints: results say by them what has changed since, and ask no history.

A question measures what its ``measure`` reaches by names in ``experiments``, and the topics that its ``MEASURES``
lists: parts of the package, and the clock.  Python counts as syntax trees without docstrings, annotations and imports,
and kernels as the text that is compiled, without comments.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.harness.revision import ROOT

#: Topic → files; of kernels also what :data:`PRINTED` prints.
TOPICS: dict[str, tuple[str, ...]] = {
    "clock": ("experiments/harness/time.py",),
    "kernels": (
        "pagedopt/kernels/device.cuh", "pagedopt/kernels/numbers.cuh", "pagedopt/kernels/table.cuh",
        "pagedopt/kernels/multi_tensor_apply.cu", "pagedopt/kernels/blocks.cu",
    ),
    "factor": (
        "pagedopt/kernels/factor.cuh", "pagedopt/kernels/factor.cu", "pagedopt/kernels/sums.cu",
        "pagedopt/launch/factor.py", "pagedopt/launch/sums.py", "pagedopt/optim/clip.py",
    ),
    "CPU kernels": (
        "pagedopt/kernels/cpu.py", "pagedopt/kernels/cpu_text.py", "pagedopt/kernels/numba_numbers.py",
        "pagedopt/kernels/team.py",
    ),
    "launch": (
        "pagedopt/launch/sweep.py", "pagedopt/optim/pages.py", "pagedopt/launch/sweep.py",
        "pagedopt/launch/device_table.py", "pagedopt/kernels/cuda.py", "pagedopt/tables/*.py",
    ),
    "transports": ("pagedopt/transports/*.py",),
    "step": (
        "pagedopt/optim/optimizer.py", "pagedopt/optim/launch.py", "pagedopt/optim/seen.py",
        "pagedopt/optim/numbers.py", "pagedopt/optim/plan.py", "pagedopt/optim/gather.py",
        "pagedopt/optim/launch.py", "pagedopt/system/compare_tensors.py",
    ),
    "registered": (
        "pagedopt/launch/apply.py", "pagedopt/launch/registered.py", "pagedopt/launch/sweep.py",
        "pagedopt/system/registered_ops.py",
    ),
    "capture": (
        "pagedopt/optim/capture.py", "pagedopt/optim/numbers.py", "pagedopt/launch/device_step.py",
        "pagedopt/kernels/prologue.cu", "pagedopt/system/cuda/graphs.py",
    ),
    "formats": ("pagedopt/formats/*.py",),
    "norms": ("pagedopt/launch/norm.py", "pagedopt/launch/sums.py", "pagedopt/kernels/sums.cu"),
    "paging": ("pagedopt/paging/*.py", "pagedopt/placements/*.py", "pagedopt/system/cuda/virtual.py"),
    "state file": ("pagedopt/system/files/*.py",),
    "overlap": ("pagedopt/optim/overlap/*.py", "pagedopt/optim/step/queued.py"),
    "compiling": ("pagedopt/kernels/nvrtc.py", "pagedopt/system/cache.py", "pagedopt/system/numba/*.py"),
}  # fmt: skip
#: Prints a kernel in each language, in any tree that has rules.
PRINTED = """
from pagedopt.rules.adamw import adamw
print(adamw.cuda_source(), adamw.numba_source(), sep="\\0")
"""
OWN = "experiment"
#: Modules of ``experiments`` that are how it is measured, not what; of them the clock alone is a topic.
HOW = ("experiments.harness", "experiments.lab")
UNKNOWN = "unknown"
#: Fields of syntax trees that do not run, or are not in those of every Python.
NOT_RUN = ("annotation", "returns", "type_comment", "type_params", "ctx", "kind")
#: Of a syntax tree as text: names, attributes of names, and texts that may name a module.
NAME, ATTRIBUTE = re.compile(r"Name\(id='(\w+)'"), re.compile(r"Attribute\(value=Name\(id='(\w+)'\) attr='(\w+)'")
MODULE = re.compile(r"Constant\(value='(experiments\.[\w.]+)'")
Definitions = Mapping[str, Sequence[ast.stmt]]


@functools.cache
def of(module: str, topics: tuple[str, ...], root: Path = ROOT) -> Mapping[str, str]:
    """The fingerprints of a question in the tree of ``root``, by topic.

    Raises:
        ValueError: there is no such topic.
    """
    if unknown := [topic for topic in topics if topic not in TOPICS]:
        raise ValueError(f"{module}: MEASURES names {', '.join(unknown)}; there are {', '.join(TOPICS)}")
    return {OWN: _digest(reached(root, module, "measure")), **{topic: _of_topic(root, topic) for topic in topics}}


def changed(then: Mapping[str, str] | None, now: Mapping[str, str]) -> list[str]:
    """Topics of ``now`` that were not the same; of fingerprints that nobody knows, one word for all."""
    return [UNKNOWN] if then is None else [topic for topic, value in now.items() if then.get(topic) != value]


def age(commit: str, topics: Sequence[str]) -> str:
    """How old results are: "measured at abc1234; kernels, step changed since"."""
    since = "what has changed since is unknown" if UNKNOWN in topics else f"{', '.join(topics)} changed since"
    return f"measured at {commit}" + (f"; {since}" if topics else "")


# --- what a question reaches


def reached(root: Path, module: str, name: str) -> list[str]:
    """Everything that a definition reaches by names, itself included, each as a line."""
    found: dict[tuple[str, str], str] = {}
    todo = {(module, name)}
    while todo:
        here, wanted = todo.pop()
        found[here, wanted], mentioned = _definition(root, here, wanted)
        todo |= {target for target in mentioned if target not in found}
    return [f"{here}.{wanted}: {text}" for (here, wanted), text in sorted(found.items()) if text]


@functools.cache
def _definition(root: Path, module: str, name: str) -> tuple[str, set[tuple[str, str]]]:
    """A definition as text, and the modules and names that it mentions or that are registered beside it."""
    text = " ".join(map(plain, _definitions(root, module).get(name, ())))
    return text, {*_mentioned(root, module, text), *((module, each) for each in _registered(root, module))}


def _mentioned(root: Path, module: str, text: str) -> Iterator[tuple[str, str]]:
    """Names of its own module, imported ones, those of imported modules, and all of modules that are named in texts."""
    own, imported = _definitions(root, module), _imports(root, module)
    for name in set(NAME.findall(text)):
        if name in own:
            yield module, name
        elif name in imported and imported[name][1]:
            yield imported[name]
    for name, attribute in set(ATTRIBUTE.findall(text)):
        there, inner = imported.get(name, ("", ""))
        if there and not inner:
            yield there, attribute
    for there in set(MODULE.findall(text)):
        yield from ((there, name) for name in _definitions(root, there))


def _file(root: Path, module: str) -> Path | None:
    """The file of a module of ``experiments`` that may belong to what is measured."""
    if not re.fullmatch(r"experiments(\.\w+)+", module) or module.startswith(HOW):
        return None
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def _tree(root: Path, module: str) -> ast.Module:
    file = _file(root, module)
    return ast.parse(file.read_text() if file else "")


@functools.cache
def _definitions(root: Path, module: str) -> Definitions:
    """Functions, classes and assignments at the top of a module, by the names that they define."""
    found: dict[str, list[ast.stmt]] = {}
    for node in _tree(root, module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for inner in ast.walk(target):
                    if isinstance(inner, ast.Name):
                        found.setdefault(inner.id, []).append(node)
    return found


@functools.cache
def _registered(root: Path, module: str) -> list[str]:
    """Functions that a decorator of the same module puts on a list there: nobody else names them."""
    own = _definitions(root, module)
    return [
        name
        for name, nodes in own.items()
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        if any(isinstance(n, ast.Name) and n.id in own for d in node.decorator_list for n in ast.walk(d))
    ]


@functools.cache
def _imports(root: Path, module: str) -> dict[str, tuple[str, str]]:
    """Name → module and name there ("": it is the module) of what is imported from ``experiments``."""
    found = {}
    for node in ast.walk(_tree(root, module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("experiments"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = (inner, "") if _file(root, inner) else (node.module, alias.name)
    return {name: target for name, target in found.items() if _file(root, target[0])}


# --- what of a file counts


def plain(node: ast.AST) -> str:
    """A syntax tree as text, the same by every Python: no positions, docstrings, annotations or imports."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if is_text or isinstance(node, ast.Import | ast.ImportFrom):
        return ""
    parts = []
    for name, value in ast.iter_fields(node):
        if name not in NOT_RUN:
            values = value if isinstance(value, list) else [value]
            texts = [plain(v) if isinstance(v, ast.AST) else repr(v) for v in values if v is not None]
            if kept := [text for text in texts if text]:
                parts.append(f"{name}={','.join(kept)}")
    return f"{type(node).__name__}({' '.join(parts)})"


def without_comments(text: str) -> str:
    """C++ without comments, its white space normalized."""
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())


@functools.cache
def _of_topic(root: Path, topic: str) -> str:
    files = sorted({path for pattern in TOPICS[topic] for path in root.glob(pattern)})
    lines = [f"{path.relative_to(root)}: {_text(path.read_text(), path.suffix == '.py')}" for path in files]
    if topic in ("kernels", "CPU kernels"):
        on_cpu = topic == "CPU kernels"
        lines.append(_text(_printed(root)[on_cpu], on_cpu))
    return _digest(lines)


def _text(source: str, is_python: bool) -> str:
    return plain(ast.parse(source)) if is_python else without_comments(source)


@functools.cache
def _printed(root: Path) -> tuple[str, str]:
    """A rule's kernel in CUDA and for Numba, as the tree of ``root`` prints it; nothing where it does not."""
    if root == ROOT:
        from pagedopt.rules.adamw import adamw

        return adamw.cuda_source(), adamw.numba_source()
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", PRINTED], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    cuda, _, cpu = done.stdout.partition("\0")
    return (cuda, cpu) if done.returncode == 0 else ("", "")


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
