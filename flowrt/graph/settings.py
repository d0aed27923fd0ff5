"""The sections of a graph file that a Graph holds as they were read: type, default, bounds and sentence of each key.

A key is a field here and its sentence. msgspec validates files by the types and makes the JSON Schema of them; tests/docs/key_tables.py
renders the tables of the docs, and `flowrt graph expand` writes the sections back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, get_type_hints

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct, field, structs

from flowrt.graph.notation import parse_ids

MAX_THREADS = 1024
ROUTING_POLICIES, ROUTING_ENTRY_POINTS = ("cache_aware", "round_robin"), "flowrt.routing_policies"  # gateway/routing.py


def key(
    *, wrong: str = "", check: Callable[[Any], object] | None = None, form: str | None = None, of_role: bool = False, **bounds: Any
) -> Meta:
    """What msgspec does not know of a key. Errors say that a value of another type, or a text that the regular expression `form` does not
    match, is not `wrong`. `check` raises ValueError for a wrong value of the right type. `of_role`: roles may have their own. `bounds` are
    those of msgspec.Meta."""
    pattern = None if form is None else f"^({form})$(?!\\n)"  # $ alone matches before a last line break, too
    given = {"wrong": wrong, "check": check, "of_role": of_role}
    return Meta(pattern=pattern, extra={name: value for name, value in given.items() if value}, **bounds)


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping of a graph file. The docstring of each has a sentence per key, in Markdown: docs and JSON Schema show it."""

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of these keys."""
        return structs.replace(self, **changes)


Processes: TypeAlias = Literal["one", "many"] | Annotated[int, Meta(ge=1, le=4096)]
Threads: TypeAlias = Literal["auto"] | Annotated[int, Meta(ge=1, le=MAX_THREADS)]
Numerics = Literal["fast", "strict"]
Device: TypeAlias = Annotated[str, key(wrong="a device; write cpu, cuda, or cuda:N", form="cpu|cuda(:[0-9]{1,3})?")]
IdsText: TypeAlias = Annotated[str, Meta(pattern="^[0-9, -]*$")] | Annotated[int, Meta(ge=0)]  # "0-5,7"


def _check_cores(value: str | int) -> None:
    if not parse_ids(value):
        raise ValueError("names no core; write cores as '0-3,7', or leave the key out for any core")


Cores: TypeAlias = Annotated[IdsText, key(wrong="a set of cores; write cores as '0-3,7'", check=_check_cores)]


class Batching(Section, frozen=True):
    """Which waiting tags a node takes in one call. Default: all that wait in the layer of the first.

    same_layer: Only tags of one layer in a call.
    min_tags: A batch of this many tags does not wait for more.
    max_wait_seconds: Maximum wait for `min_tags` while the process has nothing else to compute; 0: it computes what waits.
    domains: Source nodes by domain: domains take turns, and a call has tags of one. Written by `expand`. Default: no turns.
    turn_calls: With domains: a turn ends after so many calls if another domain waits; before, when no tag is left.
    """

    same_layer: bool = True
    min_tags: Annotated[int, Meta(ge=1, le=4096)] = 2
    max_wait_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    domains: tuple[tuple[str, ...], ...] = ()
    turn_calls: Annotated[int, Meta(ge=1, le=4096)] = 4


SLOTS_OF_SEQUENCE = 2  # slots of recurrent state that a running sequence has: a committed and a working copy


class GraphLimits(Section, frozen=True):
    """Bounds of a run, for all roles or for one.

    max_num_seqs: Sequences per group over all micro-batches.
    kv_pages: Pages of the KV cache per group.
    page_size: Tokens per page.
    max_tokens: Requests get at most so many new tokens, whatever they ask for. Default: as many as fit.
    max_num_batched_tokens: Maximum number of rows of a step, and with it of every message.
    chunk_tokens: With strict numerics: prompts are cut at its multiples; at most `max_num_batched_tokens`.
    enable_prefix_caching: Keep the KV of prompts for later ones that begin with the same tokens ([prefix
        cache](engine.md#prefix-cache)).
    prefix_states: States of [recurrent layers](engine.md#recurrent-layers) that a group keeps for later prompts, beside those of
        its sequences.
    max_micro_batches: Use at most so many of the `micro_batches`; for roles that need fewer.
    dynamic_micro_batches: Use as many of the `micro_batches` as give the most tokens per second
        ([measured](exchange.md#micro-batches) while it runs).
    target_step_seconds: A step takes as many rows as it can compute [in this time](engine.md#steps-of-a-target-time); 0: no target.
    in_flight: Maximum number of tags in flight in a graph of your own.
    max_message_bytes: Maximum payload of a message.
    roles: Other limits for a role, see [limits per role](graph-files.md#limits-per-role).
    """

    max_num_seqs: Annotated[int, key(of_role=True, ge=1, le=4096)] = 16
    kv_pages: Annotated[int, key(of_role=True, ge=1, le=1 << 24)] = 512
    page_size: Annotated[int, key(of_role=True, ge=1, le=1024)] = 16
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    max_num_batched_tokens: Annotated[int, key(of_role=True, ge=1, le=1 << 16)] = 512
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    enable_prefix_caching: bool = True
    prefix_states: Annotated[int, key(of_role=True, ge=0, le=4096)] = 8
    max_micro_batches: Annotated[int, key(of_role=True, ge=1, le=64)] = 64
    dynamic_micro_batches: bool = False
    target_step_seconds: Annotated[float, key(of_role=True, ge=0, le=3600)] = 0.0
    in_flight: Annotated[int, Meta(ge=1, le=4096)] = 8
    max_message_bytes: Annotated[int, key(of_role=True, ge=1024, le=1 << 34)] = 1 << 26
    roles: dict[str, RoleLimits] = field(default_factory=dict)

    @property
    def num_state_slots(self) -> int:
        """Slots of recurrent state per group."""
        return SLOTS_OF_SEQUENCE * self.max_num_seqs + self.prefix_states

    def of_role(self, role: str) -> GraphLimits:
        """The limits that hold for a role."""
        given = {} if role not in self.roles else structs.asdict(self.roles[role])
        return self.replace(roles={}, **{name: limit for name, limit in given.items() if limit is not UNSET}) if given else self


if TYPE_CHECKING:
    RoleLimits: TypeAlias = Section
else:
    _HINTS = get_type_hints(GraphLimits, localns={"RoleLimits": Section}, include_extras=True).items()
    _OF_ROLES = [
        (name, hint) for name, hint in _HINTS for meta in getattr(hint, "__metadata__", ()) if meta.extra and "of_role" in meta.extra
    ]
    RoleLimits = defstruct(
        "RoleLimits", [(name, hint | UnsetType, UNSET) for name, hint in _OF_ROLES], bases=(Section,), frozen=True, module=__name__
    )
    RoleLimits.__doc__ = f"Limits of one role, where they differ from those of the graph.\n\n{GraphLimits.__doc__}"


_Modelled: TypeAlias = Annotated[float, Meta(ge=0, le=3600)]


class ComputeCost(Section, frozen=True):
    """Compute time of an operator on the emulated hardware, undilated: the sum of four terms for each layer of a call.

    fixed_seconds: Charged once per layer of a call.
    row_seconds: Charged per row; for `experts` per row of each expert.
    expert_seconds: Of `experts`: charged per expert that has rows.
    kv_token_seconds: Of `attention`: charged per token of context, over all sequences.
    """

    fixed_seconds: _Modelled = 0.0
    row_seconds: _Modelled = 0.0
    expert_seconds: _Modelled = 0.0
    kv_token_seconds: _Modelled = 0.0

    def seconds(self, num_rows: float, num_experts: float = 0, num_kv_tokens: float = 0, num_scores: float = 0) -> float:
        """The time of a FiringLoad. Scores are not charged."""
        experts_and_kv = self.expert_seconds * num_experts + self.kv_token_seconds * num_kv_tokens
        return self.fixed_seconds + self.row_seconds * num_rows + experts_and_kv

    def shortest_seconds(self, charges: str) -> float:
        """The time of one row, with one expert or one token of context where the kind of operator `charges` this key."""
        return self.seconds(1, charges == "expert_seconds", charges == "kv_token_seconds")


_Card: TypeAlias = Annotated[str, Meta(max_length=4096)]  # a name of flowrt's own, or the path of a file


class Emulation(Section, frozen=True):
    """Emulate other hardware, slower by a factor: links take their profiles' times, computation its modelled times.

    dilation: [Emulate](emulation.md) links and computation, slower by this factor; `flowrt doctor` prints the smallest.
    devices: Role or process: the [device](emulation.md#devices) that computes its operators, or a list of which its processes take one
        after another.
    model: The [model card](emulation.md#devices) whose times and bytes count, while the checkpoint gives the tokens. Default: the
        checkpoint's own.
    compute: Operator: its [modelled time](emulation.md#what-is-charged), on any device. Without it, and without a device: the time that
        this machine takes.
    processes_per_nic: Processes that share a NIC evenly.
    """

    dilation: Annotated[float, Meta(ge=1, le=1e9)]
    compute: dict[str, ComputeCost] = field(default_factory=dict)
    devices: dict[str, _Card | tuple[_Card, ...]] = field(default_factory=dict)
    model: _Card = ""
    processes_per_nic: Annotated[int, Meta(ge=1, le=1024)] = 1


_Seconds: TypeAlias = Annotated[float, Meta(ge=0.05, le=86400)]


class ReliabilitySettings(Section, frozen=True):
    """What happens when a process dies, hangs or is slow.

    detector: A monitor detects processes that stop or hang; `false`: only the end of a process is noticed.
    recovery: `fine`: only the dead process restarts, and recovers [by the state it keeps](reliability.md#what-a-run-survives);
        `restart_role`, `restart_all`: [others are restarted with it](reliability.md#recovery-policies); `off`: a death ends the
        run.
    unavailable_expert_seconds: How long requests wait for an expert without any replica, before they end with an error.
    lost_group_seconds: How long requests wait for a group while none is left, before they end with an error.
    suspect_seconds: A process without a heartbeat for so long is suspected.
    dead_seconds: A process with [evidence](reliability.md#evidence) of a standstill for so long is marked dead.
    restarts: Maximum number of restarts of a process in `restart_window_seconds`; at least one for the monitor and the fork server.
    restart_window_seconds: Window in which restarts count.
    hedge: Send a part that a slow server delays to another replica too.
    unavailable_expert: `degrade`: after `unavailable_expert_seconds` requests continue without the expert, and every affected token
        [is marked](reliability.md#degraded-output).
    standby: Processes with loaded weights, each of which can [replace one that dies](reliability.md#standby-processes).
    share_weights: Share equal experts, and proofs of equal weights, between processes of one host and [over
        restarts](reliability.md#weights-outlive-a-process).
    request_log: A folder: each token is written there before it is sent, and outlives the launcher; `flowrt up --resume` continues
        from it. Default: none.
    request_log_sync: Wait until the disk has it, so that it outlives a power loss, too.
    kv_hold_seconds: How long a prefill worker [keeps a computed prompt](kv-transfer.md#when-no-kv-arrives) for its group.
    """

    detector: bool = True
    recovery: Literal["fine", "restart_role", "restart_all", "off"] = "fine"
    unavailable_expert_seconds: _Seconds = 5.0
    lost_group_seconds: _Seconds = 30.0
    suspect_seconds: _Seconds = 0.4
    dead_seconds: _Seconds = 1.0
    restarts: Annotated[int, Meta(ge=0, le=1000)] = 3
    restart_window_seconds: _Seconds = 30.0
    hedge: bool = True
    unavailable_expert: Literal["error", "degrade"] = "error"
    standby: Annotated[int, Meta(ge=0, le=16)] = 0
    share_weights: bool = True
    request_log: str = ""
    request_log_sync: bool = False
    kv_hold_seconds: _Seconds = 600.0


class LongPrompts(Section, frozen=True):
    """Workers that compute long prompts and no others, so that no short prompt waits behind a long one (xDeepServe section 6.2).

    min_tokens: A prompt of so many tokens or more is [long](engine.md#the-gateway).
    workers: So many prefill workers, the last ones, compute only long prompts; groups, where there are none.
    """

    min_tokens: Annotated[int, Meta(ge=2, le=1 << 24)]
    workers: Annotated[int, Meta(ge=1, le=1023)] = 1


class JitterSettings(Section, frozen=True):
    """What keeps pauses out of the steps of running requests (xDeepServe section 4.4).

    garbage_collection: `idle`: a process searches for garbage [while it waits](slow.md#jitter), not in the middle of a step.
    warm_up: Each group serves requests of its own [before the first one of a client](slow.md#jitter).
    """

    garbage_collection: Literal["automatic", "idle"] = "automatic"
    warm_up: bool = False


class ServingSettings(Section, frozen=True):
    """How `flowrt serve` takes requests.

    front_ends: Processes that [serve HTTP](serve.md), tokenize prompts and decode tokens.
    max_requests: Maximum number of active requests; further ones get status 429.
    max_prompt_tokens: Maximum number of tokens in the prompts of all active requests; further ones get status 429.
    max_connections: Maximum number of open connections of a front end; above `max_requests`, so that `/health` and refusals are
        served at once.
    stream_interval: Tokens per event of a stream; the first is always sent at once.
    vllm_metrics: Export the metrics under [vLLM's names](serve.md#metrics) too, for dashboards that query these.
    """

    front_ends: Annotated[int, Meta(ge=1, le=64)] = 1
    max_requests: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    max_prompt_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] = 1 << 20
    max_connections: Annotated[int, Meta(ge=1, le=1 << 16)] = 2048
    stream_interval: Annotated[int, Meta(ge=1, le=1024)] = 1
    vllm_metrics: bool = False


class HostSettings(Section, frozen=True):
    """The hosts of a run: host.0 is the launcher's, an engine starts a host server on each other one.

    engine: What provides the hosts: a Ray cluster; or, for trying, this machine, with a loopback address per host and no memory
        shared between them.
    count: Number of hosts, with the launcher's own.
    address: Ray: the address of the cluster, as for `ray.init`.
    insecure: Ray: use a cluster without token authentication, in which anyone who reaches a port may run code.
    dead_seconds: A host that sends nothing for so long is lost, with all its processes.
    ports: `FROM-TO`: the ports at which processes listen for other hosts. Default: any.
    trusted: Networks that only hosts of the run reach, such as `10.1.0.0/16`: `ucx` may be used there,
        [unencrypted](hosts.md#a-trusted-network). Default: none.
    """

    engine: Literal["ray", "local"] = "ray"
    count: Annotated[int, Meta(ge=1, le=250)] = 2
    address: str = "auto"
    insecure: bool = False
    dead_seconds: Annotated[float, Meta(ge=1, le=3600)] = 3.0
    ports: str = ""
    trusted: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"host.{number}" for number in range(self.count))


class PlaceRule(Section, frozen=True):
    """On which hosts the processes of a role may be.

    hosts: Numbers of the hosts that may hold the role's processes. Default: all.
    near: A role: each process is on the host of that role's process with the same number.
    apart: A role: no process is on a host of that role.
    spread: Replicas of an expert are on different hosts.
    resources: What Ray reserves on the host for each process. Default: `{CPU: 1}`.
    """

    hosts: tuple[int, ...] = ()
    near: str = ""
    apart: str = ""
    spread: bool = True
    resources: dict[str, Annotated[float, Meta(ge=0, le=1e15)]] = field(default_factory=lambda: {"CPU": 1.0})


class GraphSettings(Section, frozen=True, kw_only=True):
    """The keys at the top of a graph file that a Graph holds as well, in the order in which they are written.

    processes: Explicit form only; else `deploy.processes`.
    micro_batches: Explicit form only; else `deploy.attention.micro_batches`.
    numerics: `strict`: no bit of a logit depends on batch, placement or preemption ([numerics.md](numerics.md)).
    role_numerics: Explicit form only: the numerics of a role.
    devices: Explicit form only: the device of a process.
    threads: Explicit form only: the compute threads of a process.
    cores: Explicit form only: the cores that a process runs on.
    place: With `hosts`: where the processes of a role may be.
    routing: Which worker gets a request: `cache_aware`, `round_robin`, or [one of a
        package](extend.md#a-routing-policy); see [the gateway](engine.md#the-gateway).
    """

    processes: Processes = "many"
    micro_batches: Annotated[int, Meta(ge=1, le=64)] = 1
    limits: GraphLimits = GraphLimits()
    numerics: Numerics = "fast"
    role_numerics: dict[str, Numerics] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    threads: dict[str, Threads] = field(default_factory=dict)
    cores: dict[str, Cores] = field(default_factory=dict)
    emulation: Emulation | None = field(default=None, name="emulate")
    reliability: ReliabilitySettings = ReliabilitySettings()
    jitter: JitterSettings = JitterSettings()
    serving: ServingSettings = ServingSettings()
    hosts: HostSettings | None = None
    place: dict[str, PlaceRule] = field(default_factory=dict)
    routing: Annotated[str, Meta(min_length=1)] = ROUTING_POLICIES[0]
    long_prompts: LongPrompts | None = None
