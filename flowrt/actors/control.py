"""Messages on the control connection between the launcher and a worker: one msgspec struct per kind, and their conversion. No torch.

Order of the messages of one incarnation: Start -> Listening -> Peers -> Connected -> (Submit, Cancel, Tokens, Ended ...) -> Drain or
Stop -> Statistics -> the control connection is closed. Failed may come at any time and is the last. From Peers on, PeerLeft and PeerJoined
report the incarnations of other workers.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

import msgspec

from flowrt.actors.outputs import TokenEvent
from flowrt.emulation import EmulationStatistics
from flowrt.reliability.detector import ProcessState
from flowrt.sampling_params import FinishReason, SamplingParams
from flowrt.system.process_status import ProcessSample
from flowrt.transports.wire.message import Message

LATENCY_EDGES = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # upper bounds in seconds


class EdgeStatistics(msgspec.Struct, frozen=True):
    """Messages that this worker sent on one edge, and the transport that carried them. `wait_seconds`: for credits, while
    something was ready. `latency_counts`: by bucket of LATENCY_EDGES of requests that were measured."""

    edge: str
    transport: str
    num_messages: int
    payload_bytes: int
    wait_seconds: float = 0.0
    latency_seconds: float = 0.0
    latency_counts: tuple[int, ...] = ()


class NodeStatistics(msgspec.Struct, frozen=True):
    """Calls of one node of this worker, or of a fused subgraph under the name of its first node. `num_waiting`: firings that wait now."""

    node: str
    num_calls: int
    num_firings: int
    compute_seconds: float
    num_waiting: int = 0


class ExpertStatistics(msgspec.Struct, frozen=True):
    """The experts of one layer that this worker holds, and the (row, expert) pairs of each that it has computed."""

    layer: int
    expert_ids: tuple[int, ...]
    num_pairs: tuple[int, ...]


class KvOffer(msgspec.Struct, frozen=True):
    """The KV of a prompt, which an incarnation of a prefill worker holds for a group to pull. `number` counts its offers. `is_complete`:
    else the worker still computes it, and `is_degraded` is not known yet. `is_strict`: the numerics with which it is computed."""

    worker: str
    incarnation: str
    number: int
    num_tokens: int
    is_degraded: bool = False
    is_complete: bool = True
    is_strict: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a group receives it. `index`: its number at the gateway. `attempt` counts how often it has been placed. Tokens carry
    both back. `max_tokens` and `seed` are those of `params`, or what the gateway filled in."""

    id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    index: int = 0
    seed: int = 0
    params: SamplingParams = SamplingParams()
    # By choice (none: (), for all): tokens that an earlier attempt gave to the client. They are replayed, not emitted.
    committed_token_ids: tuple[tuple[int, ...], ...] = ()
    ended_choices: tuple[int, ...] = ()  # choices that ended in an earlier attempt: not computed again
    is_suspect: bool = False  # a group crashed while it ran there: it runs alone until it has a token
    replays_alone: bool = False  # of a suspect: its committed tokens, too
    stage: Literal["all", "prefill"] = "all"  # prefill: compute the prompt and the first token of each choice, and offer the KV
    kv: KvOffer | None = None  # pull the KV of the prompt instead of computing it

    def committed(self, choice: int) -> tuple[int, ...]:
        """Tokens of the choice that an earlier attempt, or the prefill worker of this one, gave to the client."""
        return self.committed_token_ids[choice] if choice < len(self.committed_token_ids) else ()


_BY_KIND: dict[str, type[Control]] = {}


