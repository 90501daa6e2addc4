"""Experiments by their names: what is listed, found, nearly found, and helped with."""

from __future__ import annotations

import re

import pytest
from experiment_runs import experiment

from experiments.__main__ import PAGES
from experiments.__main__ import main as command
from experiments.harness import question


def test_every_experiment_has_a_name_and_a_question() -> None:
    every = question.every()
    names = [experiment.name for experiment in every]
    assert {"fused_step", "pointer_transports", "step_profile", "two_trees"} <= set(names)
    parts = [q.name for experiment in every for q in experiment.questions if q.name not in names]
    assert len({*names, *parts}) == len(names) + len(parts), "a part can be run by its name"
    for each in every:
        assert all("?" in q.title for q in each.questions), each.name
        assert experiment(each.name).name == each.name
    assert question.find("no_such") is None


def test_names_take_dashes_and_unknown_ones_name_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["no_such"]) == 2
    error = capsys.readouterr().err
    assert "fused_step" in error
    assert "did you mean" not in error
    assert error.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        command(["close-to-a-copy", "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "python -m experiments fused_step" in out
    assert "minutes on an H200: 3; GB of device memory: 90" in out
    assert "minutes on two cores: 2; GB of device memory: 0" in experiment("cpu_step").takes
    assert command([]) == 0
    assert "step_profile" in capsys.readouterr().out
    assert all(experiment.takes for experiment in question.every())


@pytest.mark.parametrize(
    ("given", "meant"),
    [("pointers", "pointer_transports"), ("transport", "transports"), ("fused-steps", "fused_step"),
     ("paging", "paged_state"), ("ladder", "optimizer_ladder")],
)  # fmt: skip
def test_a_name_that_is_nearly_one_is_answered(given: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([given]) == 2
    error = capsys.readouterr().err
    _, found, rest = error.partition("(did you mean ")
    assert found
    assert meant in rest.partition("?)")[0].split(" or ")


@pytest.mark.parametrize("page", ["readme", "lecture"])
def test_a_page_has_help_and_no_options(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise AssertionError("the page was made")

    monkeypatch.setattr("experiments.readme.main", fail)
    monkeypatch.setattr("experiments.lecture.page.main", fail)
    for option, status in (("--help", 0), ("--nosuch", 2)):
        with pytest.raises(SystemExit) as ended:
            command([page, option])
        assert ended.value.code == status
    said = capsys.readouterr()
    assert " ".join(PAGES[page][2].split()) in " ".join(said.out.split())
    assert said.err == f"python -m experiments {page}: unrecognized arguments: --nosuch\n"


def test_to_do_all_of_it_is_to_run_each() -> None:
    loop = r"for name in ([^;]*); do\n        python -m experiments \$name --keep"
    (listed,) = re.findall(loop, question.README.read_text())
    assert sorted(listed.replace("\\", "").split()) == [experiment.name for experiment in question.every()]
