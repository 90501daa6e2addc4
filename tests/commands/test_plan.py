"""`python -m pagedopt plan`: a table of budgets, or the same as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Program, assert_has, safetensors

from pagedopt import Rates, estimate
from pagedopt.commands import plan_rows
from pagedopt.planning import rates
from pagedopt.system import host, machine

CPU = torch.device("cpu")
HAND = Rates(device=1e12, up=1e9, down=1e9, both=2e9, in_place=1e9, ram=1e10, machine="a machine of mine")


@pytest.fixture
def rated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Program:
    """Plans by those rates."""
    HAND.save(tmp_path / "rates.json")
    return Program(capsys, "plan", "--rates", tmp_path / "rates.json")


def test_budgets_from_nothing_to_all_and_ones_own(rated: Program) -> None:
    content = rated.reports("--params", "1B", "--budget", "3GiB")
    rows = content["rows"]
    state = rows[0]["state_bytes"]
    assert state == pytest.approx(8e9, rel=1e-3)
    assert [row["budget"] for row in rows] == [0, state // 4, 3 << 30, state // 2, state * 3 // 4, state]
    assert content["rates"] == HAND.as_dict()
    assert [row["asked"] for row in rows] == [None, None, "--budget 3GiB", None, None, None]
    for row in rows:
        said = estimate("1B", device_budget=row["budget"], rates=HAND).as_dict()
        said.pop("rates")
        assert {name: row[name] for name in said} == said
    assert rows[-1]["by_place"].keys() == {"device"}
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)


def test_the_table_says_it_in_words_and_marks_what_was_asked_for(rated: Program) -> None:
    text = rated.says("--params", "7B", "--param-dtype", "bfloat16", "--budget", "2GiB")
    for part in ("7.00 B parameters in bfloat16", "13.0 GiB", "26.1 GiB", "placement mapped", "staged",
                 "a machine of mine", "activations"):  # fmt: skip
        assert part in text, part
    assert "assumed" not in text
    table = re.findall(r"^[│┃┏└].*$", text, re.MULTILINE)
    assert max(map(len, table)) <= 80
    (marked,) = [line for line in table if "→" in line]
    assert re.match(r"│\s+→ 2.00 GiB │\s+24.1 GiB │\s+28.1 GiB │", marked)
    assert re.search(r"→ --budget 2GiB: device_budget='2048MiB'; a step is \S+ m?s longer than with all state", text)


MIB = 1 << 20
TIMES: list[tuple[str, float, dict[str, str]]] = [
    ("50 ms", 0.05, {"state_format": "int8"}),
    ("1 s", 1.0, {"device": "cpu"}),
]


@pytest.mark.parametrize(("longest", "seconds", "options"), TIMES)
def test_a_time_finds_the_least_budget_that_keeps_it(
    longest: str, seconds: float, options: dict[str, Any], rated: Program, tmp_path: Path
) -> None:
    (known := replace(HAND, file_read=2e9, file_write=1e9)).save(tmp_path / "rates.json")
    named = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    *rows, near = rated.reports("--params", "1B", "--time", longest, *named)["rows"]
    budget = near["budget"]  # of a time in which not one page comes and goes
    for row in rows:
        if row["asked"] == f"--time {longest}":
            assert row["seconds"] - near["seconds"] <= seconds
            budget = row["budget"]
    less = estimate("1B", device_budget=budget - 9 * MIB, rates=known, **options)  # a page less, and it takes too long
    assert (less.seconds or 0) - near["seconds"] > seconds


def test_a_time_prints_the_bytes_to_write(rated: Program) -> None:
    """By hand: a page of 16 MiB alone takes 16.8 ms up and as much down; a second one passes it in 16.8 ms more."""
    said = rated.says("--params", "1B", "--time", "60ms")
    (row,) = [row for row in rated.reports("--params", "1B", "--time", "60ms")["rows"] if row["asked"]]
    assert row["away_bytes"] == pytest.approx(32 * MIB, rel=1e-3)
    written = f"device_budget='{row['budget'] // MIB}MiB'"
    assert f"→ --time 60ms: {written}; a step is 50.2 ms longer than with all state on device.\n" in said
    assert "device_budget='all'" in rated.says("--params", "1B", "--time", "1us")


def test_a_time_for_which_there_are_no_rates_is_refused_with_their_names(rated: Program, tmp_path: Path) -> None:
    replace(HAND, up=None).save(tmp_path / "rates.json")
    said = rated.refuses_in_a_line("--params", "1B", "--time", "50ms")
    assert said == "pagedopt plan: --time 50ms: a machine of mine has no rates up; give --rates FILE\n"
    for wrong in ("2", "0 ms", "soon", "-1 s"):
        assert f"--time is '{wrong}'; give a time" in rated.refuses("--params", "1B", f"--time={wrong}")


def test_a_card_finds_the_largest_budget_that_fits(rated: Program) -> None:
    asked = ("--params", "2B", "--card", "24GB")
    rows = rated.reports(*asked)["rows"]
    assert [row["fits"] for row in rows] == [row["near_bytes"] <= 24e9 for row in rows]
    (row,) = [row for row in rows if row["asked"] == "--card 24GB"]
    assert row["near_bytes"] == 8 * 2e9 + row["ring"] + row["by_place"]["device"]  # 8 bytes: a parameter and a gradient
    assert row["near_bytes"] <= 24e9 < row["near_bytes"] + 17 * MIB  # a page
    assert f"→ --card 24GB: device_budget='{row['budget'] // MIB}MiB'" in rated.says(*asked)
    assert "→ --card 100GB: device_budget='all'" in rated.says("--params", "2B", "--card", "100GB")


#: Of a thousand million parameters 4 GB in float32, 4 of gradients, 8 of state, 64 MiB of slots; gradients within the
#: backward 512 MiB; in 16 bits with state in 8 2 GB, 65 MiB and 512 MiB.
WRITTEN = [
    ("17GB", "→ no device_budget: 14.9 GiB."),
    ("9GB", "→ this device_budget, then optimizer.attach(model), which hides the update under the forward: 7.51 GiB."),
    ("8GB", "→ device_budget=0, then optimizer.attach(model, overlap='backward') (no clipping, one backward a step): "
            "4.29 GiB."),
    ("4GB", "→ bfloat16 parameters, device_budget=0, state_format='int8', optimizer.attach(model, overlap='backward') "
            "(no clipping, one backward a step): 2.43 GiB."),
    ("2GB", "Nothing fits: in bfloat16, with state in 8 bits, it takes 2.43 GiB."),
]  # fmt: skip


@pytest.mark.parametrize(("card", "written"), WRITTEN)
def test_a_card_names_the_first_way_that_fits(card: str, written: str, rated: Program) -> None:
    said = rated.says("--params", "1B", "--card", card)
    assert (
        f"--card {card}: without activations it takes 14.9 GiB with all state on device, 7.51 GiB with device_budget=0"
        f", and 4.29 GiB if it is also updated within the backward, which frees gradients.\n{written}\n"
    ) in said


@pytest.mark.parametrize("placement", ["device", "host", "managed-driver"])
def test_a_placement_without_budgets_has_one_row(placement: str, rated: Program) -> None:
    rows = rated.reports("--params", "1B", "--placement", placement)["rows"]
    assert [row["placement"] for row in rows] == [placement]
    assert "--card" not in rated.says("--params", "1B", "--placement", placement, "--card", "1GB")
    assert list(rows[0]["by_place"]) == ["host" if placement == "host" else "device"]


def test_options_reach_the_estimate(rated: Program) -> None:
    options = ["--placement", "mapped", "--host-access", "in_place", "--rule", "adamw_amsgrad", "--state-format",
               "bfloat16", "--param-dtype", "float32", "--params", "1B"]  # fmt: skip
    row = rated.reports(*options)["rows"][0]
    assert (row["host_access"], row["ring"]) == ("in_place", 0)
    assert row["state_bytes"] == pytest.approx(6e9, rel=1e-3)
    assert row["param_bytes"] == 4e9
    assert row["seconds"] == pytest.approx(12, rel=1e-3)
    (row, *_) = rated.reports("--params", "1B", "--param-format", "bfloat16+8", "--state-format", "int8")["rows"]
    assert row["state_bytes"] == pytest.approx(3.03e9, rel=2e-3)
    assert row["param_bytes"] == 2e9


def test_without_a_gpu_nothing_is_measured_and_the_plan_says_so(plan: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rates, "measure", lambda *_: pytest.fail("measured"))
    content = plan.reports("--params", "1B")
    assert (content["rates"]["assumed"], content["room"]) == (True, {})
    assert {row["fits"] for row in content["rows"]} == {None}
    text = plan.says("--params", "1B")
    assert_has(text, "assumed: not measured here", "--rates FILE")
    assert "fits" not in text


def test_on_a_cpu_this_machine_is_measured_and_its_memory_compared(
    plan: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"ram": 1e9, "file_read": 1e9, "file_write": 1e9}
    monkeypatch.setattr(rates, "measure", lambda device: mine if device == CPU else pytest.fail(str(device)))
    monkeypatch.setattr(host, "available", lambda: 11_000_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**12))
    rows = plan.reports("--params", "1B", "--device", "cpu")["rows"]
    assert [row["fits"] for row in rows] == [True, True, False, False, False]  # 8 GB beside 0 … 8 GB of state
    assert rows[-1]["short"] == {"host": pytest.approx(5e9, rel=1e-3)}
    assert rows[0]["by_place"].keys() == {"file"}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=7_000_000_000))
    rows = plan.reports("--params", "1B", "--device", "cpu")["rows"]
    assert [row["fits"] for row in rows] == [False, True, False, False, False]
    text = plan.says("--params", "1B", "--device", "cpu")
    assert_has(text, "no: host", machine.processor(), "on file")


def test_on_a_gpu_both_sides_are_compared() -> None:
    row = estimate("1B", device_budget=0, rates=HAND)
    room = {"device": 9 * 10**9, "host": 10**9}
    assert plan_rows.short(row, room) == {"host": row.away_bytes - 10**9}
    assert plan_rows.short(row, {"device": 10**9, "host": 9 * 10**9}) == {"device": row.near_bytes - 10**9}
    assert plan_rows.short(row, {"device": 10**12, "host": 10**12}) == {}


BAD_INPUT = [
    (["--params", "lots"], "--params 'lots'; give a number of parameters, as 7000000000, 7e9, 7B or 124M"),
    (["--params", "7B", "--budget", "much"], "--budget 'much'; give bytes"),
    (["--params", "7B", "--budget", "50"], "--budget '50': 50 bytes hold no page; did you mean '50%' or '50GiB'?"),
    (["--params", "7B", "--budget", "auto"], "--budget 'auto', which is read from the device as training goes; give"),
    (["--params", "7B", "--budget", "20 ms"], "--budget '20 ms', a time; `pagedopt plan --time 20ms --params N` pri"),
    (["--params", "7B", "--my-step", "350ms"], "--my-step is gone; --time 20ms finds the budget with which a step is"),
    (["--params", "7B", "--card", "big"], "--card is 'big'; give bytes, or a number with kB, MB"),
    (["--params", "7B", "--placement", "device", "--time", "1s"], "--budget 0 with --placement 'device', where all"),
    (["--params", "7B", "--placement", "device", "--budget", "8k"], "--budget '8k' with --placement 'device'"),
    (["--params", "7B", "--placement", "managed", "--host-access", "staged"], "--host-access 'staged' with"),
    (["--params", "7B", "--state-format", "int3"], "--state-format 'int3'; there are"),
    (["--params", "7B", "--rates", "/nowhere/rates.json"], "--rates /nowhere/rates.json: No such file"),
]


@pytest.mark.parametrize(("options", "text"), BAD_INPUT)
def test_bad_input_is_refused_in_a_line_before_anything_is_measured(
    options: list[str], text: str, plan: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    complaint = plan.refuses_in_a_line(*options)
    assert text in complaint
    assert complaint.startswith("pagedopt plan: ")


NO_RATES = {
    "": "not JSON",
    "[1, 2]": "there are no rates in it; `python -m pagedopt doctor --json` writes such a file (",
    '{"bytes_per_second": {"up": "fast"}}': "(rate up is 'fast'",
    '{"bytes_per_second": {"sideways": 1}}': "unexpected keyword argument 'sideways'",
    '{"bytes_per_second": {"up": 1' + "0" * 400 + "}}": "(rate up is 1000",
    '{"bytes_per_second": {"up": 1' + "0" * 5000 + "}}": "not JSON (Exceeds the limit",
    "[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("content", "text"), NO_RATES.items(), ids=lambda text: text[:40])
def test_files_that_hold_no_rates_are_refused(content: str, text: str, tmp_path: Path, plan: Program) -> None:
    (path := tmp_path / "rates.json").write_text(content)
    said = plan.refuses_in_a_line("--params", "7B", "--rates", path)
    assert said.startswith(f"pagedopt plan: --rates {path}: ")
    assert text in said
    assert "sys." not in said


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
    ("make", "text"),
    [(os.mkfifo, "no regular file, but a pipe"), (zeros, "no regular file"), (Path.mkdir, "Is a directory"),
     (huge, "more than 1,048,576 bytes")],
)  # fmt: skip
def test_what_is_no_small_file_is_not_read(
    make: Callable[[Path], None], text: str, tmp_path: Path, plan: Program
) -> None:
    """A pipe would have nobody to write, and a device would never end."""
    make(tmp_path / "rates")
    assert_has(plan.refuses_in_a_line("--params", "7B", "--rates", tmp_path / "rates"), text, str(tmp_path / "rates"))


def test_unknown_times_say_what_for_want_of(plan: Program, tmp_path: Path) -> None:
    """As of a laptop: `doctor --json > f; plan --rates f`."""
    laptop = Rates(ram=1e10, file_read=1e9, machine="a laptop")
    (tmp_path / "f").write_text(json.dumps({"rates": laptop.as_dict(), "problems": []}))
    for options, lacking in [
        ([], "no device, up, down, both, which parameters on cuda need"),
        (["--host-access", "in_place"], "no device, in_place, which"),
        (["--device", "cpu"], "no file_write, which parameters on cpu need"),
    ]:
        out = plan.says("--params", "1B", "--rates", tmp_path / "f", *options)
        assert f"Times are unknown: they have {lacking}" in out
    known = ("--device", "cpu", "--placement", "host")
    assert "unknown" not in plan.says("--params", "1B", "--rates", tmp_path / "f", *known)


def test_a_model_in_safetensors_is_read_by_its_header(rated: Program, tmp_path: Path) -> None:
    """Files as the format's description has them: no more than the header is there."""
    weight = {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}
    counter = {"dtype": "I64", "shape": [], "data_offsets": [28, 36]}
    shards: list[dict[str, Any]] = [
        {"a": {"dtype": "BF16", "shape": [1000, 300], "data_offsets": [0, 600000]}, "__metadata__": {"format": "pt"}},
        {"b": weight, "n": counter},
    ]
    paths = [tmp_path / f"model-{number}.safetensors" for number in range(2)]
    for path, tensors in zip(paths, shards, strict=True):
        path.write_bytes(safetensors(tensors))
    (row, *_) = rated.reports("--model", *paths)["rows"]
    sizes = (300_008, 600_000 + 28 + 8, 600_000 + 28)  # integers are not trained
    assert (row["parameters"], row["param_bytes"], row["grad_bytes"]) == sizes
    assert "300 k parameters in their own dtypes: " in rated.says("--model", *paths)
    (same, *_) = rated.reports("--model", tmp_path)["rows"]
    assert same == row


