"""The request log on disk: what is in it when its writer dies at any byte, and what another launcher makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gateway.gateways import gateway_of
from group_tokens import group_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.graph_files import load

from flowrt.actors.control import Control, Ended, Tokens
from flowrt.actors.front_end_messages import Origin
from flowrt.actors.outputs import ClientEvent, EndEvent, Logprobs, TokenEvent
from flowrt.errors import UserError
from flowrt.gateway.log_contents import LogContents, read_log
from flowrt.gateway.log_records import MAGIC, LogHeader, Record, frame_of, read_frames
from flowrt.gateway.log_writer import MAX_SEGMENT_BYTES, LogWriter, open_log
from flowrt.gateway.requests import Requests
from flowrt.graph.settings import GraphLimits
from flowrt.launcher.warm_up import warm_up
from flowrt.reliability.health import RequestProgress
from flowrt.sampling_params import SamplingParams
from flowrt.seams import RealClock, ThreadCompute
from flowrt.system.log_files import open_log_folder

IDENTITY = {"model": "m", "numerics": "strict"}
SCORED = Logprobs(-1.5, ((7, -1.5), (8, -2.0)))


class Letters:
    """Token n is the n-th letter, shown with the token after it."""

    def __init__(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._held = ""

    def push(self, token_id: int) -> str:
        held, self._held = self._held, chr(ord("a") + token_id)
        return held

    def flush(self) -> str:
        return self._held


async def send_nothing(group: str, control: Control) -> None:
    pass


def new_requests(
    folder: Path, resumes: bool = False, synced: bool = False, segment_bytes: int = MAX_SEGMENT_BYTES, first_number: int = 0
) -> tuple[Requests, LogWriter]:
    gateway = gateway_of(["g"], GraphLimits(), 64, 26, draw_seed=lambda: 99, new_detokenizer=Letters)
    requests = Requests(gateway, send_nothing, RequestProgress(), RealClock())
    compute = ThreadCompute("log") if synced else None
    log, contents = open_log(open_log_folder(folder), IDENTITY, resumes, compute, segment_bytes, first_number)
    requests.begin_log(log, contents)
    requests.begin()
    return requests, log


def copy_of(folder: Path, to: Path, num_bytes: int | None = None) -> Path:
    """What another launcher finds if the writer dies now, or after so many bytes of the last segment."""
    to.mkdir()
    names = sorted(path.name for path in folder.glob("*.log"))
    for name in names:
        data = (folder / name).read_bytes()
        (to / name).write_bytes(data[:num_bytes] if name == names[-1] else data)
    return to


def contents_of(folder: Path) -> LogContents:
    opened = open_log_folder(folder)
    try:
        return read_log(opened)
    finally:
        opened.close()


@asynccontextmanager
async def opened(folder: Path, **more: Any) -> AsyncIterator[Requests]:
    """`more`: of new_requests."""
    requests, log = new_requests(folder, **more)
    yield requests
    await requests.aclose()
    await log.aclose()


def submitter(*token_ids: int) -> Any:
    async def tokenize() -> list[int]:
        return list(token_ids)

    return tokenize


async def serve_some(requests: Requests) -> list[list[ClientEvent]]:
    """Requests in each state: ended by a stop string, with an error, one choice of two ended, with logprobs, cancelled, without tokens."""
    stopped = await requests.submit(SamplingParams(max_tokens=9, stop=("bc",)), submitter(1, 2))
    failed = await requests.submit(SamplingParams(max_tokens=9), submitter(3))
    double = await requests.submit(SamplingParams(max_tokens=4, n=2, temperature=0.5, prompt_logprobs=1), submitter(4, 5))
    scored = await requests.submit(SamplingParams(max_tokens=9, logprobs=2, seed=5), submitter(6))
    cancelled = requests.open(SamplingParams(max_tokens=4), 2, lambda: None)
    requests.place(cancelled, (1, 2), Origin("cancelled", 0, 1, b""))
    waiting = requests.open(SamplingParams(max_tokens=4), 2, lambda: None)
    requests.place(waiting, (2, 1), Origin("waiting", 0, 1, b"form"))
    for token in (0, 1, 2, 3):
        tokens = [
            group_tokens(f"request-{stopped}", 0, token, (token,)),
            group_tokens(f"request-{double}", 0, token, (token,), 0, (), token == 2),
        ]
        requests.on_control("g", Tokens((*tokens, group_tokens(f"request-{scored}", 0, token, (token,), 0, (SCORED,)))))
    requests.on_control("g", Ended(f"request-{failed}", 0, "error", error="a step failed"))
    requests.on_control("g", Ended(f"request-{double}", 0, "length", None, 0, 4))
    requests.on_control("g", Tokens((group_tokens(f"request-{double}", 0, 0, (9, 8), 1, (), False, 0, (SCORED,)),)))
    await requests.wait_written()
    requests.close(cancelled, next(iter(requests._on_change[cancelled])))
    await requests.wait_written()
    return [requests.gateway.events(index) for index in (stopped, failed, double, scored, waiting)]


@pytest.mark.parametrize("synced", [False, True])
async def test_another_launcher_has_the_same_events_text_seeds_and_ends(tmp_path: Path, synced: bool) -> None:
    async with opened(tmp_path / "log", synced=synced) as requests:
        before = await serve_some(requests)
        left = copy_of(tmp_path / "log", tmp_path / "left")
    assert isinstance(before[0][-1], EndEvent)
    assert before[0][-1].finish_reason == "stop"

    async with opened(left, resumes=True) as resumed:
        assert [resumed.gateway.events(index) for index in (0, 1, 2, 3, 5)] == before
        placed = {item.request.index: item.request for item in resumed._outgoing["g"].items}  # type: ignore[union-attr]
        assert sorted(placed) == [2, 3, 5]
        assert placed[2].committed_token_ids == ((0, 1, 2, 3), (9, 8))
        assert placed[2].ended_choices == (0,)
        assert (placed[2].seed, placed[3].seed, placed[5].prompt_token_ids) == (99, 5, (2, 1))
        assert {request.attempt for request in placed.values()} == {1}
        assert resumed.find("waiting") == {0: 5}
        assert resumed.find("cancelled") == {}
        resumed.on_control("g", Tokens((group_tokens("request-3", 1, 4, (11,), 0, (SCORED,)),)))
        resumed.on_control("g", Ended("request-3", 1, "stop", None, 0, 5))
        events = [event async for event in resumed.follow(3)]
        assert [event.index for event in events if isinstance(event, TokenEvent)] == [0, 1, 2, 3, 4]
        assert await resumed.submit(SamplingParams(), submitter(1)) == 6, "numbers are not given twice"


@pytest.mark.parametrize("has_ended", [(), (0,), (1,)])
async def test_another_launcher_has_the_error_of_a_request_with_two_choices(tmp_path: Path, has_ended: tuple[int, ...]) -> None:
    async with opened(tmp_path / "log") as requests:
        failed = await requests.submit(SamplingParams(max_tokens=2, n=2, temperature=0.5), submitter(4, 5))
        for choice in has_ended:
            requests.on_control("g", Tokens((group_tokens(f"request-{failed}", 0, 0, (0, 1), choice),)))
            requests.on_control("g", Ended(f"request-{failed}", 0, "length", None, choice, 2))
        requests.on_control("g", Ended(f"request-{failed}", 0, "error", "a step failed"))
        await requests.wait_written()
        before = requests.gateway.events(failed)
        assert before[-1] == EndEvent(failed, "error", "", "a step failed")
        left = copy_of(tmp_path / "log", tmp_path / "left")
    async with opened(left, resumes=True) as resumed:
        assert resumed.gateway.events(failed) == before


async def test_no_client_gets_an_event_before_it_is_written(tmp_path: Path) -> None:
    async with opened(tmp_path) as requests:
        index = await requests.submit(SamplingParams(max_tokens=4), submitter(1))
        following = requests.follow(index)
        requests.on_control("g", Tokens((group_tokens("request-0", 0, 0, (3,)),)))
        assert requests.gateway.log(index).token_ids == [3]
        assert requests.gateway.events(index) == []
        assert contents_of(copy_of(tmp_path, tmp_path / "before")).requests == {}
        event = await anext(following)
        assert isinstance(event, TokenEvent)
        assert contents_of(copy_of(tmp_path, tmp_path / "after")).requests[0].output == [TokenEvent(0, 0, (3,))]
        await following.aclose()


async def test_a_log_that_is_cut_off_at_any_byte_has_a_beginning_of_the_tokens(tmp_path: Path) -> None:
    """A frame is there as a whole or not at all, and what follows continues exactly there."""
    async with opened(tmp_path / "log") as requests:
        index = await requests.submit(SamplingParams(max_tokens=9), submitter(1, 2))
        await requests.wait_written()
        for token in range(4):
            requests.on_control("g", Tokens((group_tokens("request-0", 0, token, (token,)),)))
            await requests.wait_written()
        (segment,) = (tmp_path / "log").glob("*.log")
        size = segment.stat().st_size
        seen = set()
        for num_bytes in range(size + 1):
            left = copy_of(tmp_path / "log", tmp_path / f"cut-{num_bytes}", num_bytes)
            async with opened(left, resumes=True) as found:
                tokens = found.gateway.log(index).token_ids if found.gateway.num_logs else None
                assert tokens in (None, [], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3])
                seen.add(str(tokens))
            assert contents_of(left).num_open == (tokens is not None), "the torn frame is gone for good"
        assert len(seen) == 6


async def test_damage_is_named_and_not_taken_for_a_death(tmp_path: Path) -> None:
    async with opened(tmp_path / "log") as requests:
        await serve_some(requests)
    (segment,) = (tmp_path / "log").glob("*.log")
    good, chance = segment.read_bytes(), Random(1)
    first = len(frame_of(0, [LogHeader(IDENTITY)]))
    for _ in range(60):
        at = chance.randrange(first, len(good) // 2)
        segment.write_bytes(good[:at] + bytes([good[at] ^ 1 << chance.randrange(8)]) + good[at + 1 :])
        with pytest.raises(UserError, match=r"the request log .* is damaged: 0+\.log at byte \d+: [^\n]*$"):
            contents_of(tmp_path / "log")
    segment.write_bytes(good.replace(MAGIC, b"FLR1", 1))
    with pytest.raises(
        UserError,
        match=r"cannot be read: it was written by another version of flowrt; [^\n]*$",
    ):
        contents_of(tmp_path / "log")
    segment.write_bytes(good)
    contents_of(tmp_path / "log")


async def test_a_frame_in_the_prompt_of_a_client_is_not_one_of_the_log(tmp_path: Path) -> None:
    """The frame that a death cuts off has a whole one in it, whose number the client has guessed wrongly."""
    forged = frame_of(5, [EndEvent(0, "stop")])
    async with opened(tmp_path / "log", first_number=1 << 40) as requests:
        index = await requests.submit(SamplingParams(max_tokens=9), submitter(1, 2))
        await requests.wait_written()
        requests.place(requests.open(SamplingParams(max_tokens=9), 2, lambda: None), (1, 2), Origin("forger", 0, 1, forged + b"the rest"))
        await requests.wait_written()
        (segment,) = (tmp_path / "log").glob("*.log")
        data = segment.read_bytes()
        left = copy_of(tmp_path / "log", tmp_path / "left", data.index(forged) + len(forged))
    async with opened(left, resumes=True) as resumed:
        assert resumed.gateway.num_unfinished == 1
        assert resumed.gateway.is_open(f"request-{index}")
    later = frame_of((1 << 40) + 3, [EndEvent(0, "stop")])
    (left / segment.name).write_bytes(data[:-1] + b"x" + later)
    with pytest.raises(UserError, match="a frame is damaged"):
        contents_of(left)


async def test_many_requests_at_once_are_several_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.gateway.log_records.FRAME_BYTES", 300)
    async with opened(tmp_path / "log", segment_bytes=2000) as requests:
        for number in range(20):
            requests.place(requests.open(SamplingParams(max_tokens=9), 2, lambda: None), (1, 2), Origin(f"id {number}", 0, 1, bytes(200)))
        await requests.wait_written()
        segments = sorted((tmp_path / "log").glob("*.log"))
        assert len(segments) > 2
        assert max(path.stat().st_size for path in segments) < 2000 + 2 * 300
        async with opened(copy_of(tmp_path / "log", tmp_path / "left"), resumes=True) as resumed:
            assert resumed.gateway.num_unfinished == 20


async def test_other_files_and_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir(mode=0o700)
    (tmp_path / "log" / "mine.log").write_text("is no segment")
    async with opened(tmp_path / "log"):
        pass
    assert (tmp_path / "log" / "mine.log").exists()
    (tmp_path / "log").chmod(0o770)
    with pytest.raises(UserError, match="cannot be trusted: other users may write to it"):
        open_log_folder(tmp_path / "log")
    (tmp_path / "link").mkdir(mode=0o700)
    (tmp_path / "link" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="cannot be opened"):
        open_log_folder(tmp_path / "link")
    assert not (tmp_path / "victim").exists()


async def test_long_prompts_of_ended_requests_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.gateway.requests.MAX_KEPT_BYTES", 40 * 1000)
    async with opened(tmp_path / "log") as requests:
        for number in range(100):
            index = requests.open(SamplingParams(max_tokens=1), 40, lambda: None)
            requests.place(index, tuple([1] * 40), Origin(f"id-{number}", 0, 1, b""))
            requests.on_control("g", Tokens((group_tokens(f"request-{index}", 0, 0, (5,)),)))
            requests.on_control("g", Ended(f"request-{index}", 0, "length", None, 0, 1))
            await requests.wait_written()
            requests.close(index, next(iter(requests._on_change[index])))
        kept = [number for number in range(100) if requests.find(f"id-{number}")]
        assert 10 <= len(kept) <= 25
        assert kept == list(range(100 - len(kept), 100)), "the latest"


@given(st.lists(st.binary(max_size=80)), st.integers(0, 3))
@settings(max_examples=60)
def test_any_bytes_are_read_or_refused(pieces: list[bytes], at: int) -> None:
    data = b"".join(pieces[:at]) + frame_of(7, [LogHeader({})]) + b"".join(pieces[at:])
    found = read_frames(data)
    assert found.num_valid <= len(data)
    assert (found.problem is None) == (found.num_valid == len(data))


@pytest.mark.parametrize(
    "records",
    [
        [TokenEvent(0, 1, (5,), choice=0)],
        [TokenEvent(0, 0, (5,), choice=1)],
        [TokenEvent(0, 0, (5,), choice=0), TokenEvent(0, 0, (5,), choice=0)],
    ],
)
async def test_records_that_cannot_follow_are_refused(tmp_path: Path, records: list[Record]) -> None:
    async with opened(tmp_path) as requests:
        await requests.submit(SamplingParams(max_tokens=9), submitter(1, 2))
        await requests.wait_written()
    (segment,) = tmp_path.glob("*.log")
    segment.write_bytes(segment.read_bytes() + frame_of(2, records))
    with pytest.raises(UserError, match="request 0"):
        contents_of(tmp_path)


async def test_two_launchers_cannot_have_one_log(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(UserError, match="in use by another launcher"):
            open_log_folder(tmp_path)
    open_log_folder(tmp_path).close()


async def test_open_requests_are_neither_dropped_nor_continued_by_another_model(tmp_path: Path) -> None:
    async with opened(tmp_path / "log") as requests:
        await requests.submit(SamplingParams(max_tokens=9), submitter(1, 2))
        await requests.wait_written()
        left = copy_of(tmp_path / "log", tmp_path / "left")
    with pytest.raises(UserError, match="holds 1 open requests of a launcher that died; flowrt up --resume NAME"):
        new_requests(left)
    with pytest.raises(UserError, match="open requests of numerics strict, this graph has fast"):
        open_log(open_log_folder(left), IDENTITY | {"numerics": "fast"}, resumes=True)
    async with opened(left, resumes=True) as resumed:
        resumed.end_all()
    async with opened(left) as resumed:
        assert resumed.gateway.num_logs == 0, "the run was closed, and ended the request"


async def test_open_request_that_does_not_fit_stays_in_the_log(tmp_path: Path) -> None:
    async with opened(tmp_path / "log") as requests:
        requests.place(requests.open(SamplingParams(max_tokens=9), 2, lambda: None), (1, 2), Origin("job-1", 0, 1, b""))
        await requests.submit(SamplingParams(max_tokens=9), submitter(1, 2))
        await requests.wait_written()
        left = copy_of(tmp_path / "log", tmp_path / "left")
    gateway = gateway_of(["g"], GraphLimits(max_tokens=8), 9, 26, draw_seed=lambda: 99)
    smaller = Requests(gateway, send_nothing, RequestProgress(), RealClock())
    log, contents = open_log(open_log_folder(left), IDENTITY, resumes=True)
    with pytest.raises(UserError, match="request 'job-1' of the request log is open, and does not fit: prompt of 2 tokens and 9 new"):
        smaller.begin_log(log, contents)
    await smaller.aclose()
    await log.aclose()
    assert contents_of(left).num_open == 2


async def test_ended_requests_do_not_make_the_log_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrt.gateway.requests.MAX_UNREAD", 4)
    async with opened(tmp_path / "log", segment_bytes=4000) as requests:
        most = 0
        for number in range(400):
            index = await requests.submit(SamplingParams(max_tokens=9), submitter(1, 2))
            requests.on_control("g", Tokens((group_tokens(f"request-{index}", 0, 0, (5, 6, 7)),)))
            requests.on_control("g", Ended(f"request-{index}", 0, "length", None, 0, 3))
            assert [type(event) async for event in requests.follow(index)][-1] is EndEvent
            most = max(most, sum(path.stat().st_size for path in (tmp_path / "log").glob("*.log")))
            if number == 200:
                async with opened(copy_of(tmp_path / "log", tmp_path / "left"), resumes=True) as resumed:
                    assert resumed.gateway.num_logs >= 4
                    assert not resumed.gateway.num_unfinished
        assert most < 3 * 4000


async def test_a_full_disk_ends_the_run_and_loses_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, log = new_requests(tmp_path / "log")
    failed: list[Exception] = []
    log.on_failure = failed.append
    index = await requests.submit(SamplingParams(max_tokens=9), submitter(1, 2))
    requests.on_control("g", Tokens((group_tokens("request-0", 0, 0, (5,)),)))
    await requests.wait_written()

    def write(file: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", write)
        requests.on_control("g", Tokens((group_tokens("request-0", 0, 1, (6,)),)))
        await requests.wait_written()
    assert [str(error) for error in failed] == [
        f"the request log {tmp_path / 'log'} cannot be used (No space left on device);"
        " mend this, then flowrt up --resume continues its open requests"
    ]
    assert len(requests.gateway.events(index)) == 1, "the second token is not in the log"
    await requests.aclose()
    await log.aclose()
    async with opened(tmp_path / "log", resumes=True) as resumed:
        assert resumed.gateway.log(index).token_ids == [5]


async def test_a_request_of_a_run_that_fails_stays_open_in_the_log(tmp_path: Path) -> None:
    """Its reader gets the failure and leaves; another launcher continues it."""
    async with opened(tmp_path / "log") as requests:
        index = await requests.submit(SamplingParams(max_tokens=9), submitter(1))
        reader = asyncio.ensure_future(anext(aiter(requests.follow(index))))
        await asyncio.sleep(0)
        requests.fail(UserError("the run has failed"))
        with pytest.raises(UserError, match="the run has failed"):
            await reader
    assert contents_of(tmp_path / "log").requests[index].end is None


async def test_events_wait_for_the_disk_in_order(tmp_path: Path) -> None:
    """Synced: what is committed while a frame is written is the next frame."""
    async with opened(tmp_path, synced=True) as requests:
        index = await requests.submit(SamplingParams(max_tokens=40), submitter(1, 2))
        following, got = requests.follow(index), []
        for token in range(30):
            requests.on_control("g", Tokens((group_tokens("request-0", 0, token, (token % 26,)),)))
            if token % 3 == 0:
                await asyncio.sleep(0)
        for _ in range(30):
            event = await anext(following)
            assert isinstance(event, TokenEvent)
            got.append(event.index)
        assert got == list(range(30))
        await following.aclose()


async def test_requests_of_a_warm_up_are_not_in_the_log(tmp_path: Path) -> None:
    """A launcher that dies meanwhile, or is interrupted, leaves no open requests of clients."""
    async with opened(tmp_path / "log") as requests:
        warming = asyncio.ensure_future(warm_up(load("2x3.yaml"), requests))
        for _ in range(4):
            await asyncio.sleep(0)
        client = await requests.submit(SamplingParams(max_tokens=2), submitter(1, 2))
        for index in (0, client):
            requests.on_control("g", Tokens((group_tokens(f"request-{index}", 0, 0, (4,)),)))
        assert [len(requests.gateway.events(index, 0)) for index in (0, client)] == [1, 0], "only one of a client waits for the log"
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        await requests.wait_written()
    found = contents_of(tmp_path / "log")
    assert ({*found.requests}, found.num_open) == ({client}, 1)
