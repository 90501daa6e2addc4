"""Files that `plan` reads, of wrong or odd contents: one line and exit status 2, or right numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import Program, safetensors

from pagedopt import Rates


def rates(**more: Any) -> str:
    return json.dumps({"bytes_per_second": {"up": 1e9, "down": 1e9, "both": 2e9, "device": 1e12}, **more})


def wrote(folder: Path, **more: Any) -> Path:
    (path := folder / "rates.json").write_text(rates(**more))
    return path


NAMES = {"CPU [/rev 2]": "CPU [/rev 2]", "ACME [rev 2] CPU": "ACME [rev 2] CPU", "\ud800": "?"}


@pytest.mark.parametrize(("machine", "shown"), NAMES.items())
def test_a_machine_may_be_called_anything(machine: str, shown: str, tmp_path: Path, plan: Program) -> None:
    path = wrote(tmp_path, machine=machine)
    assert f"Rates of {shown}." in plan.says("--params", "7B", "--rates", path)
    assert Rates.load(path).machine == shown


def test_a_model_of_complex_numbers_has_state_of_real_ones(tmp_path: Path, plan: Program) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors({"a": {"dtype": "C64", "shape": [1000, 1000], "data_offsets": [0, 0]}}))
    row = plan.reports("--model", path, "--rates", wrote(tmp_path))["rows"][-1]
    assert (row["parameters"], row["param_bytes"]) == (10**6, 8 * 10**6)
    assert row["state_bytes"] == pytest.approx(16e6, rel=0.1)
    assert "their own dtypes" in plan.says("--model", path, "--rates", wrote(tmp_path))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, plan: Program) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    for where in (tmp_path, tmp_path / "x.safetensors"):
        assert "a pipe, a device or a folder" in plan.refuses_in_a_line("--model", where)


def test_a_model_beyond_all_models_is_refused_at_once(tmp_path: Path, plan: Program) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors({"a": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 0]}}))
    assert "1.13e+15 parameters; at most 1e+14" in plan.refuses_in_a_line("--model", path)
    assert "between 1 and 1e+14" in plan.refuses_in_a_line("--params", "1e15")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_listed_is_not_called_empty(tmp_path: Path, plan: Program) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o300)
    assert "Permission denied" in plan.refuses_in_a_line("--model", closed)


def test_a_budget_of_endless_digits_is_a_line(plan: Program) -> None:
    error = plan.refuses_in_a_line("--params", "7B", "--budget", "1" * 5000)
    assert error.startswith("pagedopt plan: --budget ")
    assert "sys." not in error
