"""The program, as it is typed."""

import json
from typing import Any

import pytest

from pagedopt.commands.main import main


class Program:
    """Runs commands in this process, and hands out what each of them prints.

    Args:
        capsys: the fixture.
        first: arguments that stand before all others.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], *first: object) -> None:
        self._capsys, self._first = capsys, first

    def _main(self, *arguments: object) -> int:
        self._capsys.readouterr()
        return main([*map(str, (*self._first, *arguments))])

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """The exit status, and what is on stdout and stderr."""
        return self._main(*arguments), *self._capsys.readouterr()

    def says(self, *arguments: object, status: int = 0) -> str:
        """What it prints if it ends as it should."""
        ended, said, complaint = self.run(*arguments)
        assert ended == status, complaint
        return said

    def reports(self, *arguments: object, status: int = 0) -> Any:
        """What it reports with ``--json``."""
        return from_json(self.says(*arguments, "--json", status=status))

    def exits(self, *arguments: object, status: int = 2) -> tuple[str, str]:
        """What is on stdout and stderr where argparse ends it."""
        with pytest.raises(SystemExit) as ended:
            self._main(*arguments)
        assert ended.value.code == status
        return self._capsys.readouterr()

    def refuses(self, *arguments: object) -> str:
        """What is said of arguments that are refused."""
        status, _, complaint = self.run(*arguments)
        assert status == 2, complaint
        return complaint

    def refuses_in_a_line(self, *arguments: object) -> str:
        """That, where it is one line and nothing else is printed."""
        status, said, complaint = self.run(*arguments)
        assert (status, said, complaint.count("\n")) == (2, "", 1), complaint
        return complaint


def from_json(text: str) -> Any:
    """What ``text`` says; NaN and Infinity are refused."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def assert_has(text: str, *parts: str) -> None:
    """Every part is in the text."""
    for part in parts:
        assert part in text, f"{part!r} is not in:\n{text}"


def safetensors(tensors: dict[str, Any]) -> bytes:
    """A file of that format with these tensors: its header, and nothing behind."""
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header
