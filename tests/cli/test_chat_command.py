"""`flowrt chat`: a real terminal and pipes, against a hand-written server and against a model that the command starts."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from subprocess import PIPE
from typing import Any

import msgspec
import pytest
from cli.conftest import PLENTY_SECONDS, environment, finished, refusal

from flowrt.bench.load.http_client import ServerAddress
from flowrt.cli.chat import address_of_graph, chat
from flowrt.cli.options import ChatOptions, ChatSamplingOptions
from flowrt.errors import UserError
from flowrt.serving import run_folder
from flowrt.serving.run_folder import VARIABLE, Description, FoundGraph, claim

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def chunk(reason: str | None = None, **delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ANSWERS = {
    "Hi": [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="hmm"),
        chunk(content="Hel"),
        chunk("stop", content="lo\x1b[2J"),
        DONE,
    ],
    "cut": [chunk("length", content="1 2 3"), DONE],
    "nothing": [chunk("stop"), DONE],
    "think": [chunk(reasoning="only a thought"), chunk("stop"), DONE],  # as other servers name it
    "refuse": [chunk(refusal="I will not."), chunk("stop"), DONE],
    "filtered": [chunk("content_filter"), DONE],
}


@dataclass
class Server:
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    server_port = 0

    def server_bind(self) -> None:
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:  # type: ignore[override]
        return self.socket.accept()[0], ("", 0)


@contextmanager
def served(path: Path | None = None) -> Iterator[Server]:
    """Answers by the last user message. "slow": one token, and then no other until the client has left; any other: HTTP 400. `path`: of
    a unix socket."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._respond(200, [b'{"data": [{"id": "toy"}]}'])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.bodies.append(body)
            content = body["messages"][-1]["content"]
            if content == "slow":
                self._respond(200, [chunk(content="so")])
                server.hold.wait(PLENTY_SECONDS)
            elif content in ANSWERS:
                self._respond(200, ANSWERS[content])
            else:
                self._respond(400, [b'{"error": {"message": "no such question"}}'])

        def _respond(self, status: int, pieces: list[bytes]) -> None:
            self.send_response(status)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) if path is None else UnixServer(str(path), Handler) as http:  # type: ignore[arg-type]
        server.port = http.server_port
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.hold.set()
            http.shutdown()
            thread.join()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "flowrt", "chat", *words]


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return finished(command(*words), input=text)


