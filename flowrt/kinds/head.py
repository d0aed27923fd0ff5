"""`head`: computes logits and draws the next tokens, with their logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrt.costs.work import FiringLoad, Work
from flowrt.graph.kinds import Kind, Port
from flowrt.kinds.embed import embedding_of
from flowrt.kinds.site import Site
from flowrt.kinds.weights import row_bytes_of, weights_work

MAX_SCORED_ROWS = 256  # rows of prompts whose logits are in memory at once


def _build(site: Site, node: Any) -> Any:
    """Tokens of the sampled rows, and the requested logprobs, of samples and then of prompts: token_S, logprob_L, top_id_LK,
    top_logprob_LK (sampling.py). A step of unfinished prompts returns empty tensors, which also end the step.
    """
    import torch

    from flowrt.dataflow.payload import Payload
    from flowrt.operators.sampling import log_probabilities, sample
    from flowrt.operators.sampling_inputs import SamplingInputs

    forward = site.computation(node)

    def fire(firing: Any) -> dict[str, Payload]:
        inputs, x_TH = SamplingInputs(*firing.inputs["sampling"].tensors), firing.inputs["x"].tensors[0]
        logits_SV = forward(x_TH, inputs.rows_S)
        token_S = sample(logits_SV, inputs)
        num_ranks, found = inputs.ranks_K.numel(), []
        if inputs.logprobs_L.numel():
            found.append(log_probabilities(logits_SV[inputs.logprobs_L], token_S[inputs.logprobs_L], num_ranks))
        for row_G, token_G in (part_2G.unbind() for part_2G in inputs.scored_2G.split(MAX_SCORED_ROWS, dim=1) if part_2G.numel()):
            found.append(log_probabilities(forward(x_TH, row_G), token_G, num_ranks))
        return {"tokens": Payload((token_S, *map(torch.cat, zip(*found, strict=True))))}

    return lambda firings: [fire(firing) for firing in firings]


def _compute(site: Site, node: Any) -> Any:
    from flowrt.operators.head import Head

    embeds = any("embedding" in each.kind.parts for each in site.graph.nodes_of(site.process))
    embedding = site.once(embedding_of) if embeds else None
    return site.proven(Head(site.config, site.checkpoint, site.device, embedding, site.blocks)).forward


def _load(firings: Sequence[Mapping[str, Any]]) -> FiringLoad:
    """The rows whose logits are computed: those that are sampled, and tokens of prompts whose logprobs are wanted."""
    from flowrt.operators.sampling_inputs import SamplingInputs

    sampling = [SamplingInputs(*inputs["sampling"].tensors) for inputs in firings]
    return FiringLoad(sum(each.integers_5S.shape[1] + each.scored_2G.shape[1] for each in sampling))


def _work(config: Any, load: FiringLoad) -> Work:
    """Counts the sampled rows, whose logits are float32."""
    part = "embedding" if config.tie_word_embeddings else "head"
    return weights_work(config, (part,), load) + Work(row_bytes_of(config, load) + load.num_rows * config.vocab_size * 4)


KINDS = (
    Kind(
        "head",
        ("x", "sampling"),
        (Port("tokens", "int64[samples]", optional="wide[logprobs] int64[logprobs,ranks] wide[logprobs,ranks]"),),
        parts=("final_norm", "head"),
        per_step=True,
        load=_load,
        work=_work,
        build=_build,
        compute=_compute,
        twin=lambda site, node: site.exact.on_tensors(lambda x_TH, rows_S: site.exact.logits(x_TH[rows_S])),
    ),
)
