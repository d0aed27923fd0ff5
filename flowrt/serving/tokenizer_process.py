"""Tokenizes prompts in a separate process: `python -m flowrt.serving.tokenizer_process`.

The loop that relays tokens and reports deaths must not wait for a long text. A model directory is untrusted: its chat template and the
patterns of its tokenizer may run without end or take any amount of memory. So each text has a time limit, after which the process is
killed, and a memory limit. The grammars of structured outputs, which clients write, are compiled there first for the same reason. A process
that something outside has ended or stopped is replaced, and the text goes to the next one. Decoding (tokens to text) is in tokenizer.py.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import msgspec

from flowrt.engine.constraint_builder import ConstraintBuilder
from flowrt.engine.grammar import GrammarError
from flowrt.errors import TokenizerError
from flowrt.sampling_params import SamplingParams
from flowrt.serving.chat import Chat
from flowrt.serving.tokenizer import Tokenizer
from flowrt.structured_outputs import StructuredOutputs
from flowrt.system.process_status import Activity, process_activity
from flowrt.system.signals import end_with_parent

MAX_TEXT_CHARACTERS = 4 << 20
LONG_CHARACTERS = 64 << 10  # texts up to this take some hundredths of a second
TEXT_SECONDS = 10.0  # for one text
START_SECONDS = 30.0  # to load the tokenizer
STALE_SECONDS = 0.2  # for the response to a call that was cancelled
GRAMMAR_SECONDS = 4.0  # for one grammar
MAX_GOOD = 4096  # grammars that are known to be good
FAILED_SECONDS = 30.0  # a grammar that took too much is not tried again for so long: others wait while it is
MEMORY_BYTES = 1 << 30  # for one text, in addition to the tokenizer
_DIED = "the process that tokenizes text has died, of too little memory perhaps"
_FROM_OUTSIDE = {-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
STATUS_SECONDS = 0.2  # from the end of the socket of a process to its exit status
_FIRST_GRAMMAR = SamplingParams(structured_outputs=StructuredOutputs(choice=("a",)))


class _Encode(msgspec.Struct, array_like=True):
    """`add_special_tokens`: those of the tokenizer; None: to a text only. `params`: instead of a prompt, parameters whose constraints are
    compiled."""

    prompt: str | Chat
    max_tokens: int
    add_special_tokens: bool | None = None
    params: SamplingParams | None = None


class _Encoded(msgspec.Struct, array_like=True):
    """The response to a text. `token_ids` is set only if there are at most `max_tokens`. `error`: the reason for a failure, behind the
    `param` that is wrong."""

    num_tokens: int = 0
    token_ids: list[int] = []
    error: str | None = None
    param: str | None = None


class _HitError(Exception):
    """Something outside has ended or stopped the process: the text is not the reason."""


class _TokenizerChild:
    """The OS process and our end of its socket. `vocab_size`, `eos_token_ids`: of the model whose grammars it compiles. `is_for_grammars`:
    it has compiled one before it is ready. Raises TokenizerError when it cannot be started."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Collection[int], is_for_grammars: bool) -> None:
        self.socket, theirs = socket.socketpair()
        self.is_ready = False  # it has loaded the tokenizer
        self.has_grammars = is_for_grammars  # it has compiled one when it is ready
        self.num_stale = 0  # responses that will come for calls that were cancelled
        self.received = bytearray()  # a part of the next response
        self._stop_waiting: Callable[[], None] = lambda: None  # ends the wait of `receive`
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        module = ["-P", "-m", "flowrt.serving.tokenizer_process"]
        numbers = theirs.fileno(), os.getpid(), vocab_size, int(is_for_grammars), *eos_token_ids
        arguments = [*map(str, numbers), str(directory)]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, *module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    # Ctrl-C in the terminal does not signal it. A worker ignores that, and so does its child, which stays in the process
                    # group in which the launcher reaps orphans.
                    start_new_session=signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
                )
        except OSError as error:
            self.socket.close()
            raise TokenizerError(f"the process that tokenizes text cannot be started: {error.strerror}", is_unavailable=True) from error
        self.socket.setblocking(False)

    async def receive(self) -> _Encoded:
        """The next response. A call that is cancelled at any moment loses none of its bytes: what it waits for carries none, as the future
        of a loop's `sock_recv` does. Raises EOFError or OSError at the end of the process."""
        data = self.received
        while not data.endswith(b"\n"):  # the next response comes only after the next request
            try:
                received = self.socket.recv(1 << 20)
            except BlockingIOError:
                await self._wait_for_bytes()
                continue
            if not received:
                raise EOFError
            data += received
        self.received = bytearray()
        return msgspec.json.decode(data, type=_Encoded)

    async def _wait_for_bytes(self) -> None:
        loop, number, ended = asyncio.get_running_loop(), self.socket.fileno(), asyncio.Event()

        def stop() -> None:
            if not ended.is_set():  # else another file may have the number
                ended.set()
                loop.remove_reader(number)

        self._stop_waiting = stop
        loop.add_reader(number, stop)
        try:
            await ended.wait()
        finally:
            stop()

    def was_killed(self) -> bool:
        """Whether something outside has ended the process, whose socket has ended: the exit status follows at once."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(STATUS_SECONDS) in _FROM_OUTSIDE
        return False

    def kill(self) -> None:
        self._stop_waiting()
        self.socket.close()
        self.process.kill()
        self.process.wait()


class TokenizerProcess:
    """The client of the tokenizer process of one model directory. Texts are encoded one at a time, in the order of the calls.

    A text that takes too long ends the process, also one whose call was cancelled; the next call starts another one. `vocab_size`,
    `eos_token_ids`: of the model. `is_for_grammars`: the process compiles a grammar before the first call, and starts again at once.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        *,
        is_for_grammars: bool = False,
        text_seconds: float = TEXT_SECONDS,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._directory, self._vocab_size, self._is_for_grammars = directory, vocab_size, is_for_grammars
        self._eos_token_ids = tuple(eos_token_ids)
        self._text_seconds, self._start_seconds = text_seconds, start_seconds
        self._child: _TokenizerChild | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()
        self._good: dict[bytes, None] = {}  # digests of constraints that can be compiled, the latest used last
        self._failed: dict[bytes, tuple[float, TokenizerError]] = {}  # of those that took too much: until when, and the error

    def start(self) -> _TokenizerChild:
        """Start the process if there is none, without waiting for it. Raises TokenizerError."""
        if self._is_closed:
            raise TokenizerError("the graph was closed", is_unavailable=True)
        if self._child is None:
            self._child = _TokenizerChild(self._directory, self._vocab_size, self._eos_token_ids, self._is_for_grammars)
        return self._child

    async def encode(self, prompt: str | Chat, *, max_tokens: int, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text or of a chat, both of which were checked. `add_special_tokens`: None: to a text only. Raises
        TokenizerError."""
        num_characters = _num_characters(prompt)
        if num_characters > MAX_TEXT_CHARACTERS:
            raise TokenizerError(f"the text has {num_characters} characters, it may have at most {MAX_TEXT_CHARACTERS}")
        async with self._turn:
            await self._skip_stale()
            try:
                encoded = await self._exchange(_Encode(prompt, max_tokens, add_special_tokens), self._text_seconds)
            except Exception:
                self._kill()  # the next call must not receive its late response
                raise
        if encoded.error is not None:
            raise TokenizerError(encoded.error, param=encoded.param)
        if encoded.num_tokens > max_tokens:
            raise TokenizerError(too_long(encoded.num_tokens, max_tokens), is_too_long=True)
        return encoded.token_ids

    async def check(self, params: SamplingParams) -> None:
        """Raises TokenizerError for structured outputs or bad words that cannot be compiled for this model, or not in time."""
        if params.structured_outputs is None and not params.bad_words:
            return
        only = SamplingParams(structured_outputs=params.structured_outputs, bad_words=params.bad_words)
        digest = blake2b(msgspec.msgpack.encode(only), digest_size=16).digest()
        now = asyncio.get_running_loop().time
        if digest not in self._good:
            async with self._turn:
                self._failed = {each: failed for each, failed in self._failed.items() if failed[0] > now()}
                if digest in self._failed:
                    failed = self._failed[digest][1]
                    raise TokenizerError(failed.text, param=failed.param)
                await self._skip_stale()
                try:
                    checked = _Encoded()
                    if only.structured_outputs is not None and not self.start().has_grammars:  # it reads the tokenizer once more
                        checked = await self._exchange(_Encode("", 0, None, _FIRST_GRAMMAR), self._start_seconds)
                        self.start().has_grammars = checked.error is None
                    if checked.error is None:
                        checked = await self._exchange(_Encode("", 0, None, only), GRAMMAR_SECONDS)
                except Exception as error:
                    if isinstance(error, TokenizerError) and isinstance(error.__context__, TimeoutError):
                        self._failed[digest] = now() + FAILED_SECONDS, error
                    self._kill()
                    if self._is_for_grammars and not self._is_closed:
                        with suppress(TokenizerError):  # the next call tries again
                            self.start()
                    raise
            if checked.error is not None:
                raise TokenizerError(checked.error, param=checked.param)
        self._good.pop(digest, None)
        self._good[digest] = None
        if len(self._good) > MAX_GOOD:
            del self._good[next(iter(self._good))]

    def close(self) -> None:
        """End the process; no later call starts another one. Idempotent."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    async def _skip_stale(self) -> None:
        """Drop the responses to calls that were cancelled. A process that does not send them soon is ended."""
        child = self._child
        if child is None or not child.num_stale:
            return
        try:
            async with asyncio.timeout(STALE_SECONDS):
                while child.num_stale:
                    await child.receive()
                    child.num_stale -= 1
        except (OSError, EOFError):  # also TimeoutError
            self._kill()

    async def _ready_child(self) -> _TokenizerChild:
        """The process, once it has loaded the tokenizer."""
        child = self.start()
        if not child.is_ready:
            try:
                async with asyncio.timeout(self._start_seconds):
                    ready = await child.receive()
            except TimeoutError:
                text = f"the process that tokenizes text has not loaded in {self._start_seconds:g} s"
                raise TokenizerError(f"{text}: is it stopped, or the machine overloaded?", is_unavailable=True) from None
            except (OSError, EOFError) as error:
                if child.was_killed():
                    raise _HitError from error
                raise TokenizerError(_DIED, is_unavailable=True) from error
            if ready.error is not None:
                raise TokenizerError(ready.error, is_unavailable=True)
            child.is_ready = True
        return child

    async def _exchange(self, request: _Encode, seconds: float) -> _Encoded:
        """The response, of a second process if the first one was hit from outside."""
        if self._child is not None and self._child.process.poll() is not None:  # while it had nothing to do
            self._kill()
        try:
            return await self._try_exchange(request, seconds)
        except _HitError:
            self._kill()
        try:
            return await self._try_exchange(request, seconds)
        except _HitError as error:
            raise TokenizerError("the process that tokenizes text was killed or stopped twice", is_unavailable=True) from error

    async def _try_exchange(self, request: _Encode, seconds: float) -> _Encoded:
        child, loop = await self._ready_child(), asyncio.get_running_loop()
        param = None if request.params is None else _param_of(request.params)
        try:
            async with asyncio.timeout(seconds):
                try:
                    await loop.sock_sendall(child.socket, _line(request))
                except asyncio.CancelledError:  # perhaps a part of it
                    self._kill()
                    raise
                try:
                    return await child.receive()
                except asyncio.CancelledError:
                    child.num_stale += 1
                    raise
        except TimeoutError:
            if process_activity(child.process.pid) is Activity.STOPPED:
                raise _HitError from None
            if param is None:
                raise TokenizerError(f"the text was not tokenized within {seconds:g} s") from None
            raise TokenizerError(f"cannot be compiled within {seconds:g} s; write a smaller grammar", param=param) from None
        except (OSError, EOFError) as error:
            if child.was_killed():
                raise _HitError from error
            if param is None:
                raise TokenizerError(_DIED, is_unavailable=True) from error
            raise TokenizerError("takes too much memory or nests too deep; write a smaller grammar", param=param) from error


class TokenizerProcesses:
    """The tokenizer processes of one model directory: long texts wait for each other, and no other text waits for them. So do grammars."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        self.directory, self.vocab_size, self.eos_token_ids = directory, vocab_size, eos_token_ids
        self._short, self._long = TokenizerProcess(directory, vocab_size), TokenizerProcess(directory, vocab_size)
        self._grammars = TokenizerProcess(directory, vocab_size, eos_token_ids, is_for_grammars=True)

    def start(self) -> None:
        """Start the processes for short texts and, if they can be compiled, for grammars, without waiting for them. The first long text
        starts the third one. Raises TokenizerError."""
        self._short.start()
        if find_spec("llguidance") is not None:
            self._grammars.start()

    async def encode(self, prompt: str | Chat, *, max_tokens: int, add_special_tokens: bool | None = None) -> list[int]:
        """Encodes as TokenizerProcess.encode does."""
        process = self._long if _num_characters(prompt) > LONG_CHARACTERS else self._short
        return await process.encode(prompt, max_tokens=max_tokens, add_special_tokens=add_special_tokens)

    async def check(self, params: SamplingParams) -> None:
        """Checks as TokenizerProcess.check does."""
        await self._grammars.check(params)

    def close(self) -> None:
        """End the processes. Idempotent."""
        for process in (self._short, self._long, self._grammars):
            process.close()


def _num_characters(prompt: str | Chat) -> int:
    return len(prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode())


def _param_of(params: SamplingParams) -> str:
    """The parameter that takes time or memory to compile."""
    return "bad_words" if params.structured_outputs is None else "structured_outputs"


def too_long(num_tokens: int, max_tokens: int) -> str:
    return f"prompt of {num_tokens} tokens is longer than the {max_tokens} that the model and this graph can take"


def _line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


# In the process


def main() -> None:
    """Encode the texts that arrive until the socket closes. The arguments are those of _TokenizerChild."""
    (number, parent, vocab_size, is_for_grammars, *eos_token_ids), directory = map(int, sys.argv[1:-1]), Path(sys.argv[-1])
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    with socket.socket(fileno=number) as channel, channel.makefile("rwb") as file:
        try:
            tokenizer = Tokenizer(directory)
            _limit_memory()
        except Exception as error:
            file.write(_line(_Encoded(error=str(error))))
            return
        builder = ConstraintBuilder(directory, vocab_size, eos_token_ids)
        if is_for_grammars:
            _check(builder, _FIRST_GRAMMAR)
        file.write(_line(_Encoded()))
        file.flush()
        for line in file:
            request = msgspec.json.decode(line, type=_Encode)
            if request.params is not None:
                file.write(_line(_check(builder, request.params)))
            else:
                file.write(_line(_encode(tokenizer, request)))
            file.flush()


def _encode(tokenizer: Tokenizer, request: _Encode) -> _Encoded:
    try:
        prompt, special = request.prompt, request.add_special_tokens
        if isinstance(prompt, str):
            token_ids = tokenizer.encode(prompt, special is not False)
        else:
            token_ids = tokenizer.encode_chat(prompt, special is True)
    except TokenizerError as error:
        return _Encoded(error=error.text, param=error.param)
    except Exception as error:
        return _Encoded(error=f"the text cannot be tokenized: {type(error).__name__}: {error}")
    return _Encoded(len(token_ids), token_ids if len(token_ids) <= request.max_tokens else [])


def _check(builder: ConstraintBuilder, params: SamplingParams) -> _Encoded:
    try:
        builder.constraint(params)
    except GrammarError as error:
        return _Encoded(error=error.text, param=error.param)
    except Exception as error:
        return _Encoded(error=f"cannot be compiled: {type(error).__name__}: {error}", param=_param_of(params))
    return _Encoded()


def _limit_memory() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        for limit in resource.getrlimit(resource.RLIMIT_AS):  # a lower one of the user's stays
            most = most if limit == resource.RLIM_INFINITY else min(most, limit)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
