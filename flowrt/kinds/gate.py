"""`gate`: chooses the experts of each row."""

from __future__ import annotations

from typing import Any

from flowrt.costs.work import FiringLoad, Work
from flowrt.graph.kinds import Kind, Port
from flowrt.kinds.site import Site, build_call
from flowrt.kinds.weights import row_bytes_of, weights_work
from flowrt.transports.wire.message import DTYPE_BYTES


def _compute(site: Site, node: Any) -> Any:
    from flowrt.operators.gate import Gate

    return site.proven(Gate(site.config, site.checkpoint, site.config.moe_layers, site.device, site.blocks)).forward


def _work(config: Any, load: FiringLoad) -> Work:
    num_bytes = row_bytes_of(config, load) + load.num_rows * config.num_experts_per_token * (8 + DTYPE_BYTES[config.dtype])
    return weights_work(config, _PARTS, load) + Work(num_bytes)


_PARTS = ("gate", "gate_bias")
KINDS = (
    Kind(
        "gate",
        ("x",),
        (Port("routing", "int64[rows,active] [rows,active]"),),
        parts=_PARTS,
        work=_work,
        build=build_call,
        compute=_compute,
        twin=lambda site, node: site.exact.on_tensors(lambda layer, normed_TH: site.exact.route(normed_TH)),
    ),
)
