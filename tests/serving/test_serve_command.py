"""`flowrt serve` as a process of its own: real front ends, groups and expert servers, and what their deaths do to streams."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from cli.conftest import flowrt, refusal
from serving.server_process import GRAPH, ROOT, SECONDS, STANDS_STILL, Server, events_of, metrics_of

from flowrt.bench.load.load_options import LoadOptions
from flowrt.bench.load.measure import bench_serve
from flowrt.cli.serve import ServeSession
from flowrt.errors import INTERRUPTED, SUCCESS, UserError

ONE = ("--set", "deploy.processes=one")
GROUPS = ("attention.0", "attention.1")
JSON = {"content-type": "application/json"}
LONG = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 20}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(*ONE)
    server.json("/v1/completions", SHORT | {"structured_outputs": {"choice": ["a"]}})  # starts the process that compiles grammars
    yield server
    server.process.terminate()
    try:
        assert server.process.wait(SECONDS) == 0
    finally:
        server.close()


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_stream_and_whole_response_have_the_same_text(server: Server) -> None:
    whole = server.json("/v1/completions", SHORT)
    events = list(server.stream(SHORT | {"stream_options": {"include_usage": True}}))
    assert text_of(events) == whole["choices"][0]["text"] != ""
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 20
    seeded = SHORT | {"temperature": 1, "seed": 5, "n": 2}
    assert server.json("/v1/completions", seeded)["choices"] == server.json("/v1/completions", seeded)["choices"]


def test_chat_uses_the_template_of_the_model(server: Server) -> None:
    body = server.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "temperature": 0})
    assert (body["choices"][0]["message"], body["choices"][0]["finish_reason"]) == ({"role": "assistant", "content": " 3"}, "stop")


SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": -99, "maximum": 99}, "odd": {"type": "boolean"}},
    "required": ["sum", "odd"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}


def test_structured_output_matches_its_schema(server: Server) -> None:
    wild = {"temperature": 2, "max_tokens": 120}
    for seed in range(3):
        chat = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "response_format": FORMAT, "seed": seed, "n": 2}
        for choice in server.json("/v1/chat/completions", wild | chat)["choices"]:
            assert choice["finish_reason"] == "stop"
            answer = json.loads(choice["message"]["content"])
            assert (type(answer["sum"]), type(answer["odd"]), len(answer)) == (int, bool, 2)
    dense = {"prompt": "Once", "structured_outputs": {"json": SUM, "disable_any_whitespace": True}, "ignore_eos": True, "seed": 1}
    streamed = text_of(list(server.stream(wild | dense)))
    assert json.dumps(json.loads(streamed), separators=(",", ":")) == streamed
    chosen = server.json("/v1/completions", wild | {"prompt": "Once", "structured_outputs": {"choice": ["left", "right"]}, "logprobs": 2})
    assert chosen["choices"][0]["text"] in ("left", "right")
    found = chosen["choices"][0]["logprobs"]
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert len(top) == 2 + (min(top.values()) == top[token] and len(top) == 3), "logprobs are the model's own"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, "response_format"),
        ({"structured_outputs": {"json": {"not": {"type": "string"}}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: " + " | ".join(f"/a{{1,{n}}}b*c?[d-z]{{2,{n}}}/" for n in range(900, 2400))}}, None),
        ({"allowed_token_ids": [100000]}, "allowed_token_ids"),
    ],
)
def test_bad_grammar_is_refused(server: Server, fields: dict[str, Any], param: str | None) -> None:
    """One that is too large is refused, or served; in any case the server serves on."""
    with server.request("/v1/completions", SHORT | fields) as response:
        if param is not None or response.status != 200:
            assert (response.status, json.loads(response.read())["error"]["param"]) == (400, param or "structured_outputs")
    assert server.json("/v1/completions", SHORT)["usage"]["completion_tokens"] == 20


WIDE = {"grammar": "start: " + " | ".join(f'"item {number}"' for number in range(5000))}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "cause"),
    [
        ({"structured_outputs": {"choice": ["left"]}, "allowed_token_ids": [1]}, "allowed_token_ids", "allow no token"),
        ({"structured_outputs": WIDE}, "structured_outputs", "too many alternatives are open at one place"),
    ],
    ids=["contradiction", "limit"],
)
def test_parameters_that_cannot_be_followed_are_the_clients_error(
    server: Server, fields: dict[str, Any], param: str, cause: str, is_streamed: bool
) -> None:
    """Whether a grammar and allowed_token_ids leave a token, or a grammar reaches a limit, shows when a token is sampled."""
    with server.request("/v1/completions", SHORT | fields | {"stream": is_streamed}) as response:
        body = response.read().decode()
    assert response.status == (200 if is_streamed else 400)
    events = [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n") if event not in ("", "data: [DONE]")]
    error = events[-1]["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)
    assert cause in error["message"]


def test_metrics_count_what_clients_got(server: Server) -> None:
    before = metrics_of(server)
    usage = server.json("/v1/completions", SHORT)["usage"]
    after = metrics_of(server)
    for name, key in (("flowrt_prompt_tokens_total", "prompt_tokens"), ("flowrt_generation_tokens_total", "completion_tokens")):
        assert after[name] - before[name] == usage[key]
    assert after['flowrt_requests_total{finish_reason="length"}'] - before['flowrt_requests_total{finish_reason="length"}'] == 1
    for name in ("attention", "front_end"):
        assert after[f'flowrt_process_up{{process="{name}.0",role="{name}"}}'] == 1


def test_requests_that_cannot_be_served_are_counted_as_refused(server: Server) -> None:
    """Also those that are known as such only when they were admitted. A client that leaves is another thing."""
    before = metrics_of(server)
    bodies = {"prompt": ""}, {"prompt": ["a", "b", ""]}, {"prompt": "word " * 6000}, {"structured_outputs": {"regex": "("}}
    for body in bodies:
        with server.request("/v1/completions", SHORT | body) as response:
            assert response.status == 400
    server.json("/v1/completions", SHORT)  # its front end has sent all that came before
    after = metrics_of(server)
    refused, aborted = 'flowrt_requests_refused_total{reason="invalid"}', 'flowrt_requests_total{finish_reason="abort"}'
    assert (after[refused] - before[refused], after.get(aborted, 0) - before.get(aborted, 0)) == (6, 0)


def test_live_state_counts_what_the_graph_did(server: Server) -> None:
    before = server.json("/page/state")
    server.json("/v1/completions", SHORT)
    state = server.json("/page/state")
    assert state["num_generation_tokens"] - before["num_generation_tokens"] == 20
    assert {each["name"] for each in state["processes"]} >= {"attention.0", "attention.1", "experts.0", "front_end.0"}
    sent = {(each["source"].partition(".")[0], each["target"].partition(".")[0]) for each in state["edges"] if each["num_bytes"]}
    assert sent >= {("attention", "experts"), ("experts", "attention")}
    pairs = [sum(each["num_pairs"]) for each in state["experts"]]
    assert len(pairs) > 1
    assert all(pairs), "each token has experts in each layer"
    assert (state["requests"][-1]["num_tokens"], state["requests"][-1]["reason"]) == (20, "length")


def test_state_is_served(server: Server) -> None:
    assert server.json("/health") == server.json("/ready") == {"status": "ok"}
    assert server.json("/v1/models")["data"][0]["id"] == "tiny-moe"


def test_bench_serve_counts_the_tokens_that_the_server_counts(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = metrics_of(server)
    for backend, tokenizer in (("openai", None), ("openai-chat", ROOT / "examples" / "tiny-moe")):
        options = LoadOptions(
            backend=backend,  # type: ignore[arg-type]
            port=server.port,
            tokenizer=tokenizer,
            num_prompts=4,
            random_input_len=12,
            random_output_len=5,
            max_concurrency=2,
            request_rate=(200.0, float("inf")),
            save_result=True,
            result_dir=tmp_path,
            result_filename=f"{backend}.json",
        )
        assert bench_serve(options, None)
    results = [json.loads(line) for path in sorted(tmp_path.iterdir()) for line in path.read_text().splitlines()]
    after = metrics_of(server)
    assert [(each["completed"], each["failed"], each["total_output_tokens"]) for each in results] == [(4, 0, 20)] * 4
    assert after["flowrt_generation_tokens_total"] - before["flowrt_generation_tokens_total"] == 80
    num_prompt = sum(each["total_input_tokens"] for each in results)
    assert after["flowrt_prompt_tokens_total"] - before["flowrt_prompt_tokens_total"] == num_prompt
    assert capsys.readouterr().out.count(" Serving Benchmark Result ") == 4


def test_deaths_of_processes_and_the_end_of_the_server() -> None:
    """One server for all, because a start takes seconds."""
    sets = ("deploy.experts.servers=2", "serving.front_ends=2", "numerics=strict")
    with closing(Server(*(word for each in sets for word in ("--set", each)), *STANDS_STILL, "--drain-seconds", "600")) as server:
        expected = text_of(list(server.stream(LONG)))
        for name in ("experts.0", "attention.0"):
            check_streams_survive(server, name, expected)
        with ExitStack() as stack:
            check_front_end_dies_alone(server, stack)
        check_streams_finish_when_stopped(server)
        assert server.process.wait(SECONDS) == 0


def check_streams_survive(server: Server, name: str, expected: str) -> None:
    """A process of the graph dies: each stream goes on and has the same text."""
    streams = [server.stream(LONG) for _ in range(3)]
    first = [next(stream) for stream in streams]
    server.kill(name)
    assert [text_of([event, *stream]) for event, stream in zip(first, streams, strict=True)] == [expected] * 3
    server.wait_back(name)


def check_front_end_dies_alone(server: Server, stack: ExitStack) -> None:
    """Its connections break, and its requests are cancelled; connections of the other front end, and new ones, do not break."""
    connections: dict[str, http.client.HTTPConnection] = {}
    while len(connections) < 2:
        connection = server.connect()
        stack.callback(connection.close)
        connection.request("GET", "/ready")
        connection.getresponse().read()
        connections.setdefault(owner_of(server, connection), connection)
    broken, other = connections["front_end.0"], connections["front_end.1"]
    with server.stopped(*GROUPS):
        broken.request("POST", "/v1/completions", json.dumps(LONG | {"stream": True}), JSON)
        response = broken.getresponse()
        server.kill("front_end.0")
        with pytest.raises((http.client.HTTPException, OSError)):
            response.read()
        other.request("GET", "/version")
        assert other.getresponse().status == 200
    assert server.json("/v1/completions", SHORT)["usage"]["completion_tokens"] == 20
    while metrics_of(server)["flowrt_requests_active"]:
        time.sleep(0.01)
    server.wait_back("front_end.0")


def owner_of(server: Server, connection: http.client.HTTPConnection) -> str:
    """The front end that has accepted the connection. The system's table may miss one while others come and go."""
    while True:
        for name in ("front_end.0", "front_end.1"):
            if has_connection(server.pids[name], connection):
                return name


