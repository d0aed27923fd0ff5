"""`flowrt chat`: a conversation at a prompt line, over OpenAI's API: with a model that it starts, or with a server that is up."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from flowrt.cli.options import ChatOptions, ChatSamplingOptions, ServeCommandOptions, check_api_key
from flowrt.cli.prompts import checked_options, checked_template_kwargs
from flowrt.cli.text import OutputStream, one_line, visible
from flowrt.cli.view import EMPTY_ANSWER
from flowrt.errors import FAILURE, NO_READER, SUCCESS, NotRunningError, UserError
from flowrt.sampling_params import check_text
from flowrt.seams import RealClock

if TYPE_CHECKING:
    from flowrt.bench.load.http_client import ServerAddress

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = """  /system TEXT   replace the system message, and begin again
  /clear         begin a new conversation
  /exit          leave, as Ctrl-D does
Ctrl-C stops an answer; what there is of it stays in the conversation."""
NO_SERVER = "start the server, give its --url, or name a model directory to start here"
_CUT_NOTES = {
    "length": "cut off: the answer has reached the most tokens; --max-tokens sets it",
    "content_filter": "cut off by a filter of the server",
}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def chat(path: Path | None, options: ChatOptions, sampling: ChatSamplingOptions) -> int:
    """Returns the exit code. Raises UserError."""
    given = {name: value for name, value in checked_options(vars(sampling)).items() if value is not False}  # a switch that is off
    check_api_key(options.api_key)
    if options.chat_template_kwargs is not None:
        given["chat_template_kwargs"] = checked_template_kwargs(options.chat_template_kwargs)
    if path is not None and options.url is not None:
        raise UserError("give a graph file or model directory, or the --url of a server, not both")
    address = address_of_graph(path, options.url, starts=bool(options.overrides))
    if path is None or address is not None:
        if options.overrides:
            raise UserError("--set is for a graph that is started; give a graph file or model directory, or leave it out")
        return _converse(address or _address_of(DEFAULT_URL), options, given)
    from flowrt.cli.up import start

    started = start(path, ServeCommandOptions(port=0, overrides=options.overrides), f"chat-{os.getpid()}", ends_with_parent=True)
    if not started.url:
        return started.code
    try:
        return _converse(_address_of(started.url), options, given)
    finally:
        os.kill(started.pid, signal.SIGTERM)
        os.waitpid(started.pid, 0)


def address_of_graph(path: Path | None, url: str | None, starts: bool) -> ServerAddress | None:
    """Where the server is, if one is up: at a URL, or the graph of this name, unless a file or folder has the name from which it was not
    started, or is to be started once more (`starts`); without both, the only graph that is up. None: there is none. Raises UserError."""
    from flowrt.bench.load.http_client import ServerAddress
    from flowrt.graph.default import url_of
    from flowrt.serving.run_folder import find_graph, found_graphs
    from flowrt.serving.socket_client import new_client

    if url := url or url_of(str(path or "")):
        return _address_of(url)
    graphs = {each.name: each for each in found_graphs()}
    if path is None:
        if not any(each.is_alive for each in graphs.values()):
            return None
    elif path.exists():
        named = graphs.get(str(path))
        described = None if named is None or not named.is_alive else named.description
        if starts or described is None or described.graph != str(path.absolute()):
            return None
    elif str(path) not in graphs:
        if graphs and not path.suffix and len(path.parts) == 1:
            raise UserError(f"{path}: no such graph, file or folder; there is {', '.join(graphs)}")
        return None
    found = find_graph(None if path is None else str(path))
    try:
        new_client(found)
    except NotRunningError as error:
        raise UserError(str(error)) from None
    return ServerAddress(found.name, 0, False, "", str(found.socket))


def _address_of(url: str) -> ServerAddress:
    from flowrt.bench.load.http_client import ServerAddress

    return ServerAddress.of(url.rstrip("/").removesuffix("/v1"), "--url")


def _converse(address: ServerAddress, options: ChatOptions, given: Mapping[str, Any]) -> int:
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    session = ChatSession(address, headers, options.system, given, OutputStream(sys.stdout))
    return session.run(options.model_name)


class ChatSession:
    """One conversation. `given`: fields of each request. What the user types is read by the terminal's line editor, with history."""

    def __init__(self, address: Any, headers: Mapping[str, str], system: str | None, given: Mapping[str, Any], out: OutputStream) -> None:
        self._address, self._headers, self._given, self._out = address, headers, given, out
        self._is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._has_ended = False  # by a signal that is not Ctrl-C
        self._has_styles = out.isatty()
        self._messages: list[dict[str, str]] = []
        self._begin(system)

    def run(self, model: str | None) -> int:
        """Goes on until the end of the input. Returns the exit code: of piped input, 1 once an answer has failed. Raises KeyboardInterrupt
        when a signal ends it: Ctrl-C at a terminal does not."""
        self._endings = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.default_int_handler]
        self._catch_endings()
        self._model = model or asyncio.run(self._first_model())
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # `_answer` refuses lines that are not text
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  (input() then edits lines, and keeps them)
            self._out.write_now(f"{visible(self._model)} at {self._address.authority}; /help lists the commands\n")
        code = SUCCESS
        while True:
            try:
                line = input("> " if self._is_terminal else "").strip()
            except EOFError:
                if self._is_terminal:
                    self._out.write_now("\n")
                return code
            except KeyboardInterrupt:
                if not self._is_terminal or self._has_ended:
                    raise
                self._out.write_now("\n")  # as in a shell: the line is dropped
                continue
            if line.split(maxsplit=1)[:1] == ["/exit"]:
                return code
            if line.startswith("/") and self._is_terminal:
                self._command(line)
            elif line and not self._answer(line) and not self._is_terminal:
                code = FAILURE
            if self._out.is_broken:
                return FAILURE if self._out.has_lost_output else NO_READER

    def _catch_endings(self) -> None:
        for number in self._endings:
            signal.signal(number, self._end)

    def _end(self, *_: object) -> NoReturn:
        self._has_ended = True
        raise KeyboardInterrupt

    def _end_request(self, task: asyncio.Task[None]) -> None:
        self._has_ended = True
        task.cancel()

    def _begin(self, system: str | None) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name in ("/system", "/clear"):
            first = self._messages[0] if self._messages else {"role": ""}
            self._begin(text.strip() if name == "/system" else first["content"] if first["role"] == "system" else None)
            system = f"the system message: {one_line(self._messages[0]['content'])}" if self._messages else "no system message"
            self._out.write_now(f"(a new conversation, with {system})\n")
        else:
            self._out.write_now(("" if name == "/help" else f"there is no command {one_line(name)}\n") + HELP + "\n")

    def _answer(self, line: str) -> bool:
        """Print the answer as it comes, and keep it. False when the request failed: then, as without an answer, the conversation is as
        before."""
        from flowrt.bench.load.record import EventReader, RequestRecord

        try:
            check_text(line)
        except ValueError as error:
            self._out.write_now(f"(error: the line {error})\n")
            return False
        self._messages.append({"role": "user", "content": line})
        record = RequestRecord(0)
        printer = _AnswerPrinter(self._out, self._has_styles)
        is_stopped = True
        with suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(self._request(record, EventReader(record, RealClock().now, printer.on_event)))
            is_stopped = False
        self._catch_endings()
        if is_stopped:
            printer.end("stopped")
            if not self._is_terminal or self._has_ended:
                raise KeyboardInterrupt
        else:
            printer.end(f"error: {one_line(record.error)}" if record.error else printer.note)
        text = "".join(record.texts)
        if record.error or not text:
            self._messages.pop()
            return not record.error
        self._messages.append({"role": "assistant", "content": text})
        return True

    async def _request(self, record: Any, reader: Any) -> None:
        from flowrt.bench.load.http_client import ConnectionFailedError, HttpClient

        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in self._endings:  # as asyncio does with Ctrl-C: an exception inside a callback may be swallowed
            loop.add_signal_handler(number, self._end_request, task)
        fields = {"model": self._model, "messages": self._messages, "stream": True, **self._given}
        try:
            async with HttpClient(self._address, self._headers) as client:
                reader.finish(await client.request("POST", "/v1/chat/completions", msgspec.json.encode(fields), reader.read))
        except (ConnectionFailedError, ValueError) as error:
            if not self._is_terminal and isinstance(error, ConnectionFailedError) and error.is_unused:
                raise UserError(f"{error}; {NO_SERVER}") from None
            record.error = record.error or str(error)

    async def _first_model(self) -> str:
        from flowrt.bench.load.http_client import HttpClient
        from flowrt.bench.load.send import first_model

        async with HttpClient(self._address, self._headers) as client:
            return await first_model(client, NO_SERVER, "--model-name", "--api-key KEY or OPENAI_API_KEY")


