"""`mlp`, of a dense layer, and `shared`, the experts of an MoE layer that every row passes through; both add to the residual stream."""

from __future__ import annotations

from functools import partial
from typing import Any

from flowrt.graph.kinds import Kind, Port
from flowrt.kinds.site import Site, build_call


def _compute_dense(site: Site, node: Any) -> Any:
    from flowrt.operators.dense import DenseMlp

    return site.proven(DenseMlp(site.config, site.checkpoint, site.config.dense_layers, site.device, site.blocks)).forward


def _compute_shared(site: Site, node: Any) -> Any:
    from flowrt.operators.dense import SharedExperts

    return site.proven(SharedExperts(site.config, site.checkpoint, site.config.moe_layers, site.device, site.blocks)).forward


def _twin(site: Site, node: Any) -> Any:
    return site.exact.on_tensors(lambda layer, normed_TH, residual_TH: residual_TH + site.exact.dense(layer, normed_TH))


_OUTPUTS = (Port("y", "[rows,hidden]", is_residual=True),)
_adds = partial(Kind, inputs=("x", "residual"), outputs=_OUTPUTS, build=build_call, twin=_twin)
KINDS = (
    _adds("mlp", parts=("dense_gate_up", "dense_down"), compute=_compute_dense),
    _adds("shared", parts=("shared_gate_up", "shared_down"), compute=_compute_shared),
)
