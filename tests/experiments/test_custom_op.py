"""Operators and what torch is told of them: real runs of toys, what is made of rows, and bars that can be missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiment_runs import experiment, judged, regenerated, run_quick

from experiments.boxes import epilogues, opaque, pasted
from experiments.harness.rows import Rows
from experiments.harness.time import series
from experiments.operators import lies, told
from experiments.works import judged_lies, list_operators, muladd, pasted_cases, pasted_text, planted_lies
from experiments.works.list_operators import CUSTOM_OP, DIRECT, EXTENSION, OURS
from experiments.works.muladd_used import CALLED, COMPILED, DIFFERENTIATED, EXPORTED, TRAINED, USES

CPU = torch.device("cpu")


def verdicts(name: str, question: str, rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    (asked,) = (q for q in experiment(name).questions if q.name == question)
    return {bar.title: bar.verdict(asked.derive(Rows(rows))).met for bar in asked.listed("BARS")}


@pytest.mark.long
def test_toys_of_operators_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("custom_op", tmp_path, plots=["ways"])
    parts = {name: Rows(part["rows"]) for name, part in found["parts"].items()}
    assert list(parts) == ["told", "lies", "ways"]
    assert [row["told"] for row in parts["told"]] == list(muladd.LEVELS)
    assert [row["lie"] for row in parts["lies"]] == list(planted_lies.LIES)
    assert any(EXTENSION in line for line in found["left_out"])


@pytest.mark.long
def test_toys_of_black_boxes_are_measured_on_a_cpu(tmp_path: Path) -> None:
    found = run_quick("black_boxes", tmp_path)
    assert list(found["parts"]) == ["pasted", "opaque"]
    assert any("Triton, CUDA C++: need a GPU" in line for line in found["left_out"])
    assert any("epilogues: needs a GPU" in line for line in found["left_out"])


# --- told


def test_the_operator_is_a_times_b_plus_c() -> None:
    a, b = torch.linspace(1, 2, 12).view(3, 4), torch.linspace(-1, 1, 12).view(3, 4)
    for level in muladd.LEVELS:
        assert torch.allclose(muladd.told(level)(a, b, 0.25), a * b + 0.25), level


@pytest.mark.parametrize(
    ("level", "use", "want"),
    [
        (muladd.NOTHING, CALLED, told.RIGHT),
        (muladd.NOTHING, COMPILED, told.REFUSED),
        (muladd.OP, COMPILED, told.REFUSED),
        (muladd.OP, DIFFERENTIATED, told.WRONG),
        (muladd.FAKE, COMPILED, told.RIGHT),
        (muladd.FAKE, TRAINED, told.WRONG),
        (muladd.FAKE, EXPORTED, told.RIGHT),
        (muladd.AUTOGRAD, TRAINED, told.RIGHT),
        (muladd.NOW, TRAINED, told.RIGHT),
    ],
)
def test_what_torch_is_told_decides_what_works(level: str, use: str, want: str) -> None:
    found, said = told.found(use, muladd.told(level), CPU)
    assert found == want
    assert bool(said) is (want != told.RIGHT)


def test_what_is_missing_is_counted() -> None:
    row = {"told": muladd.NOW, "graphs": 1, "said": {}, **dict.fromkeys(USES, told.RIGHT)}
    bare = {**row, "told": muladd.NOTHING, "graphs": 2}
    assert set(verdicts("custom_op", "told", [row, bare]).values()) == {True}
    (bad,) = told.derive(Rows([{**row, EXPORTED: told.WRONG, COMPILED: told.REFUSED, "said": {COMPILED: "no"}}]))
    assert (bad["wrong"], bad["missing"], bad["first_word"]) == (1, 2, "no")
    assert False in verdicts("custom_op", "told", [{**row, EXPORTED: told.WRONG}, bare]).values()
    assert False in verdicts("custom_op", "told", [row, {**bare, "graphs": 1}]).values()


# --- lies


def test_opcheck_catches_a_secret_write_and_nobody_one_that_goes_elsewhere() -> None:
    secret, elsewhere = (judged_lies.checked(name, CPU) for name in (planted_lies.SECRET, planted_lies.OWN))
    assert secret["opcheck"] == "test_schema"
    assert (elsewhere["opcheck"], elsewhere["eager"]) == ("", judged_lies.RIGHT)
    assert judged_lies.compiled(planted_lies.OWN, CPU, "aot_eager")[0] == judged_lies.WRONG


def test_gradcheck_alone_catches_a_wrong_gradient() -> None:
    row = judged_lies.checked(planted_lies.GRADIENT, CPU)
    assert (row["opcheck"], row["eager"], row["gradcheck"]) == ("", judged_lies.WRONG, True)


def test_who_catches_a_lie_is_named() -> None:
    row = {
        "lie": "x",
        "opcheck": "",
        "eager": lies.CAUGHT,
        "gradcheck": True,
        "aot_eager": "right",
        "inductor": "caught",
    }
    found = lies.derive(Rows([row, {**row, "opcheck": "test_schema"}]))
    assert [each["caught"] for each in found] == [
        "gradcheck, inductor, the call",
        "opcheck, gradcheck, inductor, the call",
    ]
    (unseen,) = lies.derive(Rows([{**row, "gradcheck": False, "eager": "right", "inductor": "wrong"}]))
    assert (unseen["caught"], unseen["unseen"]) == (lies.NOBODY, 1)
    assert set(verdicts("custom_op", "lies", [row] * 4).values()) == {True, False}
    assert set(verdicts("custom_op", "lies", [{**row, "opcheck": "test_schema"}] * 4).values()) == {True}


# --- ways


def call(case: str, tensors: int, us: float) -> dict[str, Any]:
    about = {"case": case, "tensors": tensors, "device": "cpu", "lines": 1, "cold": None}
    return {**about, "time": series([us], "host")}


@pytest.mark.parametrize(
    ("tensors", "us", "met"), [(100, 20.9, True), (100, 21.1, False), (1000, 250.9, True), (1000, 251.1, False)]
)
def test_a_call_of_ours_may_take_so_much_more_than_a_direct_one(tensors: int, us: float, met: bool) -> None:
    rows = [call(DIRECT, tensors, 1.0), call(OURS, tensors, us), call(CUSTOM_OP, tensors, 1e6)]
    assert list(verdicts("custom_op", "ways", rows).values()) == [met]


def test_every_way_registers_an_operator_that_writes_its_first_list() -> None:
    for name in (OURS, CUSTOM_OP):
        made = list_operators.WAYS[name]()
        assert made([torch.ones(2)], [torch.ones(2)]) is None
    schema = torch.ops.pagedopt.lists_of_nothing.default._schema
    assert [argument.alias_info is not None for argument in schema.arguments] == [True, False]
    assert list_operators.lines_of(DIRECT) < list_operators.lines_of(CUSTOM_OP) < list_operators.lines_of(EXTENSION)


# --- black boxes


@pytest.mark.parametrize("language", pasted_text.LANGUAGES)
def test_a_pasted_text_has_one_load_and_one_store(language: str) -> None:
    one, two = pasted_cases.CASES[pasted_cases.WORKS]
    texts = [pasted_text.text(language, "func", body, torch.float32, torch.float32) for body in (one, two)]
    pasted_lines = pasted_text.paste(*texts)
    assert sum("inp" in line for line in pasted_lines if pasted_text.LOADS.search(line)) == 1
    assert sum(bool(pasted_text.STORES.search(line)) for line in pasted_lines) == 1
    assert any(line.strip().rstrip(";") == "x = y" for line in pasted_lines)
    assert len(pasted_lines) == len(texts[0]) + len(two) + 1


def test_pasting_breaks_where_composed_rules_do_not() -> None:
    works = {case: pasted_cases.as_text(pasted_text.NUMBA, case, CPU)() for case in pasted_cases.CASES}
    right = [case for case, same in works.items() if same]
    assert right == [pasted_cases.WORKS, pasted_cases.LOCAL]
    composed = [case for case in pasted_cases.CASES if case not in (pasted_cases.REDUCTION, pasted_cases.ELSEWHERE)]
    assert all(pasted_cases.as_rules(case, CPU)() for case in composed)


def test_what_is_wrong_without_a_word_is_counted_by_language() -> None:
    def rows(language: str, wrong: int) -> list[dict[str, Any]]:
        found = [pasted.WRONG] * wrong + [pasted.RIGHT] * (7 - wrong)
        return [{"language": language, "case": str(i), "found": each} for i, each in enumerate(found)]

    assert list(verdicts("black_boxes", "pasted", [*rows("Numba", 4), *rows(pasted.RULES, 0)]).values()) == [True, True]
    assert list(verdicts("black_boxes", "pasted", [*rows("Numba", 3), *rows(pasted.RULES, 1)]).values()) == [
        False,
        False,
    ]


def test_an_opaque_operator_is_a_kernel_more_than_inductor_counts_on_a_cpu() -> None:
    row = {"case": opaque.OPAQUE, "device": "cpu", "kernels": 2, "wall": series([1.0], "wall"), "gpu": None}
    on_a_gpu = {**row, "device": "cuda", "kernels": 3}
    assert [each["all"] for each in opaque.derive(Rows([row, on_a_gpu]))] == [3, 3]
    rules = [{**row, "case": opaque.RULES, "kernels": kernels} for kernels in (None, 2)]
    assert [each["all"] for each in opaque.derive(Rows(rules))] == [None, 2]


def test_kernels_that_the_setting_saves() -> None:
    off = {"epilogue": "relu", "setting": epilogues.OFF, "kernels": 2, "right": True}
    on = {**off, "setting": epilogues.ON, "kernels": 1}
    assert [row["saved"] for row in epilogues.derive(Rows([off, on]))] == [0, 1]
    assert set(verdicts("black_boxes", "epilogues", [off, on]).values()) == {True}
    bad = verdicts("black_boxes", "epilogues", [{**off, "right": False}, {**on, "kernels": 2}])
    assert set(bad.values()) == {False}


# --- what is kept


def test_results_that_are_kept_give_their_note_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [judged(name, "cpu") for name in ("custom_op", "black_boxes")] == [5, 7]
    regenerated("custom_op", tmp_path, monkeypatch)