class Control(msgspec.Struct, frozen=True):
    """Root of all control messages. `kind` is the message's kind on the wire, derived from the class name: "control.peer_left"."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = "control." + re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if cls.__module__.startswith("flowrt.actors."):  # workers reject others, such as the faults that flowrt chaos orders
            _BY_KIND[cls.kind] = cls


class Start(Control, frozen=True):
    """First message to a worker: its name, the whole expanded graph (JSON), the run's key, and the log verbosity.

    `is_traced`: the worker records what it does; the launcher collects the records by TraceRequest. `settings`: of a service
    (launcher/worker_pool.py), in its own form.

    A standby process gets two. The first names the processes whose operators it `loads`; it responds with Listening, without addresses.
    The second makes it a worker of the graph, for which it uses the operators that it has loaded as `loaded_as`.

    `ended`: operations of which a call has ended in the run, see Heartbeat.
    """

    name: str
    incarnation: str
    graph: bytes
    key: bytes
    log_level: str = "warning"
    loads: tuple[str, ...] = ()
    loaded_as: str = ""
    is_traced: bool = False
    settings: bytes = b""
    ended: tuple[str, ...] = ()


class ChangeGraph(Control, frozen=True):
    """To a worker: the graph has another version from now on. `delta`: from the version before, as JSON (graph/delta.py). It comes before
    any notice of a process that joins, and after PeerLeft of one that is gone. The response is GraphChanged."""

    delta: bytes


class GraphChanged(Control, frozen=True):
    """From a worker: it uses this version of the graph, and nothing of it is left at processes that are leaving, or here, if it is one."""

    version: int


class LoadProgress(Control, frozen=True):
    """Loading progress: `done` of this worker's `total` operators have their weights; `text` names the current one. `num_bytes`: of all
    weights that it has read."""

    text: str
    done: int
    total: int
    num_bytes: int = 0


class Listening(Control, frozen=True):
    """Operators are loaded and the worker listens at these addresses (scheme -> address). Includes memory now and before loading.
    `files`: fingerprints of the model's files, by path. They must be the same for all workers of a run (launcher/run_state.py)."""

    addresses: dict[str, str]
    resident_bytes: int = 0
    imported_bytes: int = 0
    files: dict[str, str] = {}


class Peers(Control, frozen=True):
    """Addresses (process -> scheme -> address) and incarnations of the processes that are up; PeerJoined follows for each other one."""

    addresses: dict[str, dict[str, str]]
    incarnations: dict[str, str]
    restarting: tuple[str, ...] = ()  # processes that a recovery policy restarts now


class Connected(Control, frozen=True):
    """All links of this worker are open; it is ready."""


class Submit(Control, frozen=True):
    request: Request


class Cancel(Control, frozen=True):
    """End the attempt, or one choice of it."""

    request_id: str
    attempt: int
    choice: int | None = None


class Tokens(Control, frozen=True):
    """The tokens that one step produced, for several requests in one message."""

    tokens: tuple[TokenEvent, ...]


class RunsAlone(Control, frozen=True):
    """From a group: until one of its choices has a token, the next steps compute this suspect and nothing else. `is_over`: no longer,
    and it has no token yet."""

    request_id: str
    attempt: int
    is_over: bool = False


class Crashed(Control, frozen=True):
    """From a group: an expert server crashed or hung while the group computed this request alone; `error` says which. The attempt has
    ended."""

    request_id: str
    attempt: int
    error: str


class Prefilling(Control, frozen=True):
    """From a prefill worker, when the first step of the attempt begins: a group may pull what is computed of the prompt."""

    request_id: str
    attempt: int
    kv: KvOffer


class Prefilled(Control, frozen=True):
    """From a prefill worker, after the first tokens of the attempt: it holds the KV of the prompt until the attempt is cancelled."""

    request_id: str
    attempt: int
    kv: KvOffer


class KvCompleted(Control, frozen=True):
    """To a group that pulls an incomplete offer: it is complete now. The group goes on behind these tokens when it has the KV."""

    request_id: str
    attempt: int
    kv: KvOffer
    committed_token_ids: tuple[int, ...]


class KvPulled(Control, frozen=True):
    """From a group: it has the KV of the attempt's prompt, all of it checked; the prefill worker may free its own."""

    request_id: str
    attempt: int


