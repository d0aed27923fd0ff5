"""The gateway: admits requests, routes them to groups, commits their tokens, and produces the events of their clients.

`Gateway` is pure, without torch. Its inputs are requests, tokens, ends, and lost and returned groups. Its outputs are placements, events
for clients, and cancels for workers. `Requests` (requests.py) carries these decisions out; stages.py and router.py choose the groups,
and the prefill workers before them.

A token is committed when the gateway appends it to the request's log. Only the next index from the current attempt is appended, so
repeated tokens and tokens of older attempts have no effect. Each request ends in exactly one EndEvent, when all its choices have ended.

A group that dies changes no token: its requests continue in other groups as new attempts, which replay the prompt and the committed
tokens (xDeepServe section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from flowrt.actors.control import Cancel, Crashed, Ended, KvLost, KvPulled, Prefilled, Prefilling, Request, RunsAlone
from flowrt.actors.outputs import ChoiceEvent, ClientEvent, EndEvent, TokenEvent
from flowrt.engine.validation import num_new_tokens, prompt_refusal, refusal
from flowrt.gateway.admission import Admission
from flowrt.gateway.decisions import Decision, ForWorker, SendCancel, SendCompleted, SendRequest
from flowrt.gateway.log_contents import LoggedRequest, unfit
from flowrt.gateway.request_log import (
    ChoiceLog,
    Detokenizer,
    RequestLog,
    RequestLogs,
    new_stop_strings,
    request_of,
)
from flowrt.gateway.routing import WorkerStatus
from flowrt.gateway.stages import Stages
from flowrt.graph.model import Graph
from flowrt.graph.settings import GraphLimits
from flowrt.operators.model_config import ModelConfig
from flowrt.reliability.fault_table import FaultKind, Redo, redo
from flowrt.sampling_params import FinishReason, SamplingParams
from flowrt.seams import Seams

NewDetokenizer = Callable[[Sequence[int], bool], Detokenizer]


@dataclass(frozen=True)
class ServedModel:
    """What a gateway needs to know of the model that a graph serves. `max_model_len`: tokens of a prompt and its output together.
    `new_detokenizer` takes the token ids of a prompt and whether special tokens are skipped, and decodes one output of it. The others are
    the bounds of Admission."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    new_detokenizer: NewDetokenizer | None = None
    max_requests: int = 1024
    max_prompt_tokens: int = 1 << 40

    @classmethod
    def of(cls, config: ModelConfig, new_detokenizer: NewDetokenizer | None) -> ServedModel:
        return cls(config.max_position_embeddings, config.vocab_size, frozenset(config.eos_token_ids), new_detokenizer)


