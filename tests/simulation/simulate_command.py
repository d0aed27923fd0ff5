"""`flowrt simulate` within the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from flowrt.cli.app import main


def simulate(words: Sequence[str]) -> int | str | None:
    """Run the command; the exit code."""
    with patch.object(sys, "argv", ["flowrt", "simulate", *words]), pytest.raises(SystemExit) as end:
        main()
    return end.value.code
