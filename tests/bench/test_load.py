"""`flowrt bench serve`: prompts, arrivals, what it makes of a server's responses, and its figures. A hand-written server plays the peer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowrt.bench.load.http_client import ServerAddress
from flowrt.bench.load.load_options import LoadOptions
from flowrt.bench.load.prompts import LoadPrompt, make_prompts
from flowrt.bench.load.record import RequestRecord
from flowrt.bench.load.result import details_of, file_name, result_of, steady_state, table
from flowrt.bench.load.send import LoadRun, arrival_offsets, first_model, open_client, request_body, send_load
from flowrt.cli.app import app
from flowrt.errors import UserError
from flowrt.serving.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
PROMPT = LoadPrompt((20, 21, 22), 3, 8)
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}


def text(value: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": reason}], "usage": None}


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def stream(*events: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])
    return "".join(lines).encode()


def chunked(body: bytes, sizes: int = 7) -> bytes:
    """Chunks that have nothing to do with events."""
    pieces = [body[at : at + sizes] for at in range(0, len(body), sizes)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + coded


def plain(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class Peer:
    """Sends the next of its responses to each request. `cut`: bytes of each write. `ends`: it closes the connection after each response."""

    def __init__(self, responses: Sequence[bytes], cut: int, ends: bool) -> None:
        self._responses, self._cut, self._ends = list(responses), cut, ends
        self.bodies: list[Any] = []
        self.heads: list[str] = []
        self.num_connections = 0
        self.tasks: list[asyncio.Task[Any]] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = await reader.readexactly(length)
                self.heads.append(head)
                self.bodies.append(json.loads(body or b"null"))
                response = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
                for at in range(0, len(response), self._cut):
                    writer.write(response[at : at + self._cut])
                    await asyncio.sleep(0)
                if self._ends:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    @property
    def options(self) -> LoadOptions:
        return LoadOptions(port=self.port, num_prompts=1, percentile_metrics="ttft,tpot,itl,e2el")


@asynccontextmanager
async def peer(*responses: bytes, cut: int = 1 << 20, ends: bool = False) -> AsyncIterator[Peer]:
    played = Peer(responses, cut, ends)
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0)
    played.port = server.sockets[0].getsockname()[1]
    try:
        yield played
    finally:
        server.close()
        await asyncio.gather(*played.tasks)


async def run(played: Peer, num_requests: int = 1, **options: Any) -> LoadRun:
    chosen = replace(played.options, **options)
    async with open_client(chosen, "secret") as client:
        return await send_load(client, [PROMPT] * num_requests, "m", chosen.request_rate[0], chosen)


async def record_of(response: bytes, **options: Any) -> RequestRecord:
    async with peer(response, ends=True) as played:
        return (await run(played, **options)).records[0]


@pytest.mark.parametrize("cut", [1, 2, 13, 1 << 20])
async def test_a_stream_is_read_wherever_it_is_cut(cut: int) -> None:
    body = stream(text("One"), text(""), text("é \u2028 三"), text("", "length"), USAGE)
    async with peer(chunked(body, sizes=cut), cut=cut) as played:
        record = (await run(played)).records[0]
        assert (record.error, record.texts) == ("", ["One", "", "é \u2028 三"])
        assert (record.num_prompt_tokens, record.num_tokens) == (5, 4), "as the server counts them"
        assert record.times == sorted(record.times)
        assert "authorization: Bearer secret\r\n" in played.heads[0]


async def test_chat_counts_no_event_that_only_opens_or_ends_a_choice() -> None:
    body = stream(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"))
    async with peer(chunked(body)) as played:
        record = (await run(played, backend="openai-chat")).records[0]
        assert record.texts == ["a", "b"]
        assert (record.num_prompt_tokens, record.num_tokens) == (3, 2), "without usage, the client's own counts"
        assert played.heads[0].startswith("POST /v1/chat/completions ")


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (plain(429, b'{"error": {"message": "too many active requests", "code": "x"}}'), "HTTP 429: too many active requests"),
        (plain(500, b"<html>no</html>"), "HTTP 500: <html>no</html>"),
        (chunked(stream(text("a"), {"error": {"message": "the group is gone"}})), "the group is gone"),
        (chunked(stream(text("a"), done=False)), "the stream was cut off: "),
        (chunked(stream(text("a")))[:-9], "the connection ended"),
        (chunked(stream(USAGE)), "the response has no tokens"),
        (chunked(b"data: {no json\n\n"), "the response is not valid: JSON is malformed"),
        (b"SSH-2.0-x\r\n\r\n", "the response is not valid: "),
        (b"", "the connection ended"),
    ],
)
async def test_what_is_no_whole_stream_is_a_failed_request_with_its_reason(response: bytes, error: str) -> None:
    record = await record_of(response)
    assert record.error.startswith(error)


async def test_a_body_may_end_with_its_connection() -> None:
    record = await record_of(b"HTTP/1.1 200 OK\r\n\r\n" + stream(text("a"), text("b", "stop"), done=False).replace(b"\n", b"\r\n"))
    assert (record.error, record.texts) == ("", ["a", "b"])


async def test_connections_are_used_again_also_when_the_server_has_closed_them() -> None:
    async with peer(chunked(stream(text("a")))) as played:
        assert not any(record.error for record in (await run(played, num_requests=9, max_concurrency=2)).records)
        assert played.num_connections == 2
    async with peer(chunked(stream(text("a"))), ends=True) as played:
        assert not any(record.error for record in (await run(played, num_requests=4, max_concurrency=1)).records)


async def test_no_more_requests_are_sent_at_a_time_than_allowed() -> None:
    async with peer(chunked(stream(text("a"), text("b"))), cut=5) as played:
        result = result_of(await run(played, num_requests=20, max_concurrency=3), played.options, "m", datetime.now())
        assert (result["completed"], result["failed"]) == (20, 0)
        assert 1 <= result["max_concurrent_requests"] <= 3


async def test_first_model_comes_from_the_server_and_missing_servers_are_user_errors() -> None:
    responses = (plain(200, b'{"data": [{"id": "tiny"}]}'), plain(200, b'{"data": []}'), plain(401, b""))
    async with peer(*responses) as played, open_client(played.options, None) as client:
        assert await first_model(client) == "tiny"
        with pytest.raises(UserError, match="lists no models"):
            await first_model(client)
        with pytest.raises(UserError, match=r"HTTP 401; give the key of the server by OPENAI_API_KEY$"):
            await first_model(client)
    async with open_client(played.options, None) as client:
        with pytest.raises(UserError, match="cannot be reached"):
            await first_model(client)


def test_body_has_the_fields_of_the_api() -> None:
    options = LoadOptions(temperature=0.0, extra_body={"seed": 1})
    assert json.loads(request_body(PROMPT, "m", options)) == {
        "model": "m",
        "prompt": [20, 21, 22],
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0.0,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chat = json.loads(request_body(LoadPrompt("hi", 1, 8), "m", LoadOptions(backend="openai-chat", ignore_eos=False)))
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert (chat["max_completion_tokens"], "ignore_eos" in chat) == (8, False)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, float("inf")])
def test_arrivals_keep_the_rate_over_the_whole_run(burstiness: float) -> None:
    offsets = arrival_offsets(50, 10.0, burstiness, random.Random(3))
    assert offsets == sorted(offsets) == arrival_offsets(50, 10.0, burstiness, random.Random(3))
    assert offsets[-1] == pytest.approx(5.0)
    gaps = [later - earlier for earlier, later in pairwise(offsets)]
    assert (max(gaps) == pytest.approx(min(gaps))) == (burstiness == float("inf"))
    assert arrival_offsets(3, float("inf"), burstiness, random.Random(3)) == [0.0] * 3


def test_random_prompts_have_their_length_and_their_seed() -> None:
    options = LoadOptions(num_prompts=20, random_input_len=40, random_output_len=10, random_range_ratio=0.5)
    ids = make_prompts(options)
    assert ids == make_prompts(options) != make_prompts(replace(options, seed=1))
    assert {len(each.prompt) for each in ids} <= set(range(20, 61))
    assert len({each.num_tokens for each in ids}) > 1
    tokenizer = Tokenizer(MODEL)
    for each in make_prompts(replace(options, tokenizer=MODEL)):
        assert isinstance(each.prompt, str)
        assert len(tokenizer.encode(each.prompt)) == each.num_tokens


def test_sharegpt_takes_the_first_turns_and_repeats_a_short_file(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is 347 + 285? Say it."}, {"from": "gpt", "value": "It is 632, I think."}]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}]))
    options = LoadOptions(num_prompts=3, dataset_name="sharegpt", dataset_path=path, tokenizer=MODEL)
    prompts = make_prompts(options)
    assert [each.prompt for each in prompts] == ["What is 347 + 285? Say it."] * 3
    assert prompts[0].max_tokens == len(Tokenizer(MODEL).encode("It is 632, I think."))
    assert make_prompts(replace(options, tokenizer=None, sharegpt_output_len=9))[0].max_tokens == 9
    for content in ("{}", "[1]", "no", '[{"conversations": [{}, {}]}]'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"chats\.json"):
            make_prompts(options)


@pytest.mark.parametrize("tokenizer", [None, MODEL], ids=["token ids", "text"])
async def test_a_trace_keeps_its_times_and_its_common_beginnings(tokenizer: Path | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entries = [(0, 1030, [1, 2, 3]), (30, 1100, [1, 2, 4]), (60, 9, [5])]
    keys = ("timestamp", "input_length", "hash_ids")
    path.write_text("\n".join(json.dumps({"output_length": 7, **dict(zip(keys, entry, strict=True))}) for entry in entries))
    options = LoadOptions(dataset_name="mooncake", dataset_path=path, tokenizer=tokenizer)
    options.check()
    one, two, three = make_prompts(options)
    assert [each.at_seconds for each in (one, two, three)] == [0.0, 0.03, 0.06]
    assert one.prompt != two.prompt
    num_equal = next(number for number, (a, b) in enumerate(zip(one.prompt, two.prompt, strict=False)) if a != b)
    assert num_equal >= (1024 if tokenizer is None else 500)
    assert all(abs(each.num_tokens - n) <= 0.1 * n for each, (_, n, _) in zip((one, two, three), entries, strict=True))
    body = chunked(stream(text("One"), text("", "length"), USAGE))
    async with peer(body, body, body) as played:
        async with open_client(played.options, "secret") as client:
            begun = time.perf_counter()
            run = await send_load(client, [one, two, three], "m", float("inf"), options)
        assert all(record.start - begun >= each.at_seconds for record, each in zip(run.records, (one, two, three), strict=True))
    assert len(make_prompts(replace(options, num_prompts=2))) == 2
    path.write_text('{"timestamp": "x"}')
    with pytest.raises(UserError, match=r"trace\.jsonl:1"):
        make_prompts(options)


@pytest.mark.parametrize("tokenizer", [None, MODEL], ids=["token ids", "text"])
def test_prompts_with_common_beginnings_have_as_many_of_each(tokenizer: Path | None) -> None:
    options = LoadOptions(
        dataset_name="prefix_repetition",
        num_prompts=12,
        tokenizer=tokenizer,
        prefix_repetition_prefix_len=40,
        prefix_repetition_suffix_len=8,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=5,
    )
    prompts = make_prompts(options)
    assert prompts == make_prompts(options) != make_prompts(replace(options, seed=1))
    assert len({each.prompt for each in prompts}) == 12
    assert {each.max_tokens for each in prompts} == {5}
    beginnings = Counter(each.prompt[:20] for each in prompts)
    assert sorted(beginnings.values()) == [4, 4, 4]


def test_custom_prompts_come_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is 1 + 2?", "output_tokens": 3}\n\n{"prompt": "Say it."}\n')
    options = LoadOptions(dataset_name="custom", dataset_path=path, num_prompts=3, custom_output_len=9)
    first, second = ("What is 1 + 2?", 3), ("Say it.", 9)
    assert [(each.prompt, each.max_tokens) for each in make_prompts(options)] == [first, second, first]
    wrong = dict.fromkeys(('{"prompt": 3}', '{"prompt": "a", "output_tokens": 0}', '{"prompt": "\\ud800"}'), ":1")
    for content, where in {"": "has no prompt", '{"prompt": "a"}\n[]': ":2", **wrong}.items():
        path.write_text(content)
        with pytest.raises(UserError, match=where):
            make_prompts(options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"metric_percentiles": "99,x"},
        {"metric_percentiles": "101"},
        {"percentile_metrics": "ttft,e2e"},
        {"goodput": ("itl:3",)},
        {"goodput": ("ttft:fast",)},
        {"header": ("a",)},
        {"header": ("a=b\r\nc: d",)},
        {"dataset_name": "sharegpt"},
        {"dataset_name": "mooncake"},
        {"dataset_name": "prefix_repetition", "backend": "openai-chat"},
        {"dataset_path": MODEL},
        {"backend": "openai-chat"},
    ],
)
def test_wrong_options_are_user_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        LoadOptions(**wrong).check()


def test_command_line_is_read_as_vllm_reads_it() -> None:
    line = "bench serve --request-rate 1 2.5 inf --num-prompts 3 --ignore-eos --top-k 5 --goodput ttft:200 tpot:50"
    line += " --header a=b --metadata c=d e=f"
    _, bound, *_ = app.parse_args([*line.split(), "--extra-body", '{"seed": 3, "x": {"y": [1]}}'], exit_on_error=False, print_error=False)
    options = bound.arguments["options"]
    assert (options.request_rate, options.num_prompts, options.ignore_eos, options.top_k) == ((1.0, 2.5, float("inf")), 3, True, 5)
    assert (options.goodput, options.header, options.metadata) == (("ttft:200", "tpot:50"), ("a=b",), ("c=d", "e=f"))
    assert options.extra_body == {"seed": 3, "x": {"y": [1]}}
    options.check()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1", "http://a\r\nb"])
def test_wrong_urls_are_user_errors(url: str) -> None:
    with pytest.raises(UserError, match="--base-url"):
        ServerAddress.of(url)


def records() -> list[RequestRecord]:
    """Four requests of 4 tokens, one second each, two at a time; then one that failed."""
    times = {start: [start + after for after in (0.4, 0.6, 0.8, 1.0)] for start in (0.0, 0.5, 1.0, 1.5)}
    made = [RequestRecord(10, start, each, list("abcd"), 4) for start, each in times.items()]
    return [*made, RequestRecord(10, 1.6, error="HTTP 500: no")]


def test_figures_have_the_keys_and_the_values_of_vllm() -> None:
    options = LoadOptions(goodput=("ttft:400.1", "tpot:300"), metric_percentiles="50,99.9", metadata=("gpu=none",))
    result = result_of(LoadRun(2.0, records(), 2.5, 0.1), options, "m", datetime(2026, 1, 2, 3, 4, 5))
    assert (result["completed"], result["failed"], result["gpu"], result["date"]) == (4, 1, "none", "20260102-030405")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 16)
    assert (result["request_throughput"], result["output_throughput"], result["request_goodput"]) == (1.6, 6.4, 1.6)
    assert result["total_token_throughput"] == 22.4
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 8.0
    for key, value in {"median_ttft_ms": 400, "p50_tpot_ms": 200, "p99.9_itl_ms": 200, "std_ttft_ms": 0}.items():
        assert result[key] == pytest.approx(value, abs=1e-6)
    assert "mean_e2el_ms" not in result, "not in --percentile-metrics"
    assert details_of(LoadRun(2.0, records(), 2.5, 0.1))["errors"][-1] == "HTTP 500: no"


def test_steady_state_lies_between_the_first_end_and_the_last_start() -> None:
    state = steady_state(records()[:4], LoadOptions())
    assert state is not None
    assert (state["window"]["start_s"], state["window"]["end_s"]) == (1.0, 1.5)
    assert (state["window"]["requests_started_in_window"], state["window"]["requests_completed_in_window"]) == (1, 1)
    assert state["output_throughput"] == pytest.approx(8.0)
    assert steady_state(records()[:1], LoadOptions()) is None
    assert steady_state([], LoadOptions()) is None


def test_table_is_the_one_of_vllm_and_survives_a_run_without_a_success() -> None:
    options = LoadOptions()
    lines = list(table(result_of(LoadRun(2.0, records(), 2.5, 0.1), options, "m", datetime.now()), options))
    for line in (
        "============ Serving Benchmark Result ============",
        f"{'Successful requests:':<40} {'4':<10}",
        f"{'Request rate configured (RPS):':<40} {'2.00':<10}",
        f"{'Output token throughput (tok/s):':<40} {'6.40':<10}",
        "---------------Time to First Token----------------",
        f"{'Median TTFT (ms):':<40} {'400.00':<10}",
        f"{'P99 ITL (ms):':<40} {'200.00':<10}",
    ):
        assert line in lines
    failed = result_of(LoadRun(float("inf"), records()[4:], 2.5, 0.1), options, "m", datetime.now())
    assert f"{'Failed requests:':<40} {'1':<10}" in list(table(failed, options))


def test_file_is_named_as_vllm_names_it() -> None:
    options = LoadOptions(request_rate=(float("inf"),), max_concurrency=8, result_dir=Path("out"))
    assert file_name(options, "org/m", datetime(2026, 1, 2, 3, 4, 5)) == "out/openai-infqps-concurrency8-m-20260102-030405.json"
    assert file_name(replace(options, result_filename="a.json"), "m", datetime.now()) == "out/a.json"
