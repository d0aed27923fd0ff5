"""`dispatch`, `experts` and `combine`: the rows of an MoE layer go to the servers of their experts, and the results come back.

The trampolines between them relay: `forward` cuts a bundle into the parts that dispatch would have sent, `return` merges the responses to
it, and `collect` cuts what is merged (exchange/trampoline.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from flowrt.costs.work import FiringLoad, Work
from flowrt.dataflow.parts import BundleHeader, PartHeader, PlanHeader
from flowrt.graph.kinds import Keeps, Kind, Port
from flowrt.graph.placement import expert_map_of, held_experts
from flowrt.graph.settings import Batching
from flowrt.graph.trampoline_edges import forwarded_servers, group_ports, window_of
from flowrt.kinds.site import Site
from flowrt.kinds.weights import row_bytes_of, weight_elements
from flowrt.transports.wire.message import DTYPE_BYTES

if TYPE_CHECKING:
    from flowrt.exchange.expert_client import ExpertClient

EXPERT_PARTS = ("expert_gate_up", "expert_down")
MAX_BATCH_BYTES = 1 << 30  # of rows and intermediate values when an expert server computes several requests in one call


def client_of(site: Site) -> ExpertClient:
    """The client of the process's dispatch node, of which a group has one at most, with the expert map of the graph."""
    from flowrt.exchange.expert_client import ExpertClient
    from flowrt.exchange.trampoline import Trampolines

    graph, config = site.graph, site.config
    node = next(node for node in graph.nodes_of(site.process) if node.kind.dispatches)
    process_of = {edge.source_port: graph.nodes[edge.target].process for edge in graph.edges_from(node.name)}
    processes = [process_of[f"server{server}"] for server in range(len(node.options["servers"]))]
    edges = forwarded_servers(graph, node.name)
    forwarding = {number: process_of[f"via{number}"] for number in edges}
    trampolines = Trampolines(edges, forwarding, {number: window_of(graph, process) for number, process in forwarding.items()})
    expert_map = expert_map_of(graph, node.name, config.moe_layers, config.num_experts)
    return ExpertClient(expert_map, processes, site.device, site.now, trampolines)


def _build_experts(site: Site, node: Any) -> Any:
    """A call has at most so many pairs, and a part at most those of a step."""
    from flowrt.exchange.expert_service import ExpertService
    from flowrt.operators.weights import TORCH_DTYPES

    config, limits = site.config, site.graph.group_limits(widest=True)
    pair_bytes = TORCH_DTYPES[config.dtype].itemsize * 2 * (config.hidden_size + config.expert_width)
    max_part_pairs = limits.max_num_batched_tokens * config.num_experts_per_token
    return ExpertService(site.computation(node), site.strict, max(1, MAX_BATCH_BYTES // pair_bytes), max_part_pairs)


def _compute_experts(site: Site, node: Any) -> Any:
    from flowrt.operators.experts import Experts

    held = held_experts(node.options["experts"], site.config.moe_layers)
    return site.proven(Experts(site.config, site.checkpoint, held, site.device, site.expert_blocks, site.now))


def _load_of_experts(firings: Sequence[Mapping[str, Any]]) -> FiringLoad:
    found = [inputs["rows"].tensors[2].tolist() for inputs in firings]
    return FiringLoad(sum(map(len, found)), len(set(chain.from_iterable(found))))


def _work_of_experts(config: Any, load: FiringLoad) -> Work:
    """Each row comes once, with all its pairs."""
    elements, num_rows = weight_elements(config, EXPERT_PARTS), load.num_rows / config.num_experts_per_token
    num_bytes = load.num_experts * elements * DTYPE_BYTES[config.dtype] + 2 * row_bytes_of(config, FiringLoad(num_rows))
    return Work(num_bytes, 2 * load.num_rows * elements)


def _build(site: Site, node: Any) -> Any:
    """The functions that compute nothing."""
    from flowrt.exchange.dispatch import Combine, Dispatch
    from flowrt.exchange.trampoline import Collect, Return, forward

    if node.kind.relays:
        return forward if node.kind.relays == "requests" else Return(group_ports(site.graph, node.name))
    client = site.once(client_of)
    if node.kind.dispatches:
        return Dispatch(client, site.strict)
    return Combine(client, site.strict) if node.kind.gathers else Collect(client.parts, site.strict)


_PART = "[rows,hidden] int64[pairs] int64[pairs] [pairs]"
_REQUESTS = Port("server*", _PART, header=PartHeader, int8="dispatch")
_BUNDLES = Port("via*", "[distinct,hidden] int64[rows] int64[pairs] int64[pairs] [pairs]", header=BundleHeader, int8="dispatch")
_PLAN = Port("plan", strict_tensors="[rows,active]", repeated="int64[any]", header=PlanHeader)
_responses = partial(Port, tensors="[rows,hidden]", strict_tensors="[pairs,hidden]")
_serves = partial(Kind, keeps=Keeps.NOTHING, takes_each=True)
_merged = Batching(min_tags=1, max_wait_seconds=200e-6)

KINDS = (
    Kind("dispatch", ("x", "routing"), (_PLAN, _REQUESTS, _BUNDLES), options=("servers",), build=_build),
    _serves(
        "experts",
        ("rows",),
        (_responses("results", header=PartHeader, int8="combine"),),
        options=("experts",),
        batches=Batching(),
        parts=EXPERT_PARTS,
        load=_load_of_experts,
        work=_work_of_experts,
        charges="expert_seconds",
        build=_build_experts,
        compute=_compute_experts,
        twin=lambda site, node: site.exact.experts(held_experts(node.options["experts"], site.config.moe_layers)),
    ),
    Kind(
        "combine",
        ("residual", "plan", "parts"),
        (Port("y", "[rows,hidden]", is_residual=True),),
        gathers={"parts": "plan"},
        combines="results",
        build=_build,
    ),
    _serves("forward", ("bundle",), (_REQUESTS,), relays="requests", build=_build),
    _serves(
        "return",
        ("results",),
        (_responses("group*", header=PlanHeader, int8="combine"),),
        batches=_merged,
        relays="responses",
        build=_build,
    ),
    Kind("collect", ("bundle",), (_responses("part*", header=PartHeader),), takes_each=True, combines="relayed", build=_build),
)