UNTRAINABLE = [
    ({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, "state 'exp_avg' is torch.float8_e4m3fn; supp"),
    ({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, "tensor 'w' has dtype 'F4'; known are F64,"),
    ({"__metadata__": {"format": "pt"}}, "there are no tensors in it"),
]


@pytest.mark.parametrize(("tensors", "said"), UNTRAINABLE)
def test_a_tensor_that_cannot_be_trained_is_refused(
    tensors: dict[str, Any], said: str, rated: Program, tmp_path: Path
) -> None:
    path, known = tmp_path / "x.safetensors", "is torch" in said
    path.write_bytes(safetensors(tensors))
    assert said in rated.refuses("--model", path)
    assert rated.run("--model", path, "--param-dtype", "bfloat16")[0] == (0 if known else 2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
        (30).to_bytes(8, "little") + b'{"a":{"shape":[-1,2],"dtype":"F32"}}'[:36].ljust(40),
        (42).to_bytes(8, "little") + b'{"a":{"shape":[1,2],"dtype":"NO_SUCH"}}'.ljust(42),
    ],
)
def test_files_that_are_no_safetensors_are_refused(content: bytes, plan: Program, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    for where in (path, tmp_path / "missing", tmp_path):
        assert plan.refuses_in_a_line("--model", where).startswith(f"pagedopt plan: --model {where}: ")


@pytest.mark.parametrize("options", [(), ("--params", "1B", "--size", "gpt2")], ids=["nothing", "both"])
def test_it_wants_to_know_what_to_train(options: tuple[str, ...], plan: Program) -> None:
    assert "--size" in plan.exits(*options)[1]


# --- files that `plan` reads, of wrong or odd contents: one line and exit status 2, or right numbers ------------------


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
