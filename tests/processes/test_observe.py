"""Log lines, and numbers formatted for people."""

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from flowrt.errors import UserError
from flowrt.observe import ROOT, duration_text, print_line, set_log_level, size_text


@pytest.fixture
def restored() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    state = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.level, logger.handlers, logger.propagate = state
    logger.setLevel(state[0])


@pytest.mark.usefixtures("restored")
def test_lines_start_with_the_level_and_go_to_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_log_level("info")
    set_log_level("info")
    log = logging.getLogger(f"{ROOT}.worker")
    log.debug("unheard")
    log.info("loaded %d experts", 4)
    set_log_level("error")
    log.warning("unheard too")
    assert capsys.readouterr().err == "INFO loaded 4 experts\n"


def test_an_unknown_level_is_the_users() -> None:
    with pytest.raises(UserError, match="log level 'loud' is unknown; one of: debug, info, warning, error"):
        set_log_level("loud")


def test_sizes() -> None:
    assert [size_text(number) for number in (0, 999, 1000, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "999 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]


def test_durations() -> None:
    assert [duration_text(seconds) for seconds in (25e-5, 0.0123, 4.56, 200.0)] == ["250 us", "12.3 ms", "4.56 s", "3 min 20 s"]


def test_line_that_cannot_be_written_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(OSError), open("/dev/full", "w", encoding="utf-8") as full:  # as a full disk; closing it fails, too
        monkeypatch.setattr(sys, "stderr", full)
        print_line("experts.0 was killed by SIGKILL; the run goes on without it")
        monkeypatch.setattr(sys, "stderr", None)
        print_line("as with 2>&-")
