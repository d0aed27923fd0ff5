"""How much of the weights all processes have loaded, and the line that shows it."""

from __future__ import annotations

import pytest

from flowrt.launcher import events
from flowrt.launcher.load_record import SHOWN_SECONDS, LoadRecord, loading_text
from flowrt.launcher.start_checks import MemoryNeed

# Two servers that share 100 bytes, and hold 10 of their own each; a group of 50.
NEEDS = {
    "experts.0": MemoryNeed(110, 0, 100, "host: 0-3"),
    "experts.1": MemoryNeed(110, 0, 100, "host: 0-3"),
    "attention.0": MemoryNeed(50, 7),
}


class Loading:
    """A record whose first process began to load at 1.0. Each event comes a second after the one before, from 10.0 on."""

    def __init__(self) -> None:
        self.record, self.now = LoadRecord(NEEDS), 10.0
        assert self.record.note(events.WorkerLoading("experts.0", "experts.0", 0, 1, 0), 1.0) is None

    def note(self, event: events.Event) -> events.WeightsLoading | None:
        self.now += 1.0
        return self.record.note(event, self.now)

    def read(self, name: str, num_bytes: int) -> int:
        """The sum after a process has read this much."""
        return self.sum_after(events.WorkerLoading(name, "", 0, 1, num_bytes))

    def sum_after(self, event: events.Event) -> int:
        found = self.note(event)
        assert found is not None
        assert (found.total_bytes, found.seconds) == (170, self.now - 1.0)
        return found.num_bytes


def test_shared_weights_count_once() -> None:
    loading = Loading()
    assert loading.read("experts.0", 40) == 40
    assert loading.read("experts.1", 0) == 40, "it waits for the other"
    assert loading.read("attention.0", 30) == 70
    assert loading.sum_after(events.WorkerListening("experts.0", 1)) == 140
    assert loading.read("experts.1", 10) == 150
    assert loading.sum_after(events.WorkerListening("experts.1", 1)) == 150
    assert loading.sum_after(events.WorkerListening("attention.0", 1)) == 170


def test_what_is_read_twice_does_not_exceed_the_total() -> None:
    loading = Loading()
    assert loading.read("attention.0", 51) == 50
    assert loading.read("experts.0", 500) == 160
    assert loading.read("experts.1", 500) == 170, "no memory was shared: each has read its own"


def test_a_process_that_dies_while_it_loads_takes_what_it_has_read_along() -> None:
    loading = Loading()
    assert loading.read("experts.0", 60) == 60
    assert loading.note(events.WorkerLost("experts.0", "was killed", while_loading=True)) is None
    assert loading.read("experts.1", 20) == 20, "the memory begins anew"
    assert loading.note(events.WorkerStarted("experts.0", 8)) is None
    assert loading.read("experts.0", 0) == 20


def test_a_process_that_loads_again_finds_shared_weights_in_memory() -> None:
    loading = Loading()
    assert loading.read("experts.0", 110) == 110
    assert loading.sum_after(events.WorkerListening("experts.0", 1)) == 110
    assert loading.note(events.WorkerLost("experts.0", "was killed", while_loading=True)) is None
    assert loading.read("experts.0", 4) == 104
    assert loading.sum_after(events.WorkerListening("experts.0", 1)) == 110


def test_short_loading_and_other_processes_show_nothing() -> None:
    record = LoadRecord(NEEDS)
    assert record.note(events.WorkerLoading("experts.0", "", 0, 1, 0), 5.0) is None
    assert record.note(events.WorkerListening("experts.0", 1), 5.0 + SHOWN_SECONDS - 0.01) is None
    assert record.note(events.WorkerLoading("standby.0", "", 0, 1, 9), 100.0) is None
    assert record.note(events.WorkerListening("attention.0", 1), 100.0) is not None
    assert LoadRecord({}).note(events.WorkerLoading("square.0", "", 0, 1, 0), 100.0) is None


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
