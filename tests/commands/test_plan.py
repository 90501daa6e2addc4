"""`python -m pagedopt plan`: a table of budgets, or the same as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import refused

from pagedopt import Rates, estimate
from pagedopt.commands import plan
from pagedopt.commands.main import main
from pagedopt.common.units import text_of_bytes
from pagedopt.paging import policy
from pagedopt.planning import rates
from pagedopt.planning.sizes import SIZES, parameter_count
from pagedopt.system.files import host

HAND = Rates(device=1e12, up=1e9, down=1e9, both=2e9, in_place=1e9, ram=1e10, machine="a machine of mine")


@pytest.fixture
def file(tmp_path: Path) -> str:
    HAND.save(tmp_path / "rates.json")
    return str(tmp_path / "rates.json")


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """What the command prints as JSON; NaN and Infinity are not JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the plan")

    assert main(["plan", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


@pytest.mark.parametrize(("given", "share"), [("30%", 0.3), ("all", 1)])
def test_ones_own_budget_may_be_a_share(
    given: str, share: float, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    rows = planned(capsys, "--params", "1B", "--budget", given, "--rates", file)["rows"]
    state = rows[-1]["state_bytes"]
    shares = sorted({0, 0.25, 0.5, 0.75, 1, share})
    assert [row["budget"] for row in rows] == [pytest.approx(each * state, abs=1) for each in shares]


def test_budgets_from_nothing_to_all_and_ones_own(capsys: pytest.CaptureFixture[str], file: str) -> None:
    content = planned(capsys, "--params", "1B", "--budget", "3GiB", "--rates", file)
    rows = content["rows"]
    state = rows[0]["state_bytes"]
    assert state == pytest.approx(8e9, rel=1e-3)
    assert [row["budget"] for row in rows] == [0, state // 4, 3 << 30, state // 2, state * 3 // 4, state]
    assert content["rates"] == HAND.as_dict()
    for row in rows:
        said = estimate("1B", device_budget=row["budget"], rates=HAND).as_dict()
        said.pop("rates")
        assert {name: row[name] for name in said} == said
    assert rows[-1]["by_place"].keys() == {"device"}
    assert [row["seconds"] for row in rows] == sorted((row["seconds"] for row in rows), reverse=True)


def test_the_table_says_it_in_words(capsys: pytest.CaptureFixture[str], file: str) -> None:
    assert main(["plan", "--params", "7B", "--param-dtype", "bfloat16", "--budget", "2GiB", "--rates", file]) == 0
    text = capsys.readouterr().out
    for part in ("7.00 B parameters in bfloat16", "13.0 GiB", "26.1 GiB", "placement mapped", "staged", "2.00 GiB",
                 "a machine of mine", "activations"):  # fmt: skip
        assert part in text, part
    assert "assumed" not in text
    assert max(map(len, re.findall(r"^[│┃┏└].*$", text, re.MULTILINE))) <= 80


def test_sizes_are_those_that_train_trains(capsys: pytest.CaptureFixture[str], file: str) -> None:
    for name, size in SIZES.items():
        rows = planned(capsys, "--size", name, "--rates", file)["rows"]
        assert rows[0]["parameters"] == parameter_count(size, size.block)


@pytest.mark.parametrize("placement", ["device", "host", "managed-driver"])
def test_a_placement_without_budgets_has_one_row(placement: str, capsys: pytest.CaptureFixture[str], file: str) -> None:
    rows = planned(capsys, "--params", "1B", "--placement", placement, "--rates", file)["rows"]
    assert [row["placement"] for row in rows] == [placement]
    assert list(rows[0]["by_place"]) == ["host" if placement == "host" else "device"]


def test_options_reach_the_estimate(capsys: pytest.CaptureFixture[str], file: str) -> None:
    options = ["--placement", "mapped", "--host-access", "in_place", "--rule", "adamw_amsgrad", "--state-format",
               "bfloat16", "--param-dtype", "float32", "--params", "1B", "--rates", file]  # fmt: skip
    row = planned(capsys, *options)["rows"][0]
    assert (row["host_access"], row["ring"]) == ("in_place", 0)
    assert row["state_bytes"] == pytest.approx(6e9, rel=1e-3)
    assert row["param_bytes"] == 4e9
    assert row["seconds"] == pytest.approx(12, rel=1e-3)


def test_without_a_gpu_nothing_is_measured_and_the_plan_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rates, "measure", lambda *_: pytest.fail("measured"))
    content = planned(capsys, "--params", "1B")
    assert content["rates"]["assumed"] is True
    assert content["room"] == {}
    assert {row["fits"] for row in content["rows"]} == {None}
    assert main(["plan", "--params", "1B"]) == 0
    text = capsys.readouterr().out
    assert "assumed: not measured here" in text
    assert "--rates FILE" in text
    assert "fits" not in text


def test_on_a_cpu_this_machine_is_measured_and_its_memory_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Rates(ram=1e9, file_read=1e9, file_write=1e9, machine="this one")
    monkeypatch.setattr(rates, "measure", lambda device: mine if device == "cpu" else pytest.fail(str(device)))
    monkeypatch.setattr(host, "available", lambda: 11_000_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**12))
    rows = planned(capsys, "--params", "1B", "--device", "cpu")["rows"]
    assert [row["fits"] for row in rows] == [True, True, False, False, False]  # 8 GB beside 0 … 8 GB of state
    assert rows[-1]["short"] == {"host": pytest.approx(5e9, rel=1e-3)}
    assert rows[0]["by_place"].keys() == {"file"}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=7_000_000_000))
    rows = planned(capsys, "--params", "1B", "--device", "cpu")["rows"]
    assert [row["fits"] for row in rows] == [False, True, False, False, False]
    assert main(["plan", "--params", "1B", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "no: host" in text
    assert "this one" in text
    assert "on file" in text


def test_on_a_gpu_both_sides_are_compared() -> None:
    row = estimate("1B", device_budget=0, rates=HAND)
    room = {"device": 9 * 10**9, "host": 10**9}
    assert plan.short(row, room) == {"host": row.away_bytes - 10**9}
    assert plan.short(row, {"device": 10**9, "host": 9 * 10**9}) == {"device": row.near_bytes - 10**9}
    assert plan.short(row, {"device": 10**12, "host": 10**12}) == {}


def test_what_auto_would_give_is_planned_where_the_device_is(
    capsys: pytest.CaptureFixture[str], file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100 << 30
    monkeypatch.setattr(host, "available", lambda: free)
    asked = ("--params", "7B", "--param-dtype", "bfloat16", "--device", "cpu", "--rates", file, "--budget", "auto")
    rows = planned(capsys, *asked)["rows"]
    wanted = policy.spare_bytes(free, 0, free - 4 * 7 * 10**9, 0, 0)
    assert wanted < free - 28 * 10**9
    (own,) = [row for row in rows if row["budget"] in (wanted, row["state_bytes"])][:1]
    assert own["budget"] == min(wanted, own["state_bytes"])
    assert main(["plan", *asked]) == 0
    assert f"--budget auto: {text_of_bytes(wanted)} here, now" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "--params", "7B", "--rates", file, "--budget", "auto"]) == 2
    assert "--budget auto: it is read from the device, and there is no GPU here" in capsys.readouterr().err


def test_a_doctors_report_serves_as_rates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "there.json"
    report.write_text(json.dumps({"rates": replace(HAND, up=None).as_dict(), "problems": []}))
    content = planned(capsys, "--params", "1B", "--rates", str(report))
    assert content["rates"]["machine"] == "a machine of mine"
    assert content["rows"][0]["seconds"] is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--params", "lots"], "--params 'lots'; give a number of parameters, as 7000000000, 7e9, 7B or 124M"),
        (["--params", "0"], "--params 0; it must be between 1 and"),
        (["--params", "7B", "--budget", "much"], "--budget 'much'; give bytes"),
        (["--params", "7B", "--budget", "150%"], "--budget '150%'; give a share of the state from '0%' to '100%'"),
        (["--params", "7B", "--placement", "moon"], "--placement 'moon'; there are"),
        (["--params", "7B", "--placement", "file"], "--placement 'file' is for parameters on a CPU"),
        (["--params", "7B", "--placement", "device", "--budget", "1k"], "--budget '1k' with --placement 'device'"),
        (["--params", "7B", "--placement", "managed", "--host-access", "staged"], "--host-access 'staged' with"),
        (["--params", "7B", "--state-format", "int3"], "--state-format 'int3'; there are"),
        (["--params", "7B", "--param-dtype", "int3"], "--param-dtype 'int3'; there are"),
        (["--params", "7B", "--rule", "adem"], "--rule 'adem'; there are"),
        (["--params", "7B", "--rates", "/nowhere/rates.json"], "--rates /nowhere/rates.json: No such file"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_a_line_before_anything_is_measured(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["plan", *options]) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert err.startswith("pagedopt plan: ")
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "not JSON"),
        ("[1, 2]", "there are no rates in it"),
        ('{"bytes_per_second": {"up": -1}}', "rate up is -1"),
        ('{"bytes_per_second": {"up": "fast"}}', "rate up is 'fast'"),
        ('{"bytes_per_second": {"sideways": 1}}', "unknown rates sideways"),
        ('{"rates": null, "problems": []}', "there are no rates in it"),
    ],
)
def test_files_that_hold_no_rates_are_refused(
    content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rates.json").write_text(content)
    err = refused(capsys, "plan", "--params", "7B", "--rates", str(tmp_path / "rates.json"))
    assert text in err
    assert "rates.json" in err


def test_unknown_times_say_what_for_want_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As of a laptop: `doctor --json > f; plan --rates f`."""
    laptop = Rates(ram=1e10, file_read=1e9, machine="a laptop")
    (tmp_path / "f").write_text(json.dumps({"rates": laptop.as_dict(), "problems": []}))
    for options, lacking in [
        ([], "no device, up, down, both, which parameters on cuda need"),
        (["--host-access", "in_place"], "no device, in_place, which"),
        (["--device", "cpu"], "no file_write, which parameters on cpu need"),
    ]:
        assert main(["plan", "--params", "1B", "--rates", str(tmp_path / "f"), *options]) == 0
        out = capsys.readouterr().out
        assert f"Times are unknown: these rates have {lacking}" in out
        assert "unknown" in out
    assert (
        main(["plan", "--params", "1B", "--rates", str(tmp_path / "f"), "--device", "cpu", "--placement", "host"]) == 0
    )
    assert "unknown" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 70, 80])
@pytest.mark.parametrize("options", [[], ["--my-step", "350 ms"], ["--device", "cpu"]], ids=str)
def test_units_stay_on_narrow_terminals(
    width: int, options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace(HAND, file_read=1e9, file_write=1e9).save(tmp_path / "r.json")
    monkeypatch.setattr(plan, "find_room", lambda _: {"device": 10**10, "host": 10**10, "file": 10**10})

    def cells(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["plan", "--params", "7B", "--rates", str(tmp_path / "r.json"), *options]) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
        assert all(len(row) <= width for row in rows)
        return sorted(word for row in rows for word in re.findall(r"[^\s│]+", row))

    assert cells(width) == cells(300)


def test_a_step_of_ones_own_is_compared_with(capsys: pytest.CaptureFixture[str], file: str) -> None:
    assert main(["plan", "--params", "1B", "--my-step", "2 s", "--rates", file]) == 0
    found = re.findall(r"\+([\d.]+) %", capsys.readouterr().out)
    seconds = [row["seconds"] for row in planned(capsys, "--params", "1B", "--rates", file)["rows"]]
    assert [float(n) for n in found] == [pytest.approx(50 * (s - seconds[-1]), rel=0.05, abs=0.5) for s in seconds]
    assert main(["plan", "--params", "1B", "--my-step", "20 ms", "--rates", file]) == 0
    assert re.search(rf"×{1 + (seconds[0] - seconds[-1]) / 0.02:.0f}\b", capsys.readouterr().out)
    for wrong in ("2", "0 ms", "soon", "-1 s"):
        assert f"--my-step '{wrong}'; give a time" in refused(capsys, "plan", "--params", "1B", f"--my-step={wrong}")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_budgets_that_fit_are_named_and_do(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    near, away = ("host", "file") if device == "cpu" else ("device", "host")
    options = ["--params", "100M", "--device", device, "--rates", file]  # 400 MB, gradients, 800 MB of state
    for room, expected in [
        ({near: 10**10, away: 10**10}, "from 0 B to all"),
        ({near: 10**10, away: 0}, "from 76[34]MiB to all"),
        ({near: 1_300_000_000, away: 500_000_000}, r"from (28\d|29\d|30\d)MiB to (4\d\d)MiB"),
        ({near: 10**8, away: 10**10}, "none"),
    ]:
        monkeypatch.setattr(plan, "find_room", lambda _, room=room: room)
        assert main(["plan", *options]) == 0
        text = capsys.readouterr().out
        assert re.search(f"Budgets that fit here, now: {expected}\\.", text), text
        found = planned(capsys, *options)["fitting_budgets"]
        assert (found is None) == (expected == "none")
        for budget in found or ():
            row = next(r for r in planned(capsys, *options, "--budget", str(budget))["rows"] if r["budget"] == budget)
            assert row["fits"], (room, budget)
        if found and found[1] < 800_000_000:
            row = estimate("100M", device_budget=found[1] + 64 * 2**20, device=device, rates=HAND)
            assert plan.short(row, room)


def test_a_model_in_safetensors_is_read_by_its_header(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str
) -> None:
    """Files as the format's description has them: no more than the header is there."""
    shards = [
        {"a": {"dtype": "BF16", "shape": [1000, 300], "data_offsets": [0, 600000]}, "__metadata__": {"format": "pt"}},
        {
            "b": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]},
            "n": {"dtype": "I64", "shape": [], "data_offsets": [28, 36]},
        },
    ]
    paths = []
    for number, header in enumerate(shards):
        text = json.dumps(header).encode()
        paths.append(tmp_path / f"model-{number}.safetensors")
        paths[-1].write_bytes(len(text).to_bytes(8, "little") + text)
    (row, *_) = planned(capsys, "--model", *map(str, paths), "--rates", file)["rows"]
    assert row["parameters"] == 300_008
    assert row["param_bytes"] == 600_000 + 28 + 8
    assert row["grad_bytes"] == 600_000 + 28  # integers are not trained
    assert main(["plan", "--model", str(paths[0]), "--rates", file]) == 0
    assert "300 k parameters in their own dtype (bfloat16): " in capsys.readouterr().out
    assert main(["plan", "--model", *map(str, paths), "--rates", file]) == 0
    assert "300 k parameters in their own dtypes (bfloat16, float32): " in capsys.readouterr().out
    (same, *_) = planned(capsys, "--model", str(tmp_path), "--rates", file)["rows"]
    assert same == row


