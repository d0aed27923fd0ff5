"""`embed`: the first rows of the residual stream."""

from __future__ import annotations

from typing import Any

from flowrt.costs.work import Work
from flowrt.graph.kinds import Kind, Port
from flowrt.kinds.site import Site, build_call
from flowrt.kinds.weights import row_bytes_of


def embedding_of(site: Site) -> Any:
    """The Embedding, whose weights the head may share."""
    from flowrt.operators.embedding import Embedding

    return Embedding(site.config, site.checkpoint, site.device)


KINDS = (
    Kind(
        "embed",
        ("tokens",),
        (Port("x", "[rows,hidden]", is_residual=True),),
        parts=("embedding",),
        per_step=True,
        work=lambda config, load: Work(2 * row_bytes_of(config, load)),
        build=build_call,
        compute=lambda site, node: lambda layer, tokens_T: site.once(embedding_of).forward(tokens_T),
        twin=lambda site, node: site.exact.on_tensors(lambda layer, tokens_T: site.exact.embed(tokens_T)),
    ),
)
