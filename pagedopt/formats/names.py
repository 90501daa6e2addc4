"""The names of formats, for help texts and type checkers, too.  Does not import torch."""

from __future__ import annotations

from typing import Literal, get_args

NumberName = Literal["float32", "bfloat16", "float16", "float64"]
ChoiceName = Literal["int8"]
ShortName = Literal["fp32", "bf16", "fp16", "half", "fp64", "float", "double", "8bit"]
Name = NumberName | ChoiceName | ShortName
#: How parameters of 16 bits are stored beside what they have lost, and how they are rounded.
ParamFormatName = Literal["bfloat16+16", "bfloat16+8"]
ParamFormat = ParamFormatName | None
ParamRounding = Literal["nearest", "stochastic"]

#: Formats of plain numbers, and names that stand for several formats.
NUMBER_NAMES: tuple[str, ...] = get_args(NumberName)
CHOICE_NAMES: tuple[str, ...] = get_args(ChoiceName)
PARAM_FORMAT_NAMES: tuple[str, ...] = get_args(ParamFormatName)
NAMES = (*NUMBER_NAMES, *CHOICE_NAMES)
#: Short names, with the full ones.
SHORT: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64",
                         "float": "float32", "double": "float64", "8bit": "int8"}  # fmt: skip


def full_name(name: str) -> str:
    """Return the full name for a short one, and any other text as it is."""
    return SHORT.get(name, name)
