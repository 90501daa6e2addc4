"""One folder of compiled kernels for the whole run, shared by the workers and dropped at its end; never the user's."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the variable from the controller
        os.environ["PAGEDOPT_CACHE_DIR"] = tempfile.mkdtemp(prefix="pagedopt-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["PAGEDOPT_CACHE_DIR"], ignore_errors=True)
