"""Files that `plan` reads, of wrong or odd contents: one line and exit status 2, or right numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pagedopt import Rates
from pagedopt.commands.main import main


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", *options]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1, error
    return error


def header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text.ljust(1)


def rates(**more: Any) -> str:
    return json.dumps({"bytes_per_second": {"up": 1e9, "down": 1e9, "both": 2e9, "device": 1e12}, **more})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((rates(versions=versions), "versions are a") for versions in (1, True, "x", [1])),
        (rates(bytes_per_second={"up": 10**400}), "rate up is 1000"),
        ('{"bytes_per_second": {"up": 1' + "0" * 5000 + "}}", "not JSON (Exceeds the limit"),
        ("[" * 100_000, "not JSON"),
    ],
    ids=lambda value: value[:40],
)
def test_rates_of_wrong_contents_are_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.json"
    path.write_text(content)
    error = refused(capsys, "--params", "7B", "--rates", str(path))
    assert error.startswith(f"pagedopt plan: --rates {path}: {said}")
    assert "sys." not in error
    if "Exceeds" not in said and "[[" not in content:
        assert said in refused(capsys, "--params", "7B", "--budget", f"20 ms by {path}")


@pytest.mark.parametrize(
    ("machine", "shown"), [("CPU [/rev 2]", "CPU [/rev 2]"), ("ACME [rev 2] CPU", "ACME [rev 2] CPU"), ("\ud800", "?")]
)
def test_a_machine_may_be_called_anything(
    machine: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.json"
    path.write_text(rates(machine=machine))
    assert main(["plan", "--params", "7B", "--rates", str(path)]) == 0
    assert f"Rates of {shown}." in capsys.readouterr().out
    assert Rates.load(path).machine == shown


def test_a_model_of_complex_numbers_has_state_of_real_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"a": {"dtype": "C64", "shape": [1000, 1000], "data_offsets": [0, 0]}}))
    assert main(["plan", "--model", str(path), "--json", "--rates", str(wrote(tmp_path))]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][-1]
    assert (row["parameters"], row["param_bytes"], row["state_bytes"]) == (
        10**6,
        8 * 10**6,
        pytest.approx(16e6, rel=0.1),
    )
    assert main(["plan", "--model", str(path), "--rates", str(wrote(tmp_path))]) == 0
    assert "their own dtype (complex64)" in capsys.readouterr().out


def wrote(folder: Path) -> Path:
    path = folder / "rates.json"
    path.write_text(rates())
    return path


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    for where in (tmp_path, tmp_path / "x.safetensors"):
        assert "a pipe, a device or a folder" in refused(capsys, "--model", str(where))


def test_a_model_beyond_all_models_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"a": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 0]}}))
    assert "1.13e+15 parameters; at most 1e+14" in refused(capsys, "--model", str(path))
    assert "between 1 and 1e+14" in refused(capsys, "--params", "1e15")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_listed_is_not_called_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o300)
    assert "Permission denied" in refused(capsys, "--model", str(closed))


def test_a_budget_of_endless_digits_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--params", "7B", "--budget", "1" * 5000)
    assert error.startswith("pagedopt plan: --budget ")
    assert "sys." not in error
