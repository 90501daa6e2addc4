"""`train --resume` of checkpoints that are well-formed and wrong: one line, exit status 2, and nothing changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Program
from tiny_training import train

from pagedopt.commands.train import contents, run
from pagedopt.commands.train.checkpoint import BEFORE, CHECKSUM, FORMAT, checksum, load_checkpoint, save_checkpoint
from pagedopt.commands.train.train_options import TrainOptions

STEPS = 6
Where = tuple[Any, ...]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of both optimizers, after its last step."""
    out = tmp_path_factory.mktemp("saved")
    assert train(out, "--no-spill", "--steps", STEPS, "--checkpoint-every", STEPS) == 0
    content = load_checkpoint(out / "checkpoint.pt")
    for contender in content["contenders"].values():
        assert len(contender["curve"]["losses"]) == STEPS
    return out / "checkpoint.pt"


def fields(value: Any, where: Where = ()) -> Iterator[tuple[Where, Any]]:
    """Every value of a checkpoint and where it is; of equal ones (parameters, losses, …) the first and the last."""
    if where:
        yield where, value
    if isinstance(value, dict):
        keys = list(value)
        few = keys if len(keys) < 12 or "batch" in value or "lr" in value else [keys[0], keys[-1]]
        for key in few:
            yield from fields(value[key], (*where, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1}) if value else ():
            yield from fields(value[index], (*where, index))


def wrong(where: Where, value: Any) -> Iterator[tuple[str, Any]]:
    """What does not belong where ``value`` is."""
    yield "a text", "no\nsuch thing"
    yield "None", None
    yield "a dict", {"no": "such"}
    yield "a list", [[]]
    yield "a tensor", torch.ones(2, 3)
    yield "a huge number", 10**30
    yield "below zero", -1
    yield "not a number", math.nan
    if isinstance(value, torch.Tensor):
        yield "another shape", torch.zeros(*value.shape, 2)
        yield "another dtype", value.double()
        if value.numel() > 1:
            yield "one number for all", torch.zeros(1, dtype=value.dtype).expand(value.shape)
            yield "with gaps", torch.stack([value, value], -1)[..., 0]
        yield "nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        yield "no memory", value.to("meta") if value.numel() > 1 else value.to(torch.complex64)
        yield "sparse", torch.zeros(max(value.shape or (1,)), dtype=value.dtype).to_sparse()
    elif isinstance(value, list):
        yield "one less", value[:-1]
        yield "one twice", [*value, value[-1]]
    elif isinstance(value, dict):
        yield "one missing", dict(list(value.items())[1:])
        yield "one more", {**value, "more": 1}
        yield "another key", {f"not {key}": item for key, item in value.items()}


def allowed(where: Where, value: Any, name: str, new: Any) -> bool:
    """What a run could have saved there, or the next run overwrites."""
    return (
        (where == ("options", "placement") and new is None)
        or (where[-2:-1] == ("losses",) and name == "not a number")  # training may have diverged
        or (where == ("options", "out") and isinstance(new, str))  # the folder is that of the checkpoint
        or (where == ("options", "checkpoint_every") and name == "a huge number")
        or (type(new) is type(value) and not isinstance(new, torch.Tensor) and new == value)
    )


def put(content: Any, where: Where, new: Any) -> Any:
    """A copy of ``content`` with ``new`` at ``where``."""
    if not where:
        return new
    out = copy.copy(content)
    out[where[0]] = put(content[where[0]], where[1:], new)
    return out


def refused(path: Path, program: Program) -> str:
    """Resume; returns what was said."""
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    threads = torch.get_num_threads()
    error = program.refuses_in_a_line("train", "--resume", path)
    assert len(error) < 600, error
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before
    assert torch.get_num_threads() == threads
    return error


