"""The settings of a graph: sections of a graph file that a Graph holds as they were read, with their keys, defaults and bounds.

schema.py makes the validation of these sections from their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal


def _key(default: Any, description: str, **bounds: float) -> Any:
    """A key of a graph file with its default, description and bounds, from which schema.py makes its validation."""
    is_text = isinstance(default, str)  # one of a Literal's, which is never converted
    return field(default=default, metadata={"description": description, **bounds, **({} if is_text else {"strict": True})})


@dataclass(frozen=True)
class Batching:
    """Which waiting tags a node takes in one call. Default: all that wait in the layer of the first."""

    same_layer: bool = _key(True, "Only tags of one layer in a call.")
    min_tags: int = _key(2, "A batch of this many tags does not wait for more.", ge=1, le=4096)
    max_wait_seconds: float = _key(0.0, "Maximum wait for min_tags while the process has nothing else to compute.", ge=0, le=3600)
    domains: tuple[tuple[str, ...], ...] = field(
        default=(), metadata={"description": "Source nodes by domain: domains take turns, and a call has tags of one. Default: no turns."}
    )
    turn_calls: int = _key(4, "A turn ends after so many calls if another domain waits; before, when no tag is left.", ge=1, le=4096)


@dataclass(frozen=True)
class GraphLimits:
    """`limits:` of a graph file, for one role."""

    max_num_seqs: int = _key(16, "Sequences per group over all micro-batches.", ge=1, le=4096)
    kv_pages: int = _key(512, "Pages of the KV cache per group.", ge=1, le=1 << 24)
    page_size: int = _key(16, "Tokens per page.", ge=1, le=1024)
    max_tokens: int | None = _key(None, "Requests get at most so many new tokens. Default: as many as fit.", ge=1, le=1 << 20)
    max_num_batched_tokens: int = _key(512, "Maximum number of rows of a step, and so of every message.", ge=1, le=1 << 16)
    chunk_tokens: int = _key(64, "Strict: prompts are cut at its multiples.", ge=1, le=1 << 16)
    enable_prefix_caching: bool = _key(True, "Keep the KV of prompts for later ones that begin with the same tokens.")
    max_micro_batches: int = _key(64, "Use at most so many of the deployment's micro-batches; for roles that need fewer.", ge=1, le=64)
    dynamic_micro_batches: bool = _key(False, "Use as many of the micro-batches as give the most tokens per second, by measuring.")
    target_step_seconds: float = _key(
        0.0, "A step has as many rows as it computes in this time, from the times of earlier steps. 0: no target.", ge=0, le=3600
    )
    in_flight: int = _key(8, "Maximum number of tags in flight in a graph of your own.", ge=1, le=4096)
    max_message_bytes: int = _key(1 << 26, "Maximum payload of a message.", ge=1024, le=1 << 34)


_MODELLED = {"ge": 0, "le": 3600}


@dataclass(frozen=True)
class ComputeCost:
    """Compute time of an operator on the emulated hardware, undilated: the sum of four terms for each layer of a call."""

    fixed_seconds: float = _key(0.0, "Charged once per layer of a call.", **_MODELLED)
    row_seconds: float = _key(0.0, "Charged per row; for experts per row of each expert.", **_MODELLED)
    expert_seconds: float = _key(0.0, "Charged per expert that has rows.", **_MODELLED)
    kv_token_seconds: float = _key(0.0, "Charged per token of context, over all sequences.", **_MODELLED)

    def seconds(self, num_rows: int, num_experts: int = 0, num_kv_tokens: int = 0) -> float:
        experts_and_kv = self.expert_seconds * num_experts + self.kv_token_seconds * num_kv_tokens
        return self.fixed_seconds + self.row_seconds * num_rows + experts_and_kv

    def shortest_seconds(self, charges: str) -> float:
        """The time of one row, with one expert or one token of context where the kind of operator `charges` this key."""
        return self.seconds(1, charges == "expert_seconds", charges == "kv_token_seconds")


@dataclass(frozen=True)
class Emulation:
    """Emulate other hardware, slower by a factor: links take their profiles' times, computation its modelled times."""

    dilation: float = _key(MISSING, "Factor of all modelled times; flowrt doctor prints the smallest possible one.", ge=1, le=1e9)
    compute: Mapping[str, ComputeCost] = field(
        default_factory=dict, metadata={"description": "Operator: its modelled time. Without it: the time that this machine takes."}
    )
    processes_per_nic: int = _key(1, "Processes that share a NIC evenly.", ge=1, le=1024)


_SECONDS = {"ge": 0.05, "le": 86400}


