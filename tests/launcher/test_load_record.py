"""How much of the weights all processes have loaded, and the line that shows it."""

from __future__ import annotations

import pytest

from flowrt.launcher import events
from flowrt.launcher.load_record import SHOWN_SECONDS, LoadRecord, loading_text
from flowrt.launcher.start_checks import MemoryNeed

DIED = events.WorkerLost("experts.0", "was killed", while_loading=True)
# Two servers that share 100 bytes, and hold 10 of their own each; a group of 50.
NEEDS = {
    "experts.0": MemoryNeed(110, 0, 100, "host: 0-3"),
    "experts.1": MemoryNeed(110, 0, 100, "host: 0-3"),
    "attention.0": MemoryNeed(50, 7),
}


class Loading:
    """A record of processes that began to load at 1.0. Each event comes a second after the one before, from 10.0 on."""

    def __init__(self) -> None:
        self.record, self.now = LoadRecord(NEEDS), 10.0
        for name in NEEDS:
            assert self.record.note(read(name, 0), 1.0) is None

    def sum_after(self, *reports: events.Event) -> int | None:
        """The sum that the last of these events completes; None if it does not."""
        found = None
        for report in reports:
            assert found is None
            self.now += 1.0
            found = self.record.note(report, self.now)
        if found is None:
            return None
        assert (found.total_bytes, found.seconds) == (170, self.now - 1.0)
        return found.num_bytes


@pytest.fixture
def loading() -> Loading:
    return Loading()


def read(name: str, num_bytes: int) -> events.WorkerLoading:
    """A process has read this much."""
    return events.WorkerLoading(name, "", 0, 1, num_bytes)


def loaded(name: str) -> events.WorkerListening:
    return events.WorkerListening(name, 1)


def test_shared_weights_count_once(loading: Loading) -> None:
    assert loading.sum_after(read("experts.0", 40), read("experts.1", 0), read("attention.0", 30)) == 70, "one waits for the other"
    assert loading.sum_after(loaded("experts.0"), read("experts.1", 10), read("attention.0", 40)) == 160
    assert loading.sum_after(loaded("experts.1"), loaded("attention.0")) == 170


def test_a_sum_is_complete_when_all_that_load_have_reported(loading: Loading) -> None:
    assert loading.sum_after(read("experts.0", 20), read("experts.0", 40), read("attention.0", 10)) is None
    assert loading.sum_after(read("experts.1", 0)) == 50
    assert loading.sum_after(loaded("attention.0"), read("experts.1", 0)) is None
    assert loading.sum_after(read("experts.0", 50)) == 100
    assert loading.sum_after(read("experts.1", 0), read("experts.0", 60)) == 110, "the group has nothing more to report"


def test_what_is_read_twice_does_not_exceed_the_total(loading: Loading) -> None:
    assert loading.sum_after(read("attention.0", 51), read("experts.1", 0), read("experts.0", 500)) == 160
    assert loading.sum_after(read("attention.0", 51), read("experts.1", 500), read("experts.0", 500)) == 170, "no memory was shared"


def test_a_process_that_dies_while_it_loads_takes_what_it_has_read_along(loading: Loading) -> None:
    assert loading.sum_after(read("experts.0", 60), read("experts.1", 0), loaded("attention.0")) == 110
    assert loading.sum_after(DIED, read("experts.1", 20)) is None, "the next incarnation has not begun"
    assert loading.sum_after(events.WorkerStarted("experts.0", 8), read("experts.0", 0)) == 70, "the memory begins anew"


def test_a_process_that_loads_again_finds_shared_weights_in_memory(loading: Loading) -> None:
    assert loading.sum_after(loaded("experts.0"), read("experts.1", 0), loaded("attention.0")) == 160
    assert loading.sum_after(DIED, events.WorkerStarted("experts.0", 8), read("experts.1", 0), read("experts.0", 4)) == 154
    assert loading.sum_after(loaded("experts.0"), loaded("experts.1")) == 170


def test_short_loading_and_other_processes_show_nothing() -> None:
    for seconds, is_shown in ((SHOWN_SECONDS - 0.01, False), (SHOWN_SECONDS, True)):
        record = LoadRecord({"attention.0": MemoryNeed(50, 7)})
        assert record.note(read("attention.0", 0), 5.0) is None
        assert record.note(read("standby.0", 9), 100.0) is None
        assert (record.note(loaded("attention.0"), 5.0 + seconds) is not None) == is_shown
    assert LoadRecord({}).note(read("square.0", 0), 100.0) is None


@pytest.mark.parametrize(
    ("loading", "text"),
    [
        (events.WeightsLoading(12_340_000_000, 57_060_000_000, 6.85), "loading weights 12.3 of 57.1 GB, 1.8 GB/s"),
        (events.WeightsLoading(0, 57_060_000_000, 12.0), "loading weights 0.0 of 57.1 GB, 0.0 GB/s"),
        (events.WeightsLoading(30_000_000, 302_000_000, 4.0), "loading weights 30.0 of 302.0 MB, 7.5 MB/s"),
    ],
)
def test_the_line(loading: events.WeightsLoading, text: str) -> None:
    assert loading_text(loading) == text
