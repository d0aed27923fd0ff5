"""`dispatch`, `experts` and `combine`: the rows of an MoE layer go to the servers of their experts, and the results come back.

In the process of a trampoline, `forward` and `merge` do the same with one part (exchange/trampoline.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from flowrt.costs.work import FiringLoad, Work
from flowrt.dataflow.parts import PartHeader, PlanHeader
from flowrt.graph.kinds import Keeps, Kind, Port
from flowrt.graph.placement import expert_map_of, held_experts, servers_behind, servers_of
from flowrt.graph.settings import Batching
from flowrt.kinds.site import Site
from flowrt.kinds.weights import row_bytes_of, weight_bytes, weight_elements
from flowrt.operators.model_config import EXPERT_PARTS

if TYPE_CHECKING:
    from flowrt.exchange.expert_client import ExpertClient

MAX_BATCH_BYTES = 1 << 30  # of rows and intermediate values when an expert server computes several requests in one call


def client_of(site: Site) -> ExpertClient:
    """The client of the process's dispatch node, of which it has one at most, with the expert map of the graph."""
    from flowrt.exchange.expert_client import ExpertClient

    graph, config = site.graph, site.config
    node = next(node for node in graph.nodes_of(site.process) if node.kind.dispatches)
    processes = servers_of(graph, node.name)
    expert_map = expert_map_of(graph, node.name, config.moe_layers, config.num_experts)
    client = ExpertClient(expert_map, processes, site.device, site.now, servers_behind(graph, node.name))
    if graph.leaving:
        client.servers.place(expert_map, processes, graph.leaving)
    return client


def _build_experts(site: Site, node: Any) -> Any:
    """A call has at most so many pairs, and a part at most those of a step."""
    from flowrt.exchange.expert_service import ExpertService
    from flowrt.operators.weights import TORCH_DTYPES

    config, limits = site.config, site.graph.group_limits(widest=True)
    item_bytes = TORCH_DTYPES[config.dtype].itemsize if config.expert_weights == "dtype" else 4  # these products are in float32
    pair_bytes = item_bytes * 2 * (config.hidden_size + config.expert_width)
    max_part_pairs = limits.max_num_batched_tokens * config.num_experts_per_token
    return ExpertService(site.computation(node), site.strict, max(1, MAX_BATCH_BYTES // pair_bytes), max_part_pairs)


def _compute_experts(site: Site, node: Any) -> Any:
    from flowrt.operators.experts import Experts

    held = held_experts(node.options["experts"], site.config.moe_layers)
    return site.proven(Experts(site.config, site.checkpoint, held, site.device, site.expert_blocks, site.now))


def _load_of_experts(firings: Sequence[Mapping[str, Any]]) -> FiringLoad:
    found = [inputs["rows"].tensors[2].tolist() for inputs in firings]
    return FiringLoad(sum(map(len, found)), len(set(chain.from_iterable(found))))


def work_of_experts(parts: tuple[str, ...], config: Any, load: FiringLoad) -> Work:
    """Each row comes once, with all its pairs."""
    elements, num_rows = weight_elements(config, parts), load.num_rows / config.num_experts_per_token
    num_bytes = load.num_experts * weight_bytes(config, parts) + 2 * row_bytes_of(config, FiringLoad(num_rows))
    return Work(num_bytes, 2 * load.num_rows * elements)


def _build(site: Site, node: Any) -> Any:
    """The functions that compute nothing."""
    from flowrt.exchange.dispatch import Combine, Dispatch
    from flowrt.exchange.trampoline import Forward, Merge

    client, num_active = site.once(client_of), site.config.num_experts_per_token
    if node.kind.dispatches:
        return Forward(client, num_active, site.strict) if node.kind.forwards else Dispatch(client, site.strict)
    return Combine(client, site.strict) if node.kind.combines else Merge(client, site.strict)


_PART = "[rows,hidden] int64[pairs] int64[pairs] [pairs]"
_REQUESTS = Port("server*", _PART, header=PartHeader, int8="dispatch")
_PLAN = Port("plan", strict_tensors="[rows,active]", repeated="int64[any]", header=PlanHeader)
_responses = partial(Port, tensors="[rows,hidden]", strict_tensors="[pairs,hidden]")
_serves = partial(Kind, keeps=Keeps.NOTHING, takes_each=True)

KINDS = (
    Kind("dispatch", ("x", "routing"), (_PLAN, _REQUESTS), options=("servers",), build=_build),
    _serves(
        "experts",
        ("rows",),
        (_responses("results", header=PartHeader, int8="combine"),),
        options=("experts",),
        batches=Batching(),
        parts=EXPERT_PARTS,
        load=_load_of_experts,
        work=partial(work_of_experts, EXPERT_PARTS),
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
        combines=True,
        build=_build,
    ),
    _serves(
        "forward",
        ("rows",),
        (Port("plan", "[rows,hidden] int64[pairs]", repeated="int64[any]", header=PlanHeader), _REQUESTS),
        options=("servers",),
        forwards=True,
        build=_build,
    ),
    Kind(
        "merge",
        ("plan", "parts"),
        (_responses("results", header=PartHeader, int8="combine"),),
        gathers={"parts": "plan"},
        keeps=Keeps.NOTHING,
        build=_build,
    ),
)