class Gateway(RequestLogs):
    """`stages` place requests in groups; a call that names a group takes a prefill worker too. `limits` are those that each request must
    fit."""

    def __init__(self, stages: Stages, model: ServedModel, limits: GraphLimits, draw_seed: Callable[[], int]) -> None:
        super().__init__()
        self._stages, self.model, self._limits, self._draw_seed = stages, model, limits, draw_seed
        self.admission = Admission(model.max_requests, model.max_prompt_tokens)
        self._active: dict[str, RequestLog] = {}  # by Request.id

    @classmethod
    def of(cls, graph: Graph, model: ServedModel, seams: Seams) -> Gateway:
        """The gateway of a graph that serves a model."""
        return cls(Stages.of(graph, seams.clock.now), model, graph.group_limits(), seams.new_seed)

    @property
    def num_unfinished(self) -> int:
        return len(self._active)

    def active_logs(self) -> list[RequestLog]:
        """The logs of the requests that have not ended."""
        return list(self._active.values())

    @property
    def num_waiting(self) -> int:
        """Requests with a prompt that wait for a group."""
        return self._stages.num_waiting

    @property
    def num_routing_failures(self) -> int:
        """Requests for which the routing policy raised, or named a worker that it had no choice of."""
        return self._stages.num_routing_failures

    @property
    def workers(self) -> dict[str, WorkerStatus]:
        return self._stages.workers

    @property
    def deadline(self) -> float | None:
        """When `on_time` is due; None: never, as it is now."""
        return self._stages.deadline

    def is_open(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return request_id in self._active

    # From clients

    def reserve(self, params: SamplingParams = SamplingParams(), *, num_tokens: int = 0, has_text: bool = True) -> int:
        """Admit a request with checked parameters before any costly work on it. Returns its number; a refused request has ended already.

        `num_tokens` estimates the length of its prompt. Without `has_text` its events have no text, because a front end decodes the tokens.
        The next call is `place` when its prompt has token ids, `refuse` when tokenization fails, or `cancel` when its client is gone.
        """
        if (refusal := self.admission.refusal_now(num_tokens)) is not None:
            return self._refused(params, refusal.text)
        if params.stop and self.model.new_detokenizer is None:
            return self._refused(params, "stop strings need a tokenizer, and the model's directory has none; use stop_token_ids")
        return self._admit(params, has_text, num_tokens).index

    def place(self, index: int, prompt_token_ids: Sequence[int]) -> list[Decision]:
        """Place a reserved request, or let it wait for a group. A request that cannot be served ends with an error that contains the
        reason. No-op after the end."""
        log = self._logs[index]
        if log.end is not None:
            return []
        if (reason := prompt_refusal(len(prompt_token_ids), self._limits, self.model.max_model_len)) is not None:
            return self.refuse(index, reason)  # before the copy: a prompt that is too long may be very long
        log.prompt_token_ids = tuple(prompt_token_ids)
        self.admission.count(index, len(log.prompt_token_ids))
        log.seed = self._draw_seed() if log.params.seed is None else log.params.seed
        log.max_tokens = num_new_tokens(log.params, len(log.prompt_token_ids), self._limits, self.model.max_model_len)
        if (reason := refusal(request_of(log), self._limits, self.model.max_model_len, self.model.vocab_size)) is not None:
            return self.refuse(index, reason)
        self._begin_text(log)
        self._stages.queue(log)
        return self._place_waiting()

    def restore(self, logged: LoggedRequest) -> list[Decision]:
        """Take over a request of an earlier launcher, with its number. An open one continues as a new attempt behind its committed tokens.
        Its earlier events are made again from the tokens; no decision has them. Raises UserError when an open one does not fit."""
        given, decisions = logged.submitted, list[Decision]()
        self._num_requests = max(self._num_requests, given.request)
        log = self._admit(given.params, given.has_text, len(given.prompt_token_ids))
        log.prompt_token_ids, log.seed, log.max_tokens, log.origin = given.prompt_token_ids, given.seed, given.max_tokens, given.origin
        self._begin_text(log)
        for record in logged.output:
            if (choice := log.choices[record.choice]).finish_reason is not None:  # a stop string has ended it
                continue
            if isinstance(record, ChoiceEvent):
                if logged.end is None or record.finish_reason in ("stop", "length"):  # others have ended with the request
                    decisions += self._end_choice(log, choice, record.finish_reason)
            else:
                decisions += self._commit(log, choice, record)
        if log.end is None and logged.end is not None:
            decisions += self._end(log, logged.end.finish_reason, logged.end.error, param=logged.end.param)
        decisions = [decision for decision in decisions if isinstance(decision, ForWorker)]
        if log.end is not None:
            return decisions
        if (reason := refusal(request_of(log), self._limits, self.model.max_model_len, self.model.vocab_size)) is not None:
            raise unfit(given, reason)
        log.attempt += 1
        self._stages.queue(log)
        return decisions + self._place_waiting()

    def refuse(self, index: int, error: str) -> list[Decision]:
        """End a reserved request that cannot be served, with an error. No-op after the end."""
        log = self._logs[index]
        if log.end is not None:
            return []
        del log.choices[1:]  # none has begun: its one event is the end
        return self._end(log, "error", error)

    def stop_choice(self, index: int, choice: int) -> list[Decision]:
        """End a choice with reason "stop": a front end has found a stop string in its text. No-op after its end."""
        log = self._logs.get(index)
        if log is None or log.end is not None or choice >= len(log.choices) or log.choices[choice].finish_reason is not None:
            return []
        return self._end_choice(log, log.choices[choice], "stop", cancels_worker=True)

    def drain(self) -> None:
        """Admit no new requests from now on."""
        self.admission.refuses_all = "the graph is draining and takes no new requests; send them to another one"

    def cancel(self, index: int) -> list[Decision]:
        """End the request with reason "abort" and cancel it in its group. No-op after the end."""
        log = self._logs.get(index)
        return [] if log is None or log.end is not None else self._end(log, "abort", cancels_worker=True)

    # From workers

    def on_token(self, group: str, tokens: TokenEvent) -> list[Decision]:
        """Commit the tokens that come next in the request's log; ignore tokens that are committed already or come from another attempt or
        group.

        A connection keeps order, so a gap is a bug: it ends the request with an error rather than with wrong text.
        """
        log = self._logs.get(tokens.request)
        if log is None or log.end is not None or tokens.attempt != log.attempt or self._stages.sender_of(log, tokens.index) != group:
            return []
        choice = log.choices[tokens.choice] if tokens.choice < len(log.choices) else None
        num_committed = 0 if choice is None else len(choice.token_ids)
        end = 1 if tokens.index == 0 and log.prefill_worker is not None else len(tokens.token_ids)
        begin, fits = num_committed - tokens.index, log.max_tokens - tokens.index
        if choice is not None and (choice.finish_reason is not None or begin >= end):
            return []
        decisions: list[Decision] = []
        if choice is not None and 0 <= begin < fits:
            decisions += self._commit(log, choice, tokens.part(begin, min(end, fits)))
            if end <= fits or choice.finish_reason is not None:
                return decisions
            num_committed, begin = log.max_tokens, fits
        which = f"{log.id} (choice {tokens.choice})" if tokens.choice else log.id
        error = f"{group} sent token {tokens.index + max(0, begin)} of {which} where {num_committed} of {log.max_tokens} were committed"
        return decisions + self._end(log, "error", error, cancels_worker=True)

    def on_alone(self, group: str, control: RunsAlone | Crashed) -> list[Decision]:
        """A group is about to compute a suspect alone, no longer does, or has given one back that crashed a server. A policy may restart
        the group with that server: then the notice of the death, over another connection, may come before the report, and the request may
        have moved."""
        log = self._active.get(control.request_id)
        if log is None:
            return []
        is_current = control.attempt == log.attempt and self._stages.worker_of(log) == group
        is_restarted = control.attempt <= log.restarted_attempt
        if not is_current and (not is_restarted or isinstance(control, Crashed)):
            return []
        if isinstance(control, RunsAlone) and control.is_over:
            log.runs_alone = log.runs_alone and not is_current
            return []
        crash, log.server_crash = log.server_crash, ""
        if isinstance(control, Crashed):
            log.runs_alone = bool(crash) or not is_restarted  # else the notice of this crash has counted it
            return self._redo(log, control.error, (group,)) + self._place_waiting()
        log.runs_alone = True
        return self._redo(log, crash, moves=False) if crash and is_restarted else []

    def on_ended(self, group: str, ended: Ended) -> list[Decision]:
        """End a choice of the current attempt. The last choice, or an error, ends the request.

        The request also ends with an error when the number of committed tokens differs from the number that the group reports.
        """
        log = self._active.get(ended.request_id)
        if log is None or ended.attempt != log.attempt or group not in (self._stages.worker_of(log), self._stages.group_of(log)):
            return []
        cancels_worker = group != self._stages.worker_of(log)  # a group that pulls ends it while the prefill worker computes
        if ended.reason == "error":
            return self._end(log, "error", ended.error, cancels_worker, ended.param)
        choice = log.choices[ended.choice] if ended.choice < len(log.choices) else None
        if choice is None or choice.finish_reason is not None:
            return []
        if ended.num_tokens is not None and ended.num_tokens != len(choice.token_ids):
            error = f"{group} ended {log.id} after {ended.num_tokens} tokens, {len(choice.token_ids)} were committed"
            return self._end(log, "error", error, cancels_worker=True)
        return self._end_choice(log, choice, ended.reason, cancels_worker)

    def on_transfer(self, group: str, control: Prefilling | Prefilled | KvPulled | KvLost) -> list[Decision]:
        """Handle the offer of a prompt's KV, its arrival in a group, or its loss, which begins a new attempt behind the prompt."""
        log = self._active.get(control.request_id)
        if log is None or control.attempt != log.attempt:
            return []
        sender = self._stages.group_of(log) if isinstance(control, KvLost) else self._stages.worker_of(log)
        if sender != group:
            return []
        match control:
            case Prefilling(kv=kv):
                self._stages.offer(log, kv)
            case Prefilled() if log.kv_was_lost:
                return self._move(log) + self._place_waiting()
            case Prefilled(kv=kv):
                completed = self._stages.complete(log, kv)
                return [*([SendCompleted(*completed)] if completed is not None else []), *self._place_waiting()]
            case KvPulled():
                decisions = self._cancel(log, (group,))
                self._stages.pulled(log)
                return decisions + self._place_waiting()
            case KvLost() if self._stages.lose_kv(log):
                return self._move(log, (group,)) + self._place_waiting()
        return self._place_waiting()

    # When groups join, leave, are lost and return

    def use(self, graph: Graph) -> list[Decision]:
        """Place requests in the workers of this graph. A new one counts as lost until `readmit_group`. The requests of one that leaves
        move, and the returned cancels free its resources."""
        left = self._stages.use(graph)
        return [each for worker in left for each in self.lose_group(worker, "leaves the graph", is_alive=True)]

    def lose_group(
        self,
        group: str,
        why: str,
        *,
        beside: Sequence[str] = (),
        may_recur: bool = False,
        is_alive: bool = False,
        is_restarting: bool = False,
    ) -> list[Decision]:
        """Move all requests of a group, and place no more there until `readmit_group`. `why` continues a sentence about the group.

        beside: groups that are lost with it, as they were in one process: no request moves from one to another. may_recur: the group
        crashed or hung, and what it computed may be the reason (see router.py). is_alive: the group may continue later; the returned
        cancels free its resources. is_restarting: requests wait for it without limit until `give_up_group`.
        """
        lost = (group, *beside)
        for each in lost:
            self._stages.lose(each, why, is_restarting=is_restarting)
        logs = [log for log in self._active.values() if not set(lost).isdisjoint(self._stages.workers_of(log))]
        computed = [log for log in logs if self._stages.worker_of(log) in lost] if may_recur else []
        causes = [log for log in computed if log.runs_alone] or computed
        decisions: list[Decision] = []
        for log in sorted(logs, key=lambda log: log in causes):  # last, as an end places what waits: the oldest of all
            workers = self._stages.workers_of(log)
            if is_alive:
                decisions += [SendCancel(each, Cancel(log.id, log.attempt)) for each in workers if each in lost]
            if log in causes:
                decisions += self._redo(log, f"{self._stages.worker_of(log)} {why}", lost)
            elif not may_recur or self._stages.worker_of(log) in lost or self._stages.lose_kv(log, with_group=True):
                decisions += self._move(log, lost, is_restarting=is_restarting)
        return decisions + self._place_waiting()

    def lose_server(self, server: str, why: str) -> list[Decision]:
        """An expert server crashed or hung, and a policy restarts the groups with it, which forget what it computed for them. The requests
        that run alone are counted, and all others are suspects."""
        decisions: list[Decision] = []
        for log, workers in [(log, self._stages.workers_of(log)) for log in self._stages.begun()]:  # before an end places what waits
            crash = f"{server} {why}"
            log.server_crash = "" if log.runs_alone else crash
            if workers:
                log.restarted_attempt = log.attempt
            decisions += self._redo(log, crash, moves=False)
        return decisions

    def _redo(self, log: RequestLog, what: str, but: Collection[str] = (), *, moves: bool = True) -> list[Decision]:
        """A process crashed or hung over the request, perhaps: it moves as a suspect, or ends. `what` says which process, and how. Of
        several requests that ran alone, each in its group, one may have crashed the parts of all: then one crash counts for none."""
        has_others = any(other.runs_alone or other.num_crashes for other in self._active.values() if other is not log)
        if redo(FaultKind.CRASHED_GROUP, max(0, log.count_crash() - has_others)) is Redo.END:
            return self._end(log, "error", f"{what} while it computed this request alone; the request is not tried again", not moves)
        return self._move(log, but) if moves else []

    def _move(self, log: RequestLog, but: Collection[str] = (), *, is_restarting: bool = False) -> list[Decision]:
        """Begin a new attempt, and cancel the old one in every worker but these. When a policy restarts the group, the notice of a crash
        is to come: a request that ran alone counts then."""
        log.runs_alone = log.runs_alone and is_restarting
        if is_restarting:
            log.restarted_attempt = log.attempt
        decisions = self._cancel(log, but)
        self._stages.remove(log)
        log.attempt += 1
        self._stages.queue(log)
        return decisions

    def _cancel(self, log: RequestLog, but: Collection[str] = ()) -> list[Decision]:
        return [SendCancel(worker, Cancel(log.id, log.attempt)) for worker in self._stages.workers_of(log) if worker not in but]

    def give_up_group(self, group: str) -> list[Decision]:
        """The group stays down for now: when no other is left, requests wait no longer than `lost_group_seconds`."""
        self._stages.give_up(group)
        return self._place_waiting()

    def readmit_group(self, group: str) -> list[Decision]:
        """Place requests in a lost group again."""
        self._stages.readmit(group)
        return self._place_waiting()

    def on_time(self) -> list[Decision]:
        """End the requests that have waited too long for a group. Begin another attempt of those whose prompts were held for too long."""
        why, expired = self._stages.why_no_group(), self._stages.expired()
        decisions = [each for log in expired for each in self._end(log, "error", why, cancels_worker=True)]
        return decisions + [each for log in self._stages.overdue_holds() for each in self._move(log)] + self._place_waiting()

    def is_placed(self, request: Request, group: str) -> bool:
        """Whether the group still has this attempt."""
        log = self._active.get(request.id)
        return log is not None and log.attempt == request.attempt and group in self._stages.workers_of(log)

    def groups_of(self, index: int) -> list[str]:
        """The workers in which the request is placed: the prefill worker that has its KV, the group that computes its tokens."""
        return self._stages.workers_of(self._logs[index])

    def end_all(self) -> list[EndEvent]:
        """End every active request with reason "abort", because the run is over. Returns their EndEvents."""
        self.admission.refuses_all = "the run has ended"
        for group in self.workers:
            self._stages.lose(group, "has ended")
        decisions = [decision for log in list(self._active.values()) for decision in self._end(log, "abort")]
        return [decision for decision in decisions if isinstance(decision, EndEvent)]

    # Inside

    def _place_waiting(self) -> list[Decision]:
        return [SendRequest(worker, request_of(log, stage)) for worker, log, stage in self._stages.place_waiting()]

    def _admit(self, params: SamplingParams, has_text: bool, num_tokens: int) -> RequestLog:
        log = self._new_log(params)
        log.has_text = has_text
        self.admission.count(log.index, num_tokens)
        log.choices = [ChoiceLog(choice) for choice in range(params.n)]
        self._active[log.id] = log
        return log

    def _refused(self, params: SamplingParams, error: str) -> int:
        log = self._new_log(params)
        log.events.append(EndEvent(log.index, "error", "", error))
        return log.index

    def _begin_text(self, log: RequestLog) -> None:
        """The prompt is known, so the choices can be decoded."""
        if log.has_text and self.model.new_detokenizer is not None:
            for choice in log.choices:
                choice.detokenizer = self.model.new_detokenizer(log.prompt_token_ids, log.params.skip_special_tokens)
                choice.stops = new_stop_strings(log.params)

    def _commit(self, log: RequestLog, choice: ChoiceLog, tokens: TokenEvent) -> list[Decision]:
        """Append tokens up to the one that completes a stop string."""
        text, stopped, num_tokens = "", False, 0
        while not stopped and num_tokens < len(tokens.token_ids):
            new_text, stopped = choice.push(tokens.token_ids[num_tokens], log.params, self.model.eos_token_ids)
            text, num_tokens = text + new_text, num_tokens + 1
        event = replace(tokens.part(0, num_tokens), text=text, attempt=0)
        log.events.append(event)
        decisions: list[Decision] = [event, *self._prove(log, choice)]
        return decisions + (self._end_choice(log, choice, "stop", cancels_worker=True) if stopped else [])

    def _prove(self, log: RequestLog, choice: ChoiceLog) -> list[Decision]:
        """A choice has committed a token or ended."""
        return self._place_waiting() if self._stages.note_progress(log, choice.index) else []

    def _end_choice(self, log: RequestLog, choice: ChoiceLog, reason: FinishReason, cancels_worker: bool = False) -> list[Decision]:
        """End one choice. The end of the last choice ends the request."""
        if len(log.choices) == 1:
            return self._end(log, reason, cancels_worker=cancels_worker)
        reason, text = choice.end(reason)
        event = ChoiceEvent(log.index, choice.index, reason, text)
        log.events.append(event)
        decisions: list[Decision] = [event, *self._prove(log, choice)]
        if cancels_worker and (worker := self._stages.worker_of(log)) is not None:
            decisions.append(SendCancel(worker, Cancel(log.id, log.attempt, choice.index)))
        if all(each.finish_reason is not None for each in log.choices):
            decisions += self._end(log, log.choices[0].finish_reason or reason)
        return decisions

    def _end(
        self, log: RequestLog, reason: FinishReason, error: str | None = None, cancels_worker: bool = False, param: str = ""
    ) -> list[Decision]:
        """End the request and all its unfinished choices."""
        events: list[ClientEvent] = []
        text = ""
        for choice in log.choices:
            if choice.finish_reason is None:
                choice_reason, text = choice.end(reason)
                if len(log.choices) > 1:
                    events.append(ChoiceEvent(log.index, choice.index, choice_reason, text))
        if len(log.choices) == 1:
            events.append(EndEvent(log.index, log.choices[0].finish_reason or reason, text, error, param))
        else:
            events.append(EndEvent(log.index, reason, "", error, param))
        log.events += events
        decisions: list[Decision] = [*events, *self._cancel(log, () if cancels_worker else (self._stages.worker_of(log) or "",))]
        del self._active[log.id]
        self.admission.end(log.index)
        self._stages.remove(log)
        return decisions + self._place_waiting()
