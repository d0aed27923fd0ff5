"""Serves the requests of a running graph: carries out the gateway's decisions, wakes the clients, and reports progress to health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from flowrt.actors.control import Control, Crashed, Ended, KvLost, KvPulled, Prefilled, Prefilling, RunsAlone, Submit, Tokens
from flowrt.actors.front_end_messages import Origin
from flowrt.actors.mailbox import Mailbox
from flowrt.actors.outputs import ClientEvent, EndEvent, TokenEvent
from flowrt.errors import UserError, shown
from flowrt.gateway.decisions import Decision, ForWorker, SendCancel, SendCompleted, SendRequest
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.log_contents import LogContents
from flowrt.gateway.log_writer import LogWriter
from flowrt.gateway.request_metrics import RequestMetrics
from flowrt.graph.model import Graph
from flowrt.reliability.health import RequestProgress
from flowrt.sampling_params import SamplingParams
from flowrt.seams import Clock

Send = Callable[[str, Control], Awaitable[None]]
ROUNDING_SECONDS = 1e-6  # a timer that is set to a deadline may fire this much before it, because its sums round differently
MAX_UNREAD = 1024  # logs kept of requests that have ended and that no client follows
# The same of a gateway with a request log, which keeps what clients have read too, because they may ask for it again.
KEPT_SECONDS, MAX_KEPT_BYTES = 600.0, 1 << 27
UNATTENDED_SECONDS = 60.0  # that a request goes on when its last client has left, if it may


class Requests:
    """`send(group, control)` waits while the group's control connection is full. `progress` receives the starts, tokens and ends of
    requests, `on_token` the committed tokens."""

    def __init__(
        self,
        gateway: Gateway,
        send: Send,
        progress: RequestProgress,
        clock: Clock,
        on_token: Callable[[TokenEvent], None] | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        self.gateway = gateway
        self._log: LogWriter | None = None  # on disk
        self._send, self._progress, self._clock, self._on_token = send, progress, clock, on_token
        self.metrics = metrics
        self._on_change: dict[int, list[Callable[[], None]]] = {}  # by request: called after new events
        self._in_use: set[int] = set()  # requests that a call submits or follows
        self._unread: dict[int, float] = {}  # requests that have ended and that no call uses, oldest first, and since when
        self._num_unread_bytes = 0
        self._unlogged: set[int] = set()  # requests that the request log does not have, if there is one
        self._unattended: set[int] = set()  # requests that go on for a while when no client follows them
        self._abandoned: dict[int, asyncio.TimerHandle] = {}  # of these, when they are cancelled
        self._by_origin: dict[str, dict[int, int]] = {}  # id of an HTTP request -> number of a prompt -> request
        self._outgoing: dict[str, Mailbox[ForWorker]] = {group: Mailbox(1 << 16) for group in gateway.workers}
        self._senders: dict[str, asyncio.Task[None]] = {}  # one per group: a stopped group does not delay the messages to others
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None  # for the gateway's deadline
        self._failure: Exception | None = None
        self.has_raised_failure = False
        self._is_closing = False
        self._has_drained: asyncio.Event | None = None

    def begin_log(self, log: LogWriter, contents: LogContents) -> tuple[int, ...]:
        """From now on, events are in this request log before any client gets them. Continue the open requests of an earlier launcher, and
        keep those that have ended for clients that ask for them. Returns the numbers of the open ones. Before any other request."""
        self._log, log.on_written = log, self._release
        for index, logged in sorted(contents.requests.items()):
            decisions = self.gateway.restore(logged)
            self._on_change[index] = []
            self.continue_unattended(index)
            if (origin := self.gateway.log(index).origin) is not None:
                self._register(index, origin)
            if logged.end is None:
                now = self._clock.now()
                self._progress.opened(now)
                if self.metrics is not None:
                    self.metrics.admit(index, now)
            elif logged.end.finish_reason == "abort":
                self._let_go(index)
            else:
                self._keep_unread(index)
            self._carry_out(decisions)
        return tuple(index for index, logged in sorted(contents.requests.items()) if logged.end is None)

    def begin(self) -> None:
        """Start one task per group that sends requests and cancels: the run is up. `aclose` ends these tasks. The request log begins, too,
        which its owner closes."""
        if self._log is not None:
            self._log.begin()
        self._has_begun = True
        for group in self._outgoing:
            self._begin_sender(group)

    def _begin_sender(self, group: str) -> None:
        self._senders[group] = asyncio.get_running_loop().create_task(self._send_all(group), name=f"requests of {group}")

    def use(self, graph: Graph) -> None:
        """Place requests in the groups of this graph: in a new one once `readmit_group` is called, in none that is leaving."""
        decisions = self.gateway.use(graph)
        for group in sorted(self.gateway.workers.keys() - self._outgoing.keys()):
            self._outgoing[group] = Mailbox(1 << 16)
            if self._has_begun:
                self._begin_sender(group)
        self._carry_out(decisions)
        for group in sorted(self._outgoing.keys() - self.gateway.workers.keys()):
            del self._outgoing[group]
            if group in self._senders:
                self._senders.pop(group).cancel()

    async def aclose(self) -> None:
        self._is_closing = True
        for timer in (self._timer, *self._abandoned.values()):
            if timer is not None:
                timer.cancel()
        for sender in self._senders.values():
            sender.cancel()
        if self._senders:
            await asyncio.wait(self._senders.values())

    def fail(self, error: Exception) -> None:
        """Make each `follow` raise `error`, once it has yielded the events so far: the run has failed."""
        self._failure = error
        for on_change in [each for readers in self._on_change.values() for each in readers]:
            on_change()
        if self._has_drained is not None:
            self._has_drained.set()

    def leftovers(self) -> list[str]:
        """What is left when all clients have left. With a request log, requests that have ended are kept for those that come back."""
        num_kept, gateway = 0 if self._log is None else len(self._unread), self.gateway
        is_empty = not gateway.num_unfinished and gateway.num_logs == num_kept
        return [] if is_empty else [f"{gateway.num_logs} logs, {num_kept} for clients that come back, {gateway.num_unfinished} unfinished"]

    async def drain(self) -> None:
        """Admit no new requests, and wait until all admitted ones have ended. Raises the run's failure when the run fails first."""
        self.gateway.drain()
        if self._failure is None:
            if self._has_drained is None:  # else another call waits for it
                self._has_drained = asyncio.Event()
            self._note_drained()
            await self._has_drained.wait()
        if self._failure is not None:
            raise self._failure

    async def wait_written(self) -> None:
        """Wait until clients may have all events so far."""
        if self._log is not None:
            await self._log.wait_written()

    async def submit(self, params: SamplingParams, tokenize: Callable[[], Awaitable[Sequence[int]]], *, is_logged: bool = True) -> int:
        """Submit a request and return its number. The request is reserved first; then `tokenize` returns the prompt's token ids.

        is_logged: it goes into the request log, if there is one. A UserError of `tokenize` ends the request with that error. A cancelled or
        failed call cancels the request.
        """
        gateway = self.gateway
        index = self._reserve(gateway.reserve(params), _nothing)
        if not is_logged:
            self._unlogged.add(index)
        try:
            await self._submit(index, tokenize)
        except BaseException:  # the caller has no number, so it cannot end the request
            self._let_go(index)
            raise
        finally:
            self._in_use.discard(index)
        if gateway.has_ended(index):
            self._keep_unread(index)
        return index

    def _reserve(self, index: int, on_change: Callable[[], None]) -> int:
        self._on_change[index] = [on_change]
        self._in_use.add(index)
        return index

    async def _submit(self, index: int, tokenize: Callable[[], Awaitable[Sequence[int]]]) -> None:
        gateway = self.gateway
        if gateway.has_ended(index):
            return
        self._progress.opened(self._clock.now())
        token_ids: Sequence[int] = ()
        error: str | None = None
        try:
            token_ids = await tokenize()
        except UserError as failed:
            error = str(failed)
        if gateway.has_ended(index):  # the run was closed meanwhile
            return
        if error is None:
            self._place(index, token_ids, has_text=True)
        else:
            self._carry_out(gateway.refuse(index, error))

    def _place(self, index: int, prompt_token_ids: Sequence[int], has_text: bool) -> None:
        decisions = self.gateway.place(index, prompt_token_ids)
        if self._log is not None and index not in self._unlogged and not self.gateway.has_ended(index):
            self._log.submit(self.gateway.log(index), has_text)
        self._carry_out(decisions)

    async def follow(self, index: int) -> AsyncGenerator[ClientEvent, None]:
        """Yield the events of a request from the first one on. Leaving early cancels the request.

        Raises UserError for an unknown request or a second reader, and the run's failure when the run fails first.
        """
        gateway = self.gateway
        self._check_known(index)
        if index in self._in_use:
            raise UserError(f"request {index} is followed already; a request has one reader")
        changed, seen = asyncio.Event(), 0
        self._on_change[index] = []
        self.attach(index, changed.set)
        try:
            while True:
                changed.clear()
                for event in gateway.events(index, seen):
                    seen += 1
                    yield event
                    if isinstance(event, EndEvent):
                        return
                if self._failure is not None:
                    self.has_raised_failure = True
                    raise self._failure
                await changed.wait()
        finally:
            self.close(index, changed.set)

    # For a client that calls when it has room for more events.

    def open(self, params: SamplingParams, num_tokens: int, on_change: Callable[[], None]) -> int:
        """Admit a request whose events have no text, see `Gateway.reserve`. Returns its number. `on_change` is called after new events,
        and must not wait. `place` or `close` follows."""
        index = self._reserve(self.gateway.reserve(params, num_tokens=num_tokens, has_text=False), on_change)
        if not self.gateway.has_ended(index):
            now = self._clock.now()
            self._progress.opened(now)
            if self.metrics is not None:
                self.metrics.admit(index, now)
        return index

    def place(self, index: int, prompt_token_ids: Sequence[int], origin: Origin | None = None) -> None:
        """`origin`: by which a front end may find the request again. It takes the place of a former one with this id."""
        self.gateway.log(index).origin = origin
        if origin is not None and self._log is not None:
            self._register(index, origin)
            if origin.is_named:
                self.continue_unattended(index)
        self._place(index, prompt_token_ids, has_text=False)

    def stop_choice(self, index: int, choice: int) -> None:
        self._carry_out(self.gateway.stop_choice(index, choice))

    def find(self, origin_id: str) -> dict[int, int]:
        """The requests of an HTTP request that are known, by the number of the prompt."""
        return dict(self._by_origin.get(origin_id, ()))

    def attach(self, index: int, on_change: Callable[[], None]) -> None:
        """Follow a request, perhaps beside others, from its first event on. `on_change` is as for `open`. `close` follows."""
        if self._unread.pop(index, None) is not None:
            self._num_unread_bytes -= self.gateway.log(index).num_bytes
        self._end_wait(index)
        self._in_use.add(index)
        self._on_change[index].append(on_change)

    def continue_unattended(self, index: int) -> None:
        """From now on the request goes on for UNATTENDED_SECONDS when its clients leave. One that has had no client goes on to its end."""
        self._unattended.add(index)

    def _end_wait(self, index: int) -> None:
        if (timer := self._abandoned.pop(index, None)) is not None:
            timer.cancel()

    def _give_up(self, index: int) -> None:
        """No client has come back. One that has ended is kept as others are."""
        del self._abandoned[index]
        if not self.gateway.has_ended(index):
            self._let_go(index)

    def close(self, index: int, on_change: Callable[[], None]) -> None:
        """A client follows the request no more. The last one's request is cancelled, unless it has ended or goes on for a while, or the run
        has failed: it stays open in the request log."""
        readers = self._on_change[index]
        readers.remove(on_change)
        if readers:
            return
        end = self.gateway.log(index).end
        if self._log is not None and index not in self._unlogged and end is not None and end.finish_reason != "abort":
            self._keep_unread(index)
        elif end is not None or (index not in self._unattended and self._failure is None):
            self._let_go(index)
        elif not self._is_closing and self._failure is None:
            self._abandoned[index] = asyncio.get_running_loop().call_later(UNATTENDED_SECONDS, self._give_up, index)
        self._in_use.discard(index)

    def prompt_token_ids(self, index: int) -> tuple[int, ...]:
        """The prompt token ids of a request; empty when it has none. Raises UserError for an unknown request."""
        self._check_known(index)
        return self.gateway.log(index).prompt_token_ids

    def on_control(self, group: str, control: Control) -> None:
        """Handle a message of the current incarnation of a group, about one of its requests. Ignores other messages."""
        match control:
            case Tokens(tokens):
                self._carry_out([decision for each in tokens for decision in self.gateway.on_token(group, each)])
            case Ended():
                self._carry_out(self.gateway.on_ended(group, control))
            case RunsAlone() | Crashed():
                self._carry_out(self.gateway.on_alone(group, control))
            case Prefilling() | Prefilled() | KvPulled() | KvLost():
                self._carry_out(self.gateway.on_transfer(group, control))

    def lose_group(self, group: str, why: str, *, beside: Sequence[str] = (), **how: bool) -> None:
        """Move the requests of a group; the arguments are those of `Gateway.lose_group`. No-op for other workers."""
        groups = [name for name in (group, *beside) if name in self._outgoing]
        if groups:
            self._carry_out(self.gateway.lose_group(groups[0], why, beside=groups[1:], **how))

    def lose_server(self, server: str, why: str) -> None:
        """Suspect the requests that a crashed server may have computed parts of; see `Gateway.lose_server`."""
        self._carry_out(self.gateway.lose_server(server, why))

    def give_up_group(self, group: str) -> None:
        """Limit the time that requests wait for this lost group. No-op for other workers."""
        if group in self._outgoing:
            self._carry_out(self.gateway.give_up_group(group))

    def readmit_group(self, group: str) -> None:
        """Place requests in a lost group again. No-op for other workers."""
        if group in self._outgoing:
            self._carry_out(self.gateway.readmit_group(group))

    def end_all(self) -> None:
        """End all active requests with reason "abort": the run was closed."""
        self._carry_out(self.gateway.end_all())

    def _check_known(self, index: int) -> None:
        if type(index) is not int or index not in self._on_change:
            kept = f"it can be followed once, and the logs of {MAX_UNREAD} ended requests are kept for it"
            raise UserError(f"there is no request {shown(index)} to follow; submit gives the number, {kept}")

    def _keep_unread(self, index: int) -> None:
        """Keep the log of a request that has ended without a reader, and drop the oldest of too many."""
        if index not in self._unread:
            self._unread[index] = now = self._clock.now()
            self._num_unread_bytes += self.gateway.log(index).num_bytes
            while len(self._unread) > MAX_UNREAD or (self._log is not None and self._keeps_too_much(now)):
                self._let_go(next(iter(self._unread)))

    def _keeps_too_much(self, now: float) -> bool:
        oldest = next(iter(self._unread.values()), now)
        return oldest < now - KEPT_SECONDS or self._num_unread_bytes > MAX_KEPT_BYTES

    def _register(self, index: int, origin: Origin) -> None:
        known = self._by_origin.setdefault(origin.id, {})
        if origin.prompt in known or not origin.prompt:  # another HTTP request with this id, of which some prompts may be known no more
            known.clear()
        known[origin.prompt] = index

    def _let_go(self, index: int) -> None:
        """Cancel a request without a reader, unless it has ended, and drop its log."""
        log = self.gateway.log(index)
        if self._unread.pop(index, None) is not None:
            self._num_unread_bytes -= log.num_bytes
        self._carry_out(self.gateway.cancel(index))
        if log.end is not None:
            self.gateway.forget(index)
        del self._on_change[index]
        self._end_wait(index)
        self._unattended.discard(index)
        if self._log is not None and index not in self._unlogged:
            self._log.forget(index)
        self._unlogged.discard(index)
        if log.origin is not None and (known := self._by_origin.get(log.origin.id, {})).get(log.origin.prompt) == index:
            del known[log.origin.prompt]
            if not known:
                del self._by_origin[log.origin.id]

    def _carry_out(self, decisions: Iterable[Decision]) -> None:
        """Send what is for workers now, and what is for clients once it is in the request log, if there is one."""
        now, events = self._clock.now(), list[ClientEvent]()
        for decision in decisions:
            if isinstance(decision, ForWorker):
                if self.metrics is not None:
                    _count(self.metrics, decision, now)
                self._outgoing[decision.group].post(decision)
            else:
                events.append(decision)
        if self._log is None:
            self._publish(events)
        elif events:
            if logged := [each for each in events if each.request not in self._unlogged]:
                self.gateway.hold(logged)
                self._log.add(logged)
            self._publish(each for each in events if each.request in self._unlogged)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self.gateway.deadline) is not None and not self._is_closing:
            self._timer = asyncio.get_running_loop().call_later(max(ROUNDING_SECONDS, deadline - now), self._on_time)

    def _release(self, events: Sequence[ClientEvent]) -> None:
        """These events are in the request log."""
        for event in events:
            self.gateway.release(event)
        self._publish(events)

    def _publish(self, events: Iterable[ClientEvent]) -> None:
        """Let clients have these events."""
        now, metrics = self._clock.now(), self.metrics
        for event in events:
            if metrics is not None:
                _count(metrics, event, now)
            if isinstance(event, TokenEvent):
                self._progress.progressed(now)
                if self._on_token is not None:
                    self._on_token(event)
            elif isinstance(event, EndEvent):
                self._progress.ended(now)
                self._note_drained()
                if event.request not in self._in_use and event.request in self._on_change:
                    self._keep_unread(event.request)
            for on_change in tuple(self._on_change.get(event.request, ())):
                on_change()

    def _on_time(self) -> None:
        self._carry_out(self.gateway.on_time())

    def _note_drained(self) -> None:
        if self._has_drained is not None and not self.gateway.num_unfinished:
            self._has_drained.set()

    async def _send_all(self, group: str) -> None:
        outgoing = self._outgoing[group]
        while not self._is_closing:  # `decision` is delivered once; if `send` raises another error instead, this ends the task
            decision = await outgoing.wait_item()
            outgoing.take_nowait()
            if isinstance(decision, SendCancel):
                control: Control = decision.cancel
            elif isinstance(decision, SendCompleted):
                control = decision.completed
            elif self.gateway.is_placed(decision.request, group):
                control = Submit(decision.request)
            else:  # it has ended, or the group was lost meanwhile
                continue
            with suppress(Exception):  # a dead group needs no message; `follow` raises the run's failure
                await self._send(group, control)


def _count(metrics: RequestMetrics, decision: Decision, now: float) -> None:
    match decision:
        case TokenEvent():
            metrics.add_tokens(decision.request, decision.choice, now, len(decision.token_ids))
        case SendRequest() if decision.request.kv is None:  # otherwise the same attempt goes on in a group
            request = decision.request
            metrics.place(request.index, len(request.prompt_token_ids), request.params.n, request.max_tokens, now)
        case EndEvent():
            metrics.end(decision.request, decision.finish_reason, now)


def _nothing() -> None:
    pass
