"""`gate`: chooses the experts of each row."""

from __future__ import annotations

from typing import Any

from flowrt.graph.kinds import Kind, Port
from flowrt.kinds.site import Site, build_call


def _compute(site: Site, node: Any) -> Any:
    from flowrt.operators.gate import Gate

    return site.proven(Gate(site.config, site.checkpoint, site.config.moe_layers, site.device, site.blocks)).forward


KINDS = (
    Kind(
        "gate",
        ("x",),
        (Port("routing", "int64[rows,active] [rows,active]"),),
        parts=("gate", "gate_bias"),
        build=build_call,
        compute=_compute,
        twin=lambda site, node: site.exact.on_tensors(lambda layer, normed_TH: site.exact.route(normed_TH)),
    ),
)