def test_a_folder_without_safetensors_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--model", str(tmp_path)]) == 2
    expected = f"pagedopt plan: --model {tmp_path}: there is no *.safetensors in this folder\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prose_is_broken_between_words_on_a_terminal_and_whole_elsewhere(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(plan, "find_room", lambda _: {"device": 10**10, "host": 10**10, "file": 10**10})
    options = ["plan", "--params", "1B", "--device", device, "--rates", file]
    assert main(options) == 0
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 100
    assert ("ring" in whole) == (device == "cuda")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert main(options) == 0
    broken = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, broken.splitlines())) <= 60
    assert broken.split() == whole.split()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, "tensor 'w' is torch.float8_e4m3fn; supp"),
        ({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, "tensor 'w' has dtype 'F4'; known are F64,"),
        ({"__metadata__": {"format": "pt"}}, "there are no tensors in it"),
    ],
)
def test_a_tensor_that_cannot_be_trained_is_named(
    header: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str
) -> None:
    path, text = tmp_path / "x.safetensors", json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    err = refused(capsys, "plan", "--model", str(path), "--rates", file)
    assert err.startswith(f"pagedopt plan: --model {path}: {said}" if "is torch" in said else "pagedopt plan: --model ")
    assert said in err
    assert main(["plan", "--model", str(path), "--rates", file, "--param-dtype", "bfloat16"]) == (
        0 if "is torch" in said else 2
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 8 + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
        (12).to_bytes(8, "little") + b'{"a": "text"}'[:12],
        (30).to_bytes(8, "little") + b'{"a":{"shape":[-1,2],"dtype":"F32"}}'[:36].ljust(40),
        (42).to_bytes(8, "little") + b'{"a":{"shape":[1,2],"dtype":"NO_SUCH"}}'.ljust(42),
        (42).to_bytes(8, "little") + b'{"a":{"shape":["x"],"dtype":"F32"}}'.ljust(42),
    ],
)
def test_files_that_are_no_safetensors_are_refused(
    content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    for where in (path, tmp_path / "missing", tmp_path):
        err = refused(capsys, "plan", "--model", str(where))
        assert err.startswith(f"pagedopt plan: --model {where}: ")
        assert err.count("\n") == 1


def test_it_wants_to_know_what_to_train(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--params", "1B", "--size", "gpt2"]):
        with pytest.raises(SystemExit) as stopped:
            main(["plan", *options])
        assert stopped.value.code == 2
    assert "--size" in capsys.readouterr().err


def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "python -m pagedopt plan --params 7B --budget 2GiB" in text
    assert "--rates there.json" in text
