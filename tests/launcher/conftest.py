"""Fixtures of the tests of launcher runs: a run in miniature, and processes that are forked early."""

from __future__ import annotations

import pytest
import zygote
from launcher.run_driver import Driver


@pytest.fixture(autouse=True)
def zygote_runs() -> None:
    zygote.start_early()


@pytest.fixture
def driver() -> Driver:
    """A run that is ready."""
    return Driver().begin()