def test_every_field_and_every_wrong_content(
    saved: Path, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a right checksum, as of a program that saves something else: contents are looked at, one by one."""
    monkeypatch.setattr(run, "load_corpus", once(run.load_corpus))
    monkeypatch.setattr(contents, "GPT", once(contents.GPT))
    content = load_checkpoint(saved)
    path, count = tmp_path / "wrong.pt", 0
    for where, value in fields(content):
        if where == ("format",):
            continue
        for name, new in wrong(where, value):
            if allowed(where, value, name, new):
                continue
            changed = put(content, where, new)
            monkeypatch.setattr(run, "load_checkpoint", lambda path, changed=changed: changed)
            try:
                path.touch()
                said = refused(path, program)
            except BaseException as error:
                error.add_note(f"{where}: {name}")
                raise
            assert "--" in said or "checkpoint" in said, said
            count += 1
    assert count > 1000


WRONG_COLUMNS = {
    "missing": ("exp_avg.root3", None, "has no exp_avg.root3"),
    "plain": ("exp_avg", torch.ones(3), "has 'exp_avg', which no run of these options saves"),
    "blocks": ("exp_avg.absmax", torch.ones(3), "exp_avg.absmax is torch.float32 (3,)"),
    "dtype": ("exp_avg_sq.root4", torch.int8, "exp_avg_sq.root4 is torch.int8"),
}


@pytest.mark.parametrize("name", WRONG_COLUMNS)
def test_state_in_8_bits_is_looked_at_by_its_columns(
    name: str, tmp_path: Path, program: Program, in_8_bits: Path
) -> None:
    content = load_checkpoint(in_8_bits)
    large = next(e for e in content["contenders"]["paged"]["optimizer"]["state"].values() if "exp_avg.root3" in e)
    key, new, said = WRONG_COLUMNS[name]
    if new is None:
        del large[key]
    else:
        large[key] = large[key].to(new) if isinstance(new, torch.dtype) else new
    path = tmp_path / "wrong.pt"
    save_checkpoint(path, content)
    assert said in refused(path, program)


def test_a_checkpoint_of_before_the_rounding_was_saved_is_accepted(in_8_bits: Path) -> None:
    content = load_checkpoint(in_8_bits)
    options = TrainOptions(**content["options"])
    groups = content["contenders"]["paged"]["optimizer"]["param_groups"]
    for group in groups:
        group["v_rounding"] = group.pop("rounding", 0)
        assert group["v_rounding"] is None
    contents.check_contents(content, options)
    groups[0]["v_rounding"] = "nearest"
    with pytest.raises(contents.WrongContents, match="v_rounding is 'nearest'"):
        contents.check_contents(content, options)
    for group in groups:
        del group["v_rounding"]
    contents.check_contents(content, options)
    groups[0]["rounding"] = "nearest"
    with pytest.raises(contents.WrongContents, match="rounding is 'nearest'"):
        contents.check_contents(content, options)


def test_a_checkpoint_with_first_moments_in_root_2_is_accepted(in_8_bits: Path) -> None:
    content = load_checkpoint(in_8_bits)
    state = content["contenders"]["paged"]["optimizer"]["state"]
    for key, entry in state.items():
        state[key] = {name.replace("root3", "root2"): value for name, value in entry.items()}
    assert any("exp_avg.root2" in entry for entry in state.values())
    contents.check_contents(content, TrainOptions(**content["options"]))


@pytest.fixture(scope="module")
def in_8_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of PagedAdamW with such state."""
    out = tmp_path_factory.mktemp("in_8_bits")
    assert train(out, "--no-spill", "--steps", 2, "--optimizer", "paged", "--state-format", "int8") == 0
    return out / "checkpoint.pt"


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that remembers: reading the library and making models takes longest."""
    known: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        if arguments not in known:
            known[arguments] = function(*arguments)
        return known[arguments]

    return call


@pytest.mark.parametrize("name", ["weight", "moment", "option", "loss", "step", "no checksum", "other format", "text"])
def test_what_was_changed_in_the_file_is_noticed(name: str, saved: Path, tmp_path: Path, program: Program) -> None:
    """All of these have the right kinds and shapes: only the checksum can tell."""
    content = torch.load(saved, weights_only=True)
    contender = content["contenders"]["torch"]
    if name == "weight":
        contender["model"]["tokens.weight"][3, 5] += 1e-6
    elif name == "moment":
        contender["optimizer"]["state"][1]["exp_avg"].view(-1)[0].neg_()
    elif name == "option":
        content["options"]["seed"] += 1
    elif name == "loss":
        contender["curve"]["losses"][1] += 0.1
    elif name == "step":
        content["step"] -= 1
    elif name == "no checksum":
        del content[CHECKSUM]
    elif name == "other format":
        content["format"] = FORMAT + 1
    else:
        content[CHECKSUM] = torch.zeros(2)
    path = tmp_path / "changed.pt"
    torch.save(content, path)
    said = refused(path, program)
    assert ("this version reads" if name == "other format" else "checksum") in said


def test_a_checkpoint_of_before_checksums_is_gone_on_from(saved: Path, tmp_path: Path, program: Program) -> None:
    content = torch.load(saved, weights_only=True)
    del content[CHECKSUM]
    path = tmp_path / "before.pt"
    content["format"] = BEFORE
    torch.save(content, path)
    assert checksum(load_checkpoint(path)) == checksum(content)
    torch.save({**content, "step": -1}, path)
    assert "step is -1" in refused(path, program), "what it holds is looked at all the same"


def test_files_of_other_programs_are_refused_in_words(saved: Path, tmp_path: Path, program: Program) -> None:
    whole = saved.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path = tmp_path / "junk.pt"
    for content in (b"", b"174812789\n", bytes(range(256)) * 100, whole[:-1000], flipped, b"\x80\x02K\x01."):
        path.write_bytes(content)
        said = refused(path, program)
        assert ("checksum" if content is flipped else "not a readable checkpoint") in said, said
        assert not any(part in said for part in ("174812789", "weights_only")), said
    loop: list[Any] = []
    loop.append(loop)
    for value in ({"a": 1}, [1, 2], torch.ones(2), {**load_checkpoint(saved), "step": loop, CHECKSUM: ""}):
        torch.save(value, path)
        assert "checkpoint of this program" in (said := refused(path, program)) or "checksum" in said


def test_what_is_saved_again_is_read_again(saved: Path, tmp_path: Path) -> None:
    content = load_checkpoint(saved)
    save_checkpoint(tmp_path / "again.pt", {**content, "step": torch.tensor(float("nan")).to(torch.bfloat16)})
    assert load_checkpoint(tmp_path / "again.pt").keys() == content.keys()


BEYOND = {("--threads", number): f"--threads {number}: must be" for number in (100000, 2**40, 0)}
BEYOND["--batch", 10**11] = f"--batch {10**11} of --block 64: the tokens of one step take"


@pytest.mark.parametrize(("given", "said"), BEYOND.items(), ids=str)
def test_what_no_machine_has_is_refused(given: tuple[str, int], said: str, tmp_path: Path, program: Program) -> None:
    assert said in program.refuses("train", "--size", "tiny", *given, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