class KvLost(Control, frozen=True):
    """From a group: the KV of the attempt's prompt did not arrive whole. The group has dropped the attempt."""

    request_id: str
    attempt: int
    why: str


class Ended(Control, frozen=True):
    """The end of a choice. With reason "error" it ends all choices of the attempt, and `error` is the user-visible cause. `num_tokens`
    counts its output, including earlier attempts; None: not known. `param`: as in EndEvent."""

    request_id: str
    attempt: int
    reason: FinishReason
    error: str | None = None
    choice: int = 0
    num_tokens: int | None = None
    param: str = ""


class Drain(Control, frozen=True):
    """Finish the active requests and admit no new ones. The response is Drained."""


class Drained(Control, frozen=True):
    """No request is active any more. Response to Drain."""


class StatisticsRequest(Control, frozen=True):
    """Requests Statistics."""


class Statistics(Control, frozen=True):
    edges: tuple[EdgeStatistics, ...] = ()
    nodes: tuple[NodeStatistics, ...] = ()
    experts: tuple[ExpertStatistics, ...] = ()
    num_firings: int = 0
    compute_seconds: float = 0.0
    inline_seconds: float = 0.0  # the part of compute_seconds that ran on the event loop
    num_steps: int = 0
    num_rows: int = 0  # of all steps
    step_row_counts: tuple[int, ...] = ()  # steps by bucket of STEP_ROW_EDGES (engine/scheduler.py)
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # tokens of prompts looked up in the prefix cache
    num_prefix_hits: int = 0  # those found
    working_seconds: float = 0.0  # of a group: time in which sequences ran, and of it, in which nothing was computed (WorkTimes)
    bubble_seconds: float = 0.0
    map_version: int = 0  # changes of the expert map of a client of expert servers
    num_micro_batches: int = 0  # that a group uses now
    num_running: int = 0  # sequences of a group now, and those that wait in it
    num_waiting: int = 0
    num_pages: int = 0  # of a group's KV cache
    num_free_pages: int = 0
    late_wakeups: int = 0
    resident_bytes: int = 0
    strict_blocks: str = ""  # with strict numerics: which functions run in blocks of how many rows, for people
    emulation: EmulationStatistics | None = None
    num_redispatched: int = 0  # parts that were lost or late and sent to other servers
    num_restarts: int = 0  # filled in by the launcher
    has_responded: bool = True  # the same; False: the worker is down or gave no response in time, its counts are older


class TraceRequest(Control, frozen=True):
    """Requests TraceRecords: all that a traced worker has recorded since."""


class TraceRecords(Control, frozen=True):
    """Records of this incarnation (flowrt/trace/records.py), which the worker keeps no longer. A traced worker sends its last ones before
    its end. `num_dropped`: of the whole incarnation, because they were not collected in time."""

    incarnation: str
    piece: bytes
    num_dropped: int = 0
    is_last: bool = False


class Stop(Control, frozen=True):
    """Shut down in order. The worker sends Statistics and closes the control connection."""


class LinkLost(Control, frozen=True):
    """The link to `peer` broke. Usually the peer died and its exit notification is in flight. Without one, this ends the run, or the
    incarnation of a peer that is allowed to die."""

    peer: str
    reason: str
    incarnation: str = ""  # the peer's; "": its current one


class PeerLeft(Control, frozen=True):
    """To a worker: this incarnation of `process` has ended and must not be used. May come twice, before or after the link to it ends.

    is_restarting: a recovery policy restarts it. While it does, the time in which its experts are unavailable does not count. A second
    message, without it, says that the process stays down.
    """

    process: str
    incarnation: str
    why: str
    is_restarting: bool = False


class DeathCause(Control, frozen=True):
    """To a worker: how this incarnation of `process` ended. Follows PeerLeft, and comes before PeerJoined for the next incarnation.
    may_recur: it crashed or hung, and what it computed may be the reason. is_on_purpose: the run ended it for another reason: a recovery
    policy restarts it with a process that died, or it leaves the graph.
    """

    process: str
    incarnation: str
    how: str
    may_recur: bool = False
    is_on_purpose: bool = False


