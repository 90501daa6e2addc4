"""``notes/clients.md`` says what was run, of all that there is."""

from __future__ import annotations

import json
import os
import re

import pytest
from experiment_runs import undated

from tests.clients import clients_page
from tests.clients.clients_page import CLIENTS, PAGE, RAW, ROOT, described

pytestmark = pytest.mark.skipif("PAGEDOPT_CLIENTS_RECORD" in os.environ, reason="the record is being written")


def test_the_page_is_made_of_the_record() -> None:
    assert undated(PAGE.read_text()) == undated(clients_page.page())


def test_the_record_has_every_test_and_none_that_failed() -> None:
    record = json.loads(RAW.read_text())
    there = {f"{client.file}::{name}" for client in CLIENTS for name, _ in described(ROOT / client.file)}
    for device, run in record.items():
        failed = [node for node, outcome in run["outcomes"].items() if outcome != "passed"]
        assert not failed, device
    recorded = {node.partition("[")[0] for run in record.values() for node in run["outcomes"]}
    missing = there - recorded - gpu_alone()
    assert (missing, recorded - there) == (set(), set()), "run them once more, as tests/clients/clients_page.py says"


def gpu_alone() -> set[str]:
    """Tests that need a GPU."""
    texts = {client.file: (ROOT / client.file).read_text() for client in CLIENTS}
    return {f"{file}::{name}" for file, text in texts.items() for name in re.findall(r"on_cuda\ndef (\w+)", text)}


def test_every_test_of_a_client_says_what_it_shows() -> None:
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/clients").glob("test_*.py"))
    assert {client.file for client in CLIENTS} <= set(files)
    assert not [name for client in CLIENTS for name, words in described(ROOT / client.file) if not words.endswith(".")]


def test_what_was_run_is_what_is_pinned() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, version in json.loads(RAW.read_text())["cpu"]["versions"].items():
        assert version.partition("+")[0] == pins[name], name