def check_streams_finish_when_stopped(server: Server) -> None:
    with server.stopped(*GROUPS):
        response = server.open_stream(LONG)
        server.process.terminate()
        server.wait_for("stopping")
        for path, body in (("/ready", None), ("/v1/completions", LONG)):
            with server.request(path, body) as refused:
                assert refused.status == 503
    with response:
        assert list(events_of(response))[-1]["choices"][0]["finish_reason"] == "length"


def has_connection(pid: int, connection: http.client.HTTPConnection) -> bool:
    port = connection.sock.getsockname()[1]
    return any(each.raddr and each.raddr.port == port for each in psutil.Process(pid).net_connections("tcp"))


@pytest.mark.parametrize(
    ("end", "drain_seconds", "code"),
    [("killed", 600, -signal.SIGKILL), ("second signal", 600, INTERRUPTED), ("no time left", 0.1, SUCCESS)],
)
def test_streams_that_a_server_cannot_finish_end_with_an_error_event(end: str, drain_seconds: float, code: int) -> None:
    with closing(Server("--set", "deploy.processes=2", *STANDS_STILL, "--drain-seconds", str(drain_seconds))) as server:
        front_end = psutil.Process(server.pids["front_end.0"])
        with server.stopped(*GROUPS), server.open_stream(LONG) as response:
            if end == "killed":
                server.process.kill()
            else:
                server.process.terminate()
                server.wait_for("stopping")
            if end == "second signal":
                server.process.terminate()
            assert list(events_of(response))[-1]["error"]["type"] == "server_error"
        while is_running(front_end):
            time.sleep(0.01)
        assert server.process.wait(SECONDS) == code


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_error_that_ends_a_server_at_work_is_no_bad_input(is_ready: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a request log whose disk is full."""

    async def fail() -> None:
        raise UserError("the request log cannot be used")

    session = cast(Any, ServeSession.__new__(ServeSession))
    session._is_ready, session._serve = is_ready, fail
    if is_ready:
        assert asyncio.run(session._run()) == 1
        assert capsys.readouterr().err.endswith("error: the request log cannot be used\n")
    else:
        with pytest.raises(UserError):
            asyncio.run(session._run())


def test_address_that_others_reach_needs_a_key() -> None:
    assert "give --api-key KEY" in refusal(flowrt("serve", GRAPH, "--host", "0.0.0.0", "--port", "0"))


def test_address_in_use_is_one_line(server: Server) -> None:
    error = refusal(flowrt("serve", GRAPH, "--port", str(server.port)))
    assert re.fullmatch(r"flowrt: error: 127.0.0.1:\d+ is in use by another program; give another --port\n", error)
