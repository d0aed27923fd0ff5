"""The kinds of a model that the module of transformers computes (operators/library_model.py): its embedding, layers, end, head and experts.

`transformers_layer` takes a step's pass through one layer, up to the experts of that layer: in place of `attention` and `gate`. What comes
back from them, without a residual, which the module keeps itself, is its input at the next layer. `transformers_end` follows the last.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flowrt.costs.work import FiringLoad, Work
from flowrt.graph.kinds import Kind, Port
from flowrt.kinds import embed, exchange, head
from flowrt.kinds.attention import KINDS as ATTENTION
from flowrt.kinds.attention import attention_load
from flowrt.kinds.site import Site, pages_of
from flowrt.kinds.weights import row_bytes_of, weight_elements
from flowrt.transports.wire.message import DTYPE_BYTES

BODY, EXPERT = ("library_body",), ("library_expert",)


def library_of(site: Site) -> Any:
    """The LibraryModel of the process."""
    from flowrt.operators.library_model import LibraryModel

    return LibraryModel(site.config, site.checkpoint, site.device)


def _build_layer(site: Site, node: Any) -> Any:
    from flowrt.dataflow.payload import Payload

    forward, is_moe = site.computation(node), frozenset(site.config.moe_layers)

    def fire(firing: Any) -> dict[str, Payload]:
        tag = firing.tag
        residual_TH, rows_TH, routing = forward(tag, firing.inputs["x"].tensors[0], firing.inputs["layout"].tensors)
        found = {"residual": Payload((residual_TH,)), "normed": Payload((rows_TH,))}
        return found | {"routing": Payload(routing)} if tag.layer in is_moe else found

    return lambda firings: [fire(firing) for firing in firings]


def _pass_of(tag: Any) -> tuple[tuple[str, int], tuple[int, int]]:
    """Whose pass a tag is, of which there is one at a time, and which one."""
    return (tag.source, tag.micro_batch), (tag.epoch, tag.step)


def _compute_layer(site: Site, node: Any) -> Any:
    from flowrt.operators.step_layout import StepLayout

    library, pages = site.once(library_of), site.once(pages_of)

    def forward(tag: Any, x_TH: Any, layout: Any) -> Any:
        if tag.layer == 0:
            stop = library.begin(*_pass_of(tag), x_TH, StepLayout.from_tensors(layout), pages)
        else:
            stop = library.resume(*_pass_of(tag), x_TH)
        if stop.ids_TA is None:
            return stop.hidden_TH, stop.hidden_TH, ()
        return x_TH.new_zeros(stop.hidden_TH.shape), stop.hidden_TH, (stop.ids_TA, stop.weights_TA.to(x_TH.dtype))

    return forward


def _twin_of_layer(site: Site, node: Any) -> Any:
    """The arithmetic of `attention` and `gate`; a layer without experts has that of `mlp`, too."""
    from flowrt.operators.step_layout import StepLayout

    exact, attend = site.exact, site.exact.attention(site.once(pages_of))
    route, dense = exact.on_tensors(exact.route), exact.on_tensors(lambda layer, x_TH, normed_TH: x_TH + exact.dense(layer, normed_TH))

    def forward(tag: Any, x_TH: Any, layout: Any) -> Any:
        residual_TH, normed_TH = attend(tag.layer, x_TH, StepLayout.from_tensors(layout))
        is_moe = tag.layer in site.config.moe_layers
        if not is_moe or site.config.shared_expert_width:  # the module computes shared experts, too
            residual_TH = dense(tag.layer, residual_TH, normed_TH)
        return (residual_TH, normed_TH, route(normed_TH)) if is_moe else (residual_TH, residual_TH, ())

    return forward


def _build_end(site: Site, node: Any) -> Any:
    from flowrt.dataflow.payload import Payload

    end = site.computation(node)

    def fire(firing: Any) -> dict[str, Payload]:
        return {"y": Payload((end(firing.tag, firing.inputs["x"].tensors[0]),))}

    return lambda firings: [fire(firing) for firing in firings]


def _compute_end(site: Site, node: Any) -> Any:
    library = site.once(library_of)
    return lambda tag, x_TH: library.end(*_pass_of(tag), x_TH)


def _compute_experts(site: Site, node: Any) -> Any:
    from flowrt.graph.placement import held_experts
    from flowrt.operators.library_experts import LibraryExperts

    return LibraryExperts(site.config, site.checkpoint, held_experts(node.options["experts"], site.config.moe_layers), site.device)


def _work_of_layer(config: Any, load: FiringLoad) -> Work:
    """An equal share of all weights besides those of routed experts, each multiplied with every row, and the KV of the context."""
    elements = weight_elements(config, BODY) / config.num_layers
    num_bytes = elements * DTYPE_BYTES[config.dtype] + load.num_kv_tokens * config.layer_kv_bytes + 3 * row_bytes_of(config, load)
    return Work(num_bytes, 2 * load.num_rows * elements)


(_EMBED,), (_HEAD,), (_ATTENTION,) = embed.KINDS, head.KINDS, ATTENTION
_EXPERTS = next(kind for kind in exchange.KINDS if kind.holds_experts)
KINDS = (
    replace(
        _EMBED,
        name="transformers_embed",
        parts=(),
        compute=lambda site, node: lambda layer, tokens_T: site.once(library_of).embed(tokens_T),
    ),
    replace(
        _ATTENTION,
        name="transformers_layer",
        outputs=(*_ATTENTION.outputs, Port("routing", "int64[rows,active] [rows,active]")),
        parts=BODY,
        load=attention_load,
        work=_work_of_layer,
        pieces=None,
        build=_build_layer,
        compute=_compute_layer,
        twin=_twin_of_layer,
        in_one_thread=True,
    ),
    Kind(
        "transformers_end",
        ("x",),
        (Port("y", "[rows,hidden]", is_residual=True),),
        per_step=True,
        work=lambda config, load: Work(2 * row_bytes_of(config, load)),
        build=_build_end,
        compute=_compute_end,
        twin=lambda site, node: lambda tag, x_TH: x_TH,
    ),
    replace(_HEAD, name="transformers_head", parts=(), compute=lambda site, node: site.once(library_of).logits),
    replace(_EXPERTS, name="transformers_experts", parts=EXPERT, work=partial(exchange.work_of_experts, EXPERT), compute=_compute_experts),
)
