"""KV transfer (exchange/kv_transfer.py): a group requests the KV of a prompt, chunk by chunk, from the worker that computed it.

`kv_pack` offers the KV of prompts and `kv_unpack` pulls it. In the process of `kv_pack`, `kv_progress` takes the layers of a running step
that have their KV, so that it can be pulled before the step ends; `kv_extra` takes the rows of a step, of which those of the last tokens
of prompts travel with their KV.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flowrt.exchange.kv_headers import ChunkHeader, PullHeader
from flowrt.graph.extra_tensors import num_bytes, ports_of_extras, received_extras, rows_of_extra, sent_extras
from flowrt.graph.kinds import Keeps, Kind, Port
from flowrt.kinds.site import Site, pages_of


def _build(site: Site, node: Any) -> Any:
    from flowrt.actors.link_plan import KV_CHUNK_BYTES
    from flowrt.dataflow.schemas import parse_spec
    from flowrt.exchange.kv_transfer import KvPack, KvUnpack

    graph, pages = site.graph, site.computation(node)
    extras = received_extras(node) if node.kind.emits else sent_extras(graph, site.process)
    specs = {name: parse_spec(text) for name, text in extras.items()}
    if node.kind.emits:
        return KvUnpack(pages, specs)
    int8_pulls = [edge.request_id for edge in graph.edges_from(node.name) if edge.int8 and edge.request_id is not None]
    return KvPack(pages, int8_pulls, min(KV_CHUNK_BYTES, graph.limits_of(site.process).max_message_bytes - num_bytes(extras)), specs)


def _pages(site: Site, node: Any) -> Any:
    return site.once(pages_of)


_CHUNK = Port("chunk", "pages[tokens,kv_heads,first_columns] pages[tokens,kv_heads,second_columns]", header=ChunkHeader, int8="kv")
_end = partial(Kind, build=_build, compute=_pages, twin=_pages)
_of_prompts: dict[str, Any] = {"keeps": Keeps.PROMPTS, "takes_each": True}

KINDS = (
    _end("kv_pack", ("pull",), (_CHUNK,), kv="offers", sink=lambda pack, unpack, node: pack and pack.on_pull, **_of_prompts),
    _end(
        "kv_unpack",
        ("chunk",),
        (Port("pull*", header=PullHeader),),
        options=("num_layers",),
        may_have=("extras",),
        option_ports=lambda options: ({}, ports_of_extras(options)),
        emits=True,
        every_layer=("*",),
        kv="pulls",
        sink=lambda pack, unpack, node: unpack and unpack.on_chunk,
    ),
    Kind("kv_progress", ("rows",), is_early=True, sink=lambda pack, unpack, node: pack and pack.on_written, **_of_prompts),
    Kind(
        "kv_extra",
        ("rows",),
        options=("name", "tensor"),
        option_ports=lambda options: (rows_of_extra(options), {}),
        sink=lambda pack, unpack, node: pack and partial(pack.on_extra, node.options["name"]),
        **_of_prompts,
    ),
)
