"""`mlp`, of a dense layer, and `shared`, the experts of an MoE layer that every row passes through; both add to the residual stream."""

from __future__ import annotations

from functools import partial
from typing import Any

from flowrt.costs.work import FiringLoad, Work
from flowrt.graph.kinds import Kind, Port
from flowrt.kinds.site import Site, build_call
from flowrt.kinds.weights import row_bytes_of, weights_work


def _compute_dense(site: Site, node: Any) -> Any:
    from flowrt.operators.dense import DenseMlp

    return site.proven(DenseMlp(site.config, site.checkpoint, site.config.dense_layers, site.device, site.blocks)).forward


def _compute_shared(site: Site, node: Any) -> Any:
    from flowrt.operators.dense import SharedExperts

    return site.proven(SharedExperts(site.config, site.checkpoint, site.config.moe_layers, site.device, site.blocks)).forward


def _twin(site: Site, node: Any) -> Any:
    return site.exact.on_tensors(lambda layer, normed_TH, residual_TH: residual_TH + site.exact.dense(layer, normed_TH))


def _work(parts: tuple[str, ...], config: Any, load: FiringLoad) -> Work:
    return weights_work(config, parts, load) + Work(3 * row_bytes_of(config, load))


_DENSE, _SHARED = ("dense_gate_up", "dense_down"), ("shared_gate_up", "shared_down", "shared_gate")
_OUTPUTS = (Port("y", "[rows,hidden]", is_residual=True),)
_adds = partial(Kind, inputs=("x", "residual"), outputs=_OUTPUTS, build=build_call, twin=_twin)
KINDS = (
    _adds("mlp", parts=_DENSE, work=partial(_work, _DENSE), compute=_compute_dense),
    _adds("shared", parts=_SHARED, work=partial(_work, _SHARED), compute=_compute_shared),
)
