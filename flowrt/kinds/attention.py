"""`attention`: the attention block of every layer, with its KV pages."""

from __future__ import annotations

from functools import partial
from typing import Any

from flowrt.graph.kinds import FiringLoad, Kind, Port
from flowrt.kinds.site import Site, pages_of

_PARTS = (
    "attention_norm mlp_norm qkv qkv_bias query_norm key_norm attention_output attention_output_bias latent_down query_down_bias "
    "kv_down_bias query_latent_norm kv_latent_norm query_up kv_up"
)


def _build(site: Site, node: Any) -> Any:
    """The layers of a step get one layout message between them, so it is read once per step and micro-batch."""
    from flowrt.dataflow.payload import Payload
    from flowrt.operators.step_layout import StepLayout

    forward = site.computation(node)
    read: dict[tuple[str, int], tuple[Payload, StepLayout]] = {}  # by source and micro-batch

    def fire(firing: Any) -> dict[str, Payload]:
        tag, payload = firing.tag, firing.inputs["layout"]
        latest, layout = read.get((tag.source, tag.micro_batch), (None, None))
        if latest is not payload or layout is None:
            layout = StepLayout.from_tensors(payload.tensors)
            read[tag.source, tag.micro_batch] = payload, layout
        residual_TH, normed_TH = forward(tag.layer, firing.inputs["x"].tensors[0], layout)
        return {"residual": Payload((residual_TH,)), "normed": Payload((normed_TH,))}

    return lambda firings: [fire(firing) for firing in firings]


def _compute(site: Site, node: Any) -> Any:
    from flowrt.operators.attention import attention_for

    block = site.proven(attention_for(site.config, site.checkpoint, range(site.config.num_layers), site.device, site.blocks))
    return partial(block.forward, pages=site.once(pages_of))


def _load(inputs: Any) -> FiringLoad:
    """Tokens of context count once for each sequence of a step, also where a sliding window reads fewer."""
    from flowrt.operators.step_layout import KV_LENGTHS

    return FiringLoad(len(inputs["x"].tensors[0]), (), int(inputs["layout"].tensors[KV_LENGTHS].sum()))


KINDS = (
    Kind(
        "attention",
        ("x", "layout"),
        (Port("normed", "[rows,hidden]"), Port("residual", "[rows,hidden]", is_residual=True)),
        stateful=True,
        parts=tuple(_PARTS.split()),
        load=_load,
        charges="kv_token_seconds",
        build=_build,
        compute=_compute,
        twin=lambda site, node: site.exact.attention(site.once(pages_of)),
    ),
)
