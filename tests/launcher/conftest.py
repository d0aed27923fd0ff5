"""Fixtures of the tests of launcher runs, which report processes that they leave behind."""

from __future__ import annotations

import pytest
import zygote


@pytest.fixture(autouse=True)
def zygote_runs() -> None:
    zygote.start_early()
