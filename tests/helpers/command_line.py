"""The program, as it is typed."""

import pytest

from pagedopt.commands.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said of arguments that are refused."""
    assert main([*map(str, arguments)]) == 2
    return capsys.readouterr().err