class PeerJoined(Control, frozen=True):
    """To a worker: a new incarnation of `process` listens at these addresses (scheme -> address). The worker links with it, then uses it.
    It comes after PeerLeft for every earlier incarnation. The connecting end is the same as at the start."""

    process: str
    incarnation: str
    addresses: dict[str, str]
    pid: int = 0  # to the monitor; 0: not on this machine, or not known
    is_starting: bool = False  # to the monitor: the process was forked; the same message without it follows when it is connected


class Heartbeat(Control, frozen=True):
    """From the loop of a worker, at even intervals while it turns: relayed to the monitor.

    `sequence` counts the heartbeats of this incarnation. `lag_seconds`: how late the loop made this one. `running` names the running
    operation, `running_seconds` its duration so far, `bound_seconds` its bound (0: none is declared). `ended`: operations of which the
    first call in the run has ended since the last heartbeat.
    """

    sequence: int
    lag_seconds: float
    num_firings: int
    running: str | None = None
    running_seconds: float = 0.0
    bound_seconds: float = 0.0
    incarnation: str = ""
    process: str = ""  # filled in by the launcher, which relays it
    pid: int = 0  # the same; 0: not on this machine, or not known
    ended: tuple[str, ...] = ()


class LateResponse(Control, frozen=True):
    """From a client: a server's response takes longer than usual. Relayed to the monitor, which suspects the server for a while. At most
    one per server and second. `incarnation`: the server's. `by`: the client; filled in by the launcher."""

    process: str
    incarnation: str
    waited_seconds: float
    expected_seconds: float
    by: str = ""


class DetectorReport(Control, frozen=True):
    """From the monitor: the new state of an incarnation. SUSPECT and ALIVE have no effect but a log line. DEAD: the launcher notifies
    its peers that it has left, then kills it, which fences it. `is_stopped`: it is dead because another process has stopped it."""

    process: str
    incarnation: str
    state: ProcessState
    why: str
    is_stopped: bool = False


class ExpertsUnavailable(Control, frozen=True):
    """From a client of expert servers, on each change: the experts without a usable replica, as a sentence; "" when every expert has one.

    `follows`: the effect on requests that need them: they wait, end in an error, or continue without the experts (degrade).
    """

    text: str
    follows: Literal["wait", "error", "degrade"] = "wait"


class LateProcess(Control, frozen=True):
    """From the host server of another host, on the control connection of a worker whose heartbeats are late: what its process does. It
    follows all heartbeats that the host server has relayed, the last one `silent_seconds` before. Relayed to the monitor."""

    sample: ProcessSample
    silent_seconds: float
    process: str = ""  # the worker and its incarnation; filled in by the launcher, which relays it
    incarnation: str = ""


class CallFailed(Control, frozen=True):
    """From a worker of a user's graph, once per call: an operator of `node` failed in this call. The worker has fenced the call."""

    source: str
    step: int
    error: str
    node: str


class FenceCalls(Control, frozen=True):
    """To every worker of a user's graph, by way of the launcher: drop all messages of these calls, which have failed or were cancelled.
    The response is CallsFenced."""

    source: str
    steps: tuple[int, ...]


class CallsFenced(Control, frozen=True):
    """The worker holds nothing of the calls any more, but what it computes now. Response to FenceCalls."""

    source: str
    steps: tuple[int, ...]


class Failed(Control, frozen=True):
    """The worker cannot continue. `user` distinguishes bad input (exit code 2) from a fault (exit code 3)."""

    error: str
    user: bool = False


def as_message(control: Control) -> Message:
    return Message(kind=control.kind, header=control)


def from_message(message: Message) -> Control:
    """Decode a control message. Raises msgspec.ValidationError for any other message."""
    if (struct := _BY_KIND.get(message.kind)) is None:
        raise msgspec.ValidationError(f"{message.kind!r} is not a control message")
    return message.decode_header(struct)