@dataclass(frozen=True)
class ReliabilitySettings:
    """What happens when a process dies, hangs or is slow."""

    detector: bool = _key(True, "Detect processes that hang.")
    recovery: Literal["fine", "restart_role", "restart_all", "off"] = _key(
        "fine", "What restarts after a death: the process, its role, or all workers; off: any death ends the run."
    )
    unavailable_expert_seconds: float = _key(5.0, "How long requests wait for an expert without any replica.", **_SECONDS)
    lost_group_seconds: float = _key(30.0, "How long requests wait for a group while none is left.", **_SECONDS)
    suspect_seconds: float = _key(0.4, "A process without a heartbeat for so long is suspected.", **_SECONDS)
    dead_seconds: float = _key(1.0, "A process with evidence of a standstill for so long is marked dead.", **_SECONDS)
    restarts: int = _key(3, "Maximum number of restarts of a process in restart_window_seconds.", ge=0, le=1000)
    restart_window_seconds: float = _key(30.0, "Window in which restarts count.", **_SECONDS)
    hedge: bool = _key(True, "Send a part that a slow server delays to another replica too.")
    unavailable_expert: Literal["error", "degrade"] = _key(
        "error", "degrade: after unavailable_expert_seconds continue without the expert and mark every token."
    )
    standby: int = _key(0, "Processes with loaded weights, each of which can replace one that dies.", ge=0, le=16)
    share_weights: bool = _key(True, "Share equal experts, and proofs of equal weights, between processes of one host and over restarts.")
    request_log: str = _key("", "A folder: what is committed is written there first, and outlives the launcher (flowrt up --resume).")
    request_log_sync: bool = _key(False, "Wait until the disk has it, so that it outlives a power loss, too.")
    kv_hold_seconds: float = _key(600.0, "How long a prefill worker keeps a computed prompt for its group.", **_SECONDS)


@dataclass(frozen=True)
class LongPrompts:
    """Workers that compute long prompts and no others, so that no short prompt waits behind a long one (xDeepServe section 6.2)."""

    min_tokens: int = _key(MISSING, "A prompt of so many tokens or more is long.", ge=2, le=1 << 24)
    workers: int = _key(1, "So many prefill workers, the last ones, compute only long prompts; groups, where there are none.", ge=1, le=255)


@dataclass(frozen=True)
class JitterSettings:
    """What keeps pauses out of the steps of running requests (xDeepServe section 4.4)."""

    garbage_collection: Literal["automatic", "idle"] = _key(
        "automatic", "idle: a process searches for garbage while it waits, not in the middle of a step."
    )
    warm_up: bool = _key(False, "Each group serves requests of its own before the first one of a client.")


@dataclass(frozen=True)
class ServingSettings:
    """How `flowrt serve` takes requests."""

    front_ends: int = _key(1, "Processes that serve HTTP, tokenize prompts and decode tokens.", ge=1, le=64)
    max_requests: int = _key(1024, "Maximum number of active requests; further ones get status 429.", ge=1, le=1 << 20)
    max_prompt_tokens: int = _key(1 << 20, "Maximum number of tokens in the prompts of all active requests.", ge=1, le=1 << 40)
    max_connections: int = _key(2048, "Maximum number of open connections of a front end.", ge=1, le=1 << 16)
    stream_interval: int = _key(1, "Tokens per event of a stream; the first is always sent at once.", ge=1, le=1024)
    vllm_metrics: bool = _key(False, "Export the metrics under vLLM's names too, for dashboards that query these.")


@dataclass(frozen=True)
class HostSettings:
    """The hosts of a run: host.0 is the launcher's, an engine starts a host server on each other one."""

    engine: Literal["ray", "local"] = _key("ray", "What provides the hosts: a Ray cluster, or this machine, which plays all of them.")
    count: int = _key(2, "Number of hosts, with the launcher's own.", ge=1, le=250)
    address: str = _key("auto", "Ray: the address of the cluster, as for ray.init.")
    insecure: bool = _key(False, "Ray: use a cluster without token authentication, in which anyone who reaches a port may run code.")
    dead_seconds: float = _key(3.0, "A host that sends nothing for so long is lost, with all its processes.", ge=1, le=3600)
    ports: str = _key("", "FROM-TO: the ports at which processes listen for other hosts. Default: any.")
    trusted: tuple[str, ...] = field(default=(), metadata={"description": "Networks that only the hosts reach; ucx may be used there."})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"host.{number}" for number in range(self.count))


@dataclass(frozen=True)
class PlaceRule:
    """On which hosts the processes of a role may be."""

    hosts: tuple[int, ...] = field(default=(), metadata={"description": "Numbers of the hosts that may hold it. Default: all."})
    near: str = _key("", "A role: each process is on the host of that role's process with the same number.")
    apart: str = _key("", "A role: no process is on a host of that role.")
    spread: bool = _key(True, "Replicas of an expert are on different hosts.")
    resources: Mapping[str, float] = field(
        default_factory=lambda: {"CPU": 1.0}, metadata={"description": "Of each process, which Ray reserves on its host."}
    )
