"""Check a format's text for Numba without compiling it."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Collection
from typing import Literal

#: Functions that any text may call: those of rules, and the two that reinterpret uint32 bits and float32.
FUNCTIONS = frozenset({
    "bits_of", "element_abs", "element_exp", "element_fma", "element_log", "element_max",
    "element_min", "element_sign", "element_sqrt", "element_tanh", "float_of",
})  # fmt: skip


def check_text(what: str, text: str, names: Collection[str], mode: Literal["eval", "exec"]) -> None:
    """Check that ``text`` is an expression (``eval``) or statements (``exec``) of Python, and uses only known names.

    Besides ``names`` it may use ``FUNCTIONS``, builtins and what it assigns.  Errors (ValueError) begin with ``what``.
    """
    needed = "an expression" if mode == "eval" else "statements"
    text = textwrap.dedent(text).strip("\n")
    empty = ValueError(f"{what} is empty; give {needed}, from which kernels for the CPU are made")
    if not text.strip():
        raise empty
    try:
        tree = ast.parse(text, mode=mode)
    except SyntaxError as error:
        line = (error.text or text).strip()
        raise ValueError(f"{what} is not {needed} of Python: {error.msg}, in {line!r}") from None
    if isinstance(tree, ast.Module) and not tree.body:
        raise empty
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    known = {*names, *FUNCTIONS, *dir(builtins), *(node.id for node in used if isinstance(node.ctx, ast.Store))}
    if unknown := [node.id for node in used if node.id not in known]:
        raise ValueError(
            f"{what} uses the name {unknown[0]}; there are {', '.join(sorted(names))}, and the functions "
            f"{', '.join(sorted(FUNCTIONS))}"
        )
