"""Text is tokenized in a separate process, so that a model directory cannot harm the caller."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from serving.test_tokenizer import CHATML, byte_level

from flowrt.errors import TokenizerError
from flowrt.sampling_params import SamplingParams
from flowrt.serving import tokenizer_process
from flowrt.serving.chat import Chat
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import (
    LONG_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    TokenizerProcess,
    TokenizerProcesses,
    _Encoded,
    _limit_memory,
    _line,
    _TokenizerChild,
)
from flowrt.structured_outputs import StructuredOutputs
from flowrt.system.process_status import Activity

HELLO = Chat([{"role": "user", "content": "hello"}])
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    set_template(tmp_path, CHATML)
    return tmp_path


@pytest.fixture
def process(directory: Path) -> Iterator[TokenizerProcess]:
    with closing(TokenizerProcess(directory, 768)) as process:
        yield process


def set_template(directory: Path, template: str) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


async def test_it_encodes_as_the_tokenizer_does(directory: Path, process: TokenizerProcess) -> None:
    tokenizer = Tokenizer(directory)
    with closing(process):
        texts = ["", "the quick brown fox", "你好 🙂", "x" * 100_000]
        found = await asyncio.gather(*(process.encode(text, max_tokens=200_000) for text in texts))
        assert found == [tokenizer.encode(text) for text in texts]
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "你好"}, {"role": "user", "content": "bye"}]
        assert await process.encode(Chat(messages), max_tokens=200) == tokenizer.encode_chat(messages)
        with pytest.raises(TokenizerError, match="prompt of 19 tokens is longer than the 18 that the model and this graph can take"):
            await process.encode("你" * 6 + "a", max_tokens=18)
    with pytest.raises(TokenizerError, match="the graph was closed"):
        await process.encode("a", max_tokens=10)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (ENDLESS, "was not tokenized within 3 s"),
        ("{{ 'a' * 10 ** 11 }}", "MemoryError|has died"),
        ("{{ raise_exception('no chats') }}", "no chats"),
        ("{{ messages[", "the chat template of .* failed"),
    ],
)
async def test_a_hostile_template_fails_its_request_alone(directory: Path, template: str, error: str) -> None:
    """Also one that never ends, or takes all memory. The loop goes on meanwhile."""
    set_template(directory, template)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    with closing(TokenizerProcess(directory, 768, text_seconds=3.0)) as process:
        counting = asyncio.create_task(count())
        with pytest.raises(TokenizerError, match=error):
            await process.encode(HELLO, max_tokens=100)
        counting.cancel()
        assert turns > 10
        assert await process.encode("a", max_tokens=100), "the next text is encoded, by another process if need be"


async def test_process_that_is_stopped_while_it_loads_is_reported_as_such(directory: Path) -> None:
    with closing(TokenizerProcess(directory, 768, start_seconds=0.2)) as process:
        while True:
            child = process.start()
            os.kill(child.process.pid, signal.SIGSTOP)
            if not select.select([child.socket], [], [], 0.1)[0]:
                break
            process._kill()  # it had loaded before
        with pytest.raises(TokenizerError, match=r"has not loaded in 0\.2 s: is it stopped, or the machine overloaded\?"):
            await process.encode("ab", max_tokens=100)


async def test_no_other_text_waits_for_a_long_one(directory: Path) -> None:
    with closing(TokenizerProcesses(directory, 768)) as processes:
        os.kill(processes._long.start().process.pid, signal.SIGSTOP)
        encoding = asyncio.create_task(processes.encode("a" * (LONG_CHARACTERS + 1), max_tokens=LONG_CHARACTERS))
        assert await processes.encode("ab", max_tokens=100) == Tokenizer(directory).encode("ab")
        os.kill(processes._long.start().process.pid, signal.SIGCONT)
        with pytest.raises(TokenizerError, match="longer than"):
            await encoding


async def test_a_caller_that_goes_leaves_nothing_to_the_next(directory: Path, process: TokenizerProcess) -> None:
    set_template(directory, ENDLESS)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await process.encode(HELLO, max_tokens=100)
    assert await process.encode("ab", max_tokens=100) == Tokenizer(directory).encode("ab")


class _FakeProcess:
    """The other end of the socket, at which the test writes the responses."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **options: Any) -> None:
        self.end = socket.socket(fileno=os.dup(pass_fds[0]))

    def kill(self) -> None:
        self.end.close()

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_no_caller_that_goes_loses_a_message(directory: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every turn of the loop, also the one in which the message has arrived."""
    monkeypatch.setattr(tokenizer_process.subprocess, "Popen", _FakeProcess)

    async def receive(turns: int, num_bytes: int) -> bool:
        """Whether the first call was cancelled before the message, whose first `num_bytes` come before that."""
        child = _TokenizerChild(directory, 768, (), False)
        end, message = cast(Any, child.process).end, _line(_Encoded(1, [7]))
        receiving = asyncio.create_task(child.receive())
        try:
            await asyncio.sleep(0)  # it waits
            end.sendall(message[:num_bytes])
            for _ in range(turns):
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait([receiving])
            end.sendall(message[num_bytes:])
            async with asyncio.timeout(20):
                received = await (child.receive() if receiving.cancelled() else receiving)
            assert received == _Encoded(1, [7])
            return receiving.cancelled()
        finally:
            child.kill()

    async def every_turn() -> None:
        assert {await receive(turns, 1000) for turns in range(8)} == {True, False}
        assert {await receive(turns, 3) for turns in range(8)} == {True}

    run(every_turn())


async def test_close_ends_a_call_that_waits(process: TokenizerProcess) -> None:
    os.kill(process.start().process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(process.encode("a", max_tokens=10))
    await asyncio.sleep(0)
    process.close()
    with pytest.raises(TokenizerError):
        await waiting


async def test_texts_that_are_too_long_are_refused_here(process: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process.TokenizerProcess, "start", lambda self: pytest.fail("no process is needed"))
    with pytest.raises(TokenizerError, match=f"has {MAX_TEXT_CHARACTERS + 1} characters, it may have at most {MAX_TEXT_CHARACTERS}"):
        await process.encode("x" * (MAX_TEXT_CHARACTERS + 1), max_tokens=10)
    with pytest.raises(TokenizerError, match=f"may have at most {MAX_TEXT_CHARACTERS}"):
        await process.encode(Chat([{"role": "user", "content": "x" * MAX_TEXT_CHARACTERS}]), max_tokens=10)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of the process is limited on Linux")
def test_a_limit_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may not raise its hard limit."""
    limits, set_limits = (2 << 30, 3 << 30), list[tuple[int, int]]()
    monkeypatch.setattr(tokenizer_process.resource, "getrlimit", lambda number: limits)
    monkeypatch.setattr(tokenizer_process.resource, "setrlimit", lambda number, pair: set_limits.append(pair))
    monkeypatch.setattr(tokenizer_process, "MEMORY_BYTES", 1 << 50)
    _limit_memory()
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    _limit_memory()
    assert set_limits[0] == (2 << 30, 2 << 30)
    assert set_limits[1][0] > 1 << 50


async def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with closing(TokenizerProcess(tmp_path, 768)) as process, pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        await process.encode("a", max_tokens=10)


async def test_grammars_are_checked_in_the_process(process: TokenizerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad one leaves the process as it is, one that takes too long or ends the process does not; a good one is checked once."""

    async def check(**outputs: Any) -> None:
        await process.check(SamplingParams(structured_outputs=StructuredOutputs(**outputs)))

    await process.check(SamplingParams())
    assert process._child is None
    await check(regex="[ab]+")
    child = process._child
    assert child is not None
    for bad in ({"regex": "("}, {"json": '{"type": 5}'}, {"grammar": "start: nowhere"}):
        with pytest.raises(TokenizerError, match="structured_outputs cannot be used: ") as caught:
            await check(**bad)
        assert (caught.value.param, caught.value.is_unavailable) == ("structured_outputs", False)
    assert await process.encode("hello", max_tokens=10)
    assert process._child is child
    os.kill(child.process.pid, signal.SIGSTOP)
    await check(regex="[ab]+")
    monkeypatch.setattr(tokenizer_process, "GRAMMAR_SECONDS", 0.1)
    monkeypatch.setattr(tokenizer_process, "process_activity", lambda pid: Activity.ASLEEP)  # as if it only took long
    with pytest.raises(TokenizerError, match="structured_outputs cannot be compiled within"):
        await check(regex="[cd]+")
    monkeypatch.undo()
    await check(regex="[ef]+")


async def test_the_process_for_grammars_is_ready_for_the_first_and_starts_again_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    async def exchange(self: TokenizerProcess, *request: Any) -> Any:
        calls.append(request)
        return await run(self, *request)

    run = TokenizerProcess._exchange
    monkeypatch.setattr(TokenizerProcess, "_exchange", exchange)
    with closing(TokenizerProcess(directory, 768, is_for_grammars=True)) as process:
        child = process.start()
        with pytest.raises(TokenizerError, match="cannot be used"):
            await process.check(SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
        assert (len(calls), process._child) == (1, child)
        os.kill(child.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(tokenizer_process, "GRAMMAR_SECONDS", 0.2)
        monkeypatch.setattr(tokenizer_process, "process_activity", lambda pid: Activity.ASLEEP)
        with pytest.raises(TokenizerError, match="structured_outputs cannot be compiled within"):
            await process.check(SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
        assert process._child not in (None, child)


@pytest.mark.parametrize(
    ("number", "is_idle"),
    [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGSTOP, True), (signal.SIGKILL, False), (signal.SIGTERM, False)],
)
async def test_a_process_that_is_hit_from_outside_is_replaced(directory: Path, number: signal.Signals, is_idle: bool) -> None:
    """No request is answered that its text or grammar was too much, whether the process has one or waits for one. (One that is stopped
    while it loads is named.)"""

    async def hit(process: TokenizerProcess) -> None:
        child = process.start()
        if is_idle:
            assert await process.encode("a", max_tokens=9)
        os.kill(child.process.pid, number)
        if is_idle and number != signal.SIGSTOP:
            assert child.was_killed()

    with closing(TokenizerProcess(directory, 768, text_seconds=0.5)) as texts:
        await hit(texts)
        assert await texts.encode("ab", max_tokens=100) == Tokenizer(directory).encode("ab")
    with closing(TokenizerProcess(directory, 768, is_for_grammars=True)) as grammars:
        await hit(grammars)
        await grammars.check(SamplingParams(structured_outputs=StructuredOutputs(regex="a")))


@pytest.mark.parametrize(
    ("number", "of_text", "of_grammar"),
    [
        (signal.SIGKILL, "was killed or stopped twice", "was killed or stopped twice"),
        (signal.SIGABRT, "has died, of too little memory perhaps", "structured_outputs takes too much memory or nests too deep"),
    ],
)
async def test_a_process_that_ends_over_each_text_is_named(
    process: TokenizerProcess, number: int, of_text: str, of_grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has no memory aborts, unless the system kills it."""
    ready = TokenizerProcess._ready_child

    async def hit(self: TokenizerProcess) -> _TokenizerChild:
        child = await ready(self)
        child.process.send_signal(number)
        child.process.wait()
        return child

    monkeypatch.setattr(TokenizerProcess, "_ready_child", hit)
    with pytest.raises(TokenizerError, match=of_text) as caught:
        await process.encode("a", max_tokens=10)
    assert caught.value.is_unavailable
    with pytest.raises(TokenizerError, match=of_grammar):
        await process.check(SamplingParams(bad_words=("a",), structured_outputs=StructuredOutputs(regex="[gh]+")))
    monkeypatch.undo()
    await process.check(SamplingParams(structured_outputs=StructuredOutputs(regex="[gh]+")))


@pytest.mark.parametrize(("eos_token_ids", "is_possible"), [((0,), True), ((0, 1), False)])
async def test_grammars_are_checked_with_all_ends_of_the_model(eos_token_ids: tuple[int, ...], is_possible: bool) -> None:
    """As the group compiles them: else a request that passed fails there."""
    request = SamplingParams(structured_outputs=StructuredOutputs(choice=("<|pad|>",)))
    with (
        closing(TokenizerProcess(Path(__file__).parents[2] / "examples" / "tiny-moe", 768, eos_token_ids)) as process,
        nullcontext() if is_possible else pytest.raises(TokenizerError, match="it needs the text of a special token"),
    ):
        await process.check(request)