class _AnswerPrinter:
    """Writes the text of events. Reasoning is dim where there are styles, and left out elsewhere."""

    def __init__(self, out: OutputStream, has_styles: bool) -> None:
        self._out, self._has_styles = out, has_styles
        self._is_dim, self._ends_line = False, True
        self.note = EMPTY_ANSWER

    def on_event(self, event: Any) -> None:
        for choice in event.choices[:1]:
            delta = choice.delta
            if delta is not None and delta.thought:
                self.note = "no answer behind the reasoning" if self.note == EMPTY_ANSWER else self.note
                if self._has_styles:
                    self._write(delta.thought, is_dim=True)
            if delta is not None and (text := delta.content or delta.refusal):
                self._write(text, is_dim=False)
            if delta is not None and delta.tool_calls:
                self.note = "the model calls a tool, which a chat in the terminal has not"
            if choice.finish_reason in _CUT_NOTES:
                self.note = _CUT_NOTES[choice.finish_reason]

    def end(self, note: str) -> None:
        self._style(False)
        if note:
            self._out.write("\n" if not self._ends_line else "")
            self._out.write(f"({note})")
        self._out.write_now("\n")

    def _write(self, text: str, is_dim: bool) -> None:
        if is_dim != self._is_dim and not is_dim:
            self._out.write("\n")
        self._style(is_dim)
        self._out.write_now(visible(text))
        self._ends_line, self.note = text.endswith("\n"), "" if not is_dim else self.note

    def _style(self, is_dim: bool) -> None:
        if is_dim != self._is_dim:
            self._out.write(_DIM if is_dim else _PLAIN)
            self._is_dim = is_dim
