"""Every interleaving of writer and reader of a small ring: nothing is lost, changed or doubled, and no end sleeps for ever."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
from ring_steps import End, FoundError, Run, build_words, explore, replace_in_function, unscheduled

from flowrt.transports.registry import unavailable_reason
from flowrt.transports.shared_memory.ring import HEAD, INLINE, READER_SLEEPS, TAIL, WRITER_SLEEPS

if unavailable_reason("shm") is not None:
    pytest.skip(str(unavailable_reason("shm")), allow_module_level=True)

RECORDS_AT, MAPPED_BYTES = 4096, 8192
WRITER, READER = 0, 1


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return build_words(tmp_path_factory.mktemp("words"))


def record_ring(words: ModuleType, size: int, sizes: list[int], read_before: int = 0, *, hasty: str = "") -> Run:
    """A writer of records with payloads of `sizes` bytes and a reader of as many, each asleep when it cannot go on. `read_before` bytes
    have gone through the ring before. An end goes to sleep as RingWriter and RingReader do: it raises its flag and looks again; the `hasty`
    one does not look again."""
    memfd = os.memfd_create("ring")
    os.ftruncate(memfd, MAPPED_BYTES)
    memory = words.Memory(memfd, MAPPED_BYTES)
    os.close(memfd)
    writer = words.Records(memory, 0, RECORDS_AT, size, READER)
    reader = words.Records(memory, 0, RECORDS_AT, size, WRITER)
    payloads = [bytes([65 + number]) * nbytes for number, nbytes in enumerate(sizes)]
    words.set_step_hook(unscheduled)
    for _ in range(read_before // 32):
        assert writer.put(INLINE, 0, 8, b"", [8], [bytes(8)])
        assert reader.next() is not None

    def write(end: End) -> None:
        for number, payload in enumerate(payloads):
            while True:
                end.begin(number, writer.cursors)
                if writer.put(INLINE, number, len(payload), b"", [len(payload)], [payload]):
                    break
                seen = memory.load(TAIL)
                end.begin(number, writer.cursors, seen, "full")
                if writer.put(INLINE, number, len(payload), b"", [len(payload)], [payload]):
                    break
                memory.raise_flag(WRITER_SLEEPS)
                if hasty == "writer" or memory.load(TAIL) == seen:
                    end.wait()

    def read(end: End) -> None:
        for number, payload in enumerate(payloads):
            while True:
                end.begin(number, reader.cursors)
                if (record := reader.next()) is not None:
                    break
                memory.raise_flag(READER_SLEEPS)
                if hasty == "reader" or not reader.unread():
                    end.wait()
            assert record == (INLINE, number, len(payload), b"", bytearray(payload)), f"record {number} arrived as {record}"
        assert reader.next() is None

    return Run(words, memory, (write, read), frozenset({HEAD, TAIL, READER_SLEEPS, WRITER_SLEEPS}))


# Bytes of the ring, payload bytes of each record (24 more are its head, and it is padded to 32), bytes that went through before.
SCENARIOS = {
    "two records fill the ring": (64, [8, 8], 0),
    "a skip, then full": (128, [40, 40], 96),
}
THREE_RECORDS = (64, [8, 8, 8], 0)  # the third takes the place of the first


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving(words: ModuleType, name: str) -> None:
    found = explore(lambda: record_ring(words, *SCENARIOS[name]))
    assert found.states > 800, f"{found}: too few to be all"
    if name == "two records fill the ring":
        assert explore(lambda: record_ring(words, *SCENARIOS[name])) == found  # a state is recognized wherever the ring is mapped


def test_every_interleaving_of_three_records(words: ModuleType) -> None:
    found = explore(lambda: record_ring(words, *THREE_RECORDS))
    assert found.states > 8000, f"{found}: too few to be all"


# File, function, what stands there, and what stands there instead.
FAULTS = {
    "the head is published before the bytes": (
        "_records.c",
        "records_put",
        "    flowrt_bytes();\n    memcpy(at, &record,",
        "    flowrt_store(self->words + HEAD, self->head + skipped + nbytes);\n    flowrt_bytes();\n    memcpy(at, &record,",
    ),
    "the room is given back before the bytes are copied": (
        "_records.c",
        "records_next",
        "    flowrt_bytes();\n",
        "    flowrt_store(self->words + TAIL, self->tail + record.nbytes);\n    flowrt_bytes();\n",
    ),
    "no fence between a cursor and the peer's flag": ("_words.h", "flowrt_publish", "flowrt_fence();", ""),
    "no fence between the own flag and the peer's cursor": ("_words.h", "flowrt_raise", "flowrt_fence();", ""),
    "records are written over the end of the ring": ("_records.c", "find_room", "*skipped = rest;", ";"),
    "unread records are written over": ("_records.c", "find_room", "return self->head + needed - self->tail <= self->size;", "return 1;"),
    "a refused record moves the head": ("_records.c", "find_room", "*skipped = rest;", "self->head += rest;"),
    "the reader wakes no writer": ("_records.c", "records_next", "        flowrt_wake(self->wake_fd);\n", "        ;\n"),
    "the writer wakes no reader": ("_records.c", "records_put", "        flowrt_wake(self->wake_fd);\n", "        ;\n"),
    "the flag stays up": ("_words.h", "flowrt_publish", "flowrt_exchange(flag, 0) != 0", "flowrt_load(flag) == 0"),
}
NEEDS_THREE = {"the room is given back before the bytes are copied"}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    file, function, old, new = FAULTS[name]

    def plant(file_name: str, text: str) -> str:
        return replace_in_function(text, function, old, new) if file_name == file else text

    faulty = build_words(tmp_path, plant)
    with pytest.raises(FoundError):
        explore(lambda: record_ring(faulty, *(THREE_RECORDS if name in NEEDS_THREE else SCENARIOS["a skip, then full"])))


@pytest.mark.parametrize("end", ["writer", "reader"])
def test_end_that_does_not_look_again_before_it_sleeps_is_found(words: ModuleType, end: str) -> None:
    with pytest.raises(FoundError, match="asleep for ever"):
        explore(lambda: record_ring(words, *SCENARIOS["a skip, then full"], hasty=end))