class Terminal:
    """The other side of a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        attributes = termios.tcgetattr(theirs)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        self.process = subprocess.Popen(
            command(*words), stdin=theirs, stdout=theirs, stderr=theirs, env=environment() | {"TERM": "dumb"}, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the controlling terminal, for Ctrl-C
        )  # fmt: skip
        os.close(theirs)
        self._unread = ""

    def expect(self, text: str) -> None:
        """Read up to the end of this text."""
        while text not in self._unread:
            assert select.select([self._ours], [], [], PLENTY_SECONDS)[0], f"{text!r} does not come: {self._unread!r}"
            self._unread += os.read(self._ours, 4096).decode()
        self._unread = self._unread.partition(text)[2]

    def repeat_until(self, text: str, action: Callable[[], object]) -> None:
        """The line editor misses a signal between its prompt and its wait for a key."""
        while text not in self._unread:
            action()
            while text not in self._unread and select.select([self._ours], [], [], 0.2)[0]:
                self._unread += os.read(self._ours, 4096).decode()
        self.expect(text)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> int:
        code = self.process.wait(PLENTY_SECONDS)
        os.close(self._ours)
        return code


def test_conversation_in_a_terminal() -> None:
    with served() as server:
        terminal = Terminal("--url", f"http://127.0.0.1:{server.port}/v1", "--system", "Be brief.", "--max-tokens", "9")
        terminal.expect("toy at 127.0.0.1")
        terminal.expect("> ")
        terminal.type("Hi\n")
        terminal.expect("lo\\x1b[2J")  # what a model writes moves no cursor
        terminal.expect("> ")
        terminal.type("slow\n")
        terminal.expect("so")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.type("nothing\n")
        terminal.expect("(empty: the model ended its answer at once)")
        terminal.expect("> ")
        cut = "(cut off by a filter of the server)"
        for question, shown in (("think", "only a thought"), ("refuse", "I will not."), ("filtered", cut)):
            terminal.type(f"{question}\n")
            terminal.expect(shown)
            if question == "think":
                terminal.expect("(no answer behind the reasoning)")
            terminal.expect("> ")
        terminal.type("/system Rhyme.\n")
        terminal.expect("(a new conversation, with the system message: Rhyme.)")
        terminal.expect("> ")
        terminal.type("cut\n")
        terminal.expect("cut off")
        terminal.expect("> ")
        terminal.type("/help\n")
        terminal.expect("/clear")
        terminal.expect("> ")
        terminal.type("/exit now\n")
        assert terminal.close() == 0
    contents = [[each["content"] for each in body["messages"]] for body in server.bodies]
    first = ["Be brief.", "Hi"]
    before = [*first, "Hello\x1b[2J", "slow", "so"]
    unanswered = [[*before, question] for question in ("nothing", "think", "refuse", "filtered")]
    assert contents == [first, [*first, "Hello\x1b[2J", "slow"], *unanswered, ["Rhyme.", "cut"]]
    assert {(body["model"], body["stream"], body["max_tokens"]) for body in server.bodies} == {("toy", True, 9)}


def test_piped_lines_are_answered_one_after_another_and_a_failed_one_is_code_1() -> None:
    with served() as server:
        done = piped(
            "Hi\n\nwhat?\ncut\n", "--url", f"http://127.0.0.1:{server.port}", "--chat-template-kwargs", '{"enable_thinking": false}'
        )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[:2] == ["Hello\\x1b[2J", "(error: HTTP 400: no such question)"]
    assert done.stdout.splitlines()[2:] == ["1 2 3", "(cut off: the answer has reached the most tokens; --max-tokens sets it)"]
    assert [each["content"] for each in server.bodies[-1]["messages"]] == ["Hi", "Hello\x1b[2J", "cut"]
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_chat_with_a_pipe(number: signal.Signals) -> None:
    with served() as server:
        words = command("--url", f"http://127.0.0.1:{server.port}", "--model-name", "toy")
        process = subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=environment())
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("slow\nHi\n")
        process.stdin.flush()
        assert process.stdout.read(2) == "so"
        process.send_signal(number)
        out, error = process.communicate(timeout=PLENTY_SECONDS)
    assert (process.returncode, out, error) == (130, "\n(stopped)\n", "flowrt: interrupted\n")


def test_a_chat_at_a_terminal_ends_by_every_signal_but_ctrl_c() -> None:
    with served() as server:
        terminal = Terminal("--url", f"http://127.0.0.1:{server.port}")
        terminal.expect("> ")
        terminal.repeat_until("> ", lambda: terminal.type("\x03"))
        terminal.repeat_until("flowrt: interrupted", lambda: terminal.process.send_signal(signal.SIGTERM))
        assert terminal.close() == 130


def test_what_a_line_cannot_be_and_options_of_0() -> None:
    """An option of 0 asks for something: 0 is greedy."""
    with served() as server:
        words = ["--url", f"http://127.0.0.1:{server.port}", "--temperature", "0", "--seed", "0", "--top-k", "0"]
        done = finished(command(*words), input=b"\xff\xfe\nHi\n", text=False)
    assert (done.returncode, done.stderr) == (1, b"")
    assert done.stdout.splitlines()[0].startswith(b"(error: the line holds half a character")
    (body,) = server.bodies
    assert (body["temperature"], body["seed"], body["top_k"]) == (0, 0, 0)
    assert "ignore_eos" not in body


def test_a_chat_ends_when_its_output_has_no_reader() -> None:
    with served() as server:
        words = " ".join(map(shlex.quote, command("--url", f"http://127.0.0.1:{server.port}")))
        done = finished(["sh", "-c", f"yes Hi | {words} | head -1"])
    assert (done.stdout, done.stderr) == ("Hello\\x1b[2J\n", "")


def test_piped_lines_without_a_server_are_one_error() -> None:
    error = refusal(piped("Hi\nHi\n", "--url", "http://127.0.0.1:1", "--model-name", "toy"))
    assert "cannot be reached" in error
    assert "start the server, give its --url, or name a model directory to start here" in error


def test_model_is_started_and_stopped(tmp_path: Path) -> None:
    done = piped("What is 347 + 285?\n", str(QUICKSTART), "--set", "deploy.processes=one", "--temperature", "0")
    assert (done.returncode, done.stdout.split()) == (0, ["632"]), done.stderr


@pytest.mark.parametrize("name", [None, Path("mine")])
def test_graph_that_is_up_is_found(name: Path | None, short_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv(VARIABLE, str(short_path))
    dead = claim("dead")
    os.close(dead._lock)
    folder = claim("mine")
    plain = Description(name="mine", pid=1, graph="/g.yaml", model="m", url="u", started=0.0, drain_seconds=1.0, max_requests=1)
    folder.describe(plain)
    with pytest.raises(UserError, match="mine is still starting"):
        chat(name, ChatOptions(), ChatSamplingOptions())
    folder.describe(msgspec.structs.replace(plain, is_ready=True, has_api_key=True))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    with served(folder.socket):
        assert chat(name, ChatOptions(), ChatSamplingOptions()) == 0
    assert capfd.readouterr().out == "Hello\\x1b[2J\n"
    folder.remove()
    with pytest.raises(UserError, match="is dead"):
        chat(Path("dead"), ChatOptions(), ChatSamplingOptions())


def test_url_in_place_of_a_graph_is_that_of_a_server(monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    with served() as server:
        assert chat(Path(f"http://127.0.0.1:{server.port}/v1"), ChatOptions(), ChatSamplingOptions()) == 0
    assert capfd.readouterr().out == "Hello\\x1b[2J\n"


@pytest.fixture(autouse=True)
def no_graph_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("path", "options", "sampling", "error"),
    [
        (Path("a.yaml"), {"url": "http://x"}, {}, "not both"),
        (Path("http://x"), {"url": "http://x"}, {}, "not both"),
        (Path("http://x"), {"overrides": ("a=1",)}, {}, "--set is for a graph that is started"),
        (None, {"overrides": ("a=1",)}, {}, "--set is for a graph that is started"),
        (None, {}, {"temperature": -1.0}, "--temperature is -1"),
        (None, {"chat_template_kwargs": "[1]"}, {}, "--chat-template-kwargs is '\\[1\\]', it must be a JSON object"),
        (None, {"api_key": ""}, {}, "--api-key is empty; give a key"),
        (None, {"api_key": "k\u20ac"}, {}, "--api-key must be printable ASCII"),
        (None, {"url": "localhost"}, {}, "--url 'localhost' is not a URL"),
        (None, {"url": "http://127.0.0.1:1"}, {}, "127.0.0.1:1 cannot be reached"),
    ],
)
def test_mistakes_are_one_line(path: Path | None, options: dict[str, Any], sampling: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        chat(path, ChatOptions(**options), ChatSamplingOptions(**sampling))


def test_a_graph_that_is_up_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
    described = {"pid": 1, "model": "m", "url": "", "started": 0.0, "drain_seconds": 1.0, "max_requests": 1, "is_ready": True}

    def found(name: str, graph: Path, is_alive: bool = True) -> FoundGraph:
        return FoundGraph(name, tmp_path / "run" / name, Description(name=name, graph=str(graph), **described), is_alive)

    up = [found("far", Path("/elsewhere/far")), found("mine", tmp_path / "mine"), found("other", Path("/elsewhere/other"))]
    monkeypatch.setattr(run_folder, "found_graphs", lambda: up)

    def address(name: str | None, starts: bool = False) -> ServerAddress | None:
        return address_of_graph(None if name is None else Path(name), None, starts)

    for name in ("far", "mine", "./mine"):
        there = address(name)
        assert there is not None
        assert there.socket.startswith(str(tmp_path / "run"))
    assert address("mine", starts=True) is None, "another one is wanted"
    assert address("other") is None, "that one is of another folder"
    assert address("missing.yaml") is None
    with pytest.raises(UserError, match=r"^mime: no such graph, file or folder; there is far, mine, other$"):
        address("mime")
    up[1] = found("mine", tmp_path / "mine", is_alive=False)
    assert address("mine") is None
    up.clear()
    assert address(None) is None
    assert address("mime") is None
