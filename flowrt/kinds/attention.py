"""`attention`: the attention block of every layer, with its KV pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from flowrt.costs.work import FiringLoad, KernelWork, Work
from flowrt.graph.kinds import Kind, Port
from flowrt.kinds.site import Site, pages_of
from flowrt.kinds.weights import product_dtype, row_bytes_of, weight_bytes, weight_elements
from flowrt.transports.wire.message import DTYPE_BYTES

_AFTER = ("attention_output", "attention_output_bias", "delta_out", "mlp_norm")
_PARTS = (
    *("attention_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "latent_down", "query_down_bias", "kv_down_bias"),
    *("delta_in", "delta_conv", "delta_rate", "delta_bias", "delta_norm"),
    *("query_latent_norm", "kv_latent_norm", "query_up", "kv_up", *_AFTER),
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


def attention_load(firings: Sequence[Mapping[str, Any]]) -> FiringLoad:
    """Tokens of context count once for each sequence of a step, also where a sliding window reads fewer."""
    from flowrt.operators.step_layout import KV_LENGTHS, POSITIONS

    num_kv_tokens = sum(int(inputs["layout"].tensors[KV_LENGTHS].sum()) for inputs in firings)
    num_rows = sum(len(inputs["x"].tensors[0]) for inputs in firings)
    num_scores = num_rows + sum(int(inputs["layout"].tensors[POSITIONS].sum()) for inputs in firings)
    return FiringLoad(num_rows, 0, num_kv_tokens, num_scores)


def block_work(config: Any, load: FiringLoad) -> tuple[Work, Work, Work]:
    """Before attention (norm, projections, positions), attention, and after it; what passes between them counts for both. Where some layers
    are recurrent it is the mean over all; what these do to their states is not counted. Latent attention scores latents, or keys and values
    that it expands from them first, whichever takes fewer flops."""
    paged = len(config.paged_layers) / config.num_layers
    rows, kv, item, latent = load.num_rows, load.num_kv_tokens * paged, DTYPE_BYTES[config.dtype], config.latent
    row_bytes, after = rows * config.hidden_size * item, weight_elements(config, _AFTER)
    before, after_bytes = weight_elements(config, _PARTS) - after, weight_bytes(config, _AFTER)
    before_bytes = weight_bytes(config, _PARTS) - after_bytes
    scores = (load.num_scores or load.num_kv_tokens) * paged * config.num_heads
    attended = config.num_heads * (config.head_dim if latent is None else latent.value_width)
    if latent is None:
        flops = 2 * scores * 2 * config.head_dim
    else:
        expansion = max(0.0, kv - rows) * config.num_heads * latent.rank * (latent.nope_width + latent.value_width)
        expanded = scores * (latent.key_width + latent.value_width) + expansion  # that of the rows is among the products before attention
        flops = 2 * min(scores * (latent.page_width + latent.rank), expanded)
    return (
        Work(before_bytes + row_bytes + rows * (attended * item + config.layer_kv_bytes), 2 * rows * before),
        Work(kv * config.layer_kv_bytes + 2 * rows * attended * item, flops),
        Work(after_bytes + rows * attended * item + 3 * row_bytes, 2 * rows * after),
    )


def _work(config: Any, load: FiringLoad) -> Work:
    before, attend, after = block_work(config, load)
    weights, row_bytes = weight_bytes(config, _PARTS), 3 * row_bytes_of(config, load)
    return Work(weights + attend.num_bytes + row_bytes, before.num_flops + attend.num_flops + after.num_flops)


def _pieces(config: Any, load: FiringLoad) -> tuple[KernelWork, ...]:
    before, attend, after = block_work(config, load)
    dtype = product_dtype(config, _PARTS)
    return (
        KernelWork(before, dtype, load.num_rows),
        KernelWork(attend, config.dtype, load.num_rows, attends=True),
        KernelWork(after, dtype, load.num_rows),
    )


KINDS = (
    Kind(
        "attention",
        ("x", "layout"),
        (Port("normed", "[rows,hidden]"), Port("residual", "[rows,hidden]", is_residual=True)),
        stateful=True,
        parts=_PARTS,
        load=attention_load,
        work=_work,
        pieces=_pieces,
        charges="kv_token_seconds",
        build=_build,
        compute=_compute,
        twin=lambda site, node: site.exact.attention(site.once(pages_of)),
    ),
)
