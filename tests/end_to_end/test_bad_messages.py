"""An expert server that sends bad messages: it alone is fenced and started again, and every request gets its exact tokens.

A `sitecustomize` makes each of the first incarnations of one real expert server send one bad message in the middle of a run, each of
another kind.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from served_models import Served

import flowrt
from flowrt.launcher import events

CUSTOM = """
import os
import msgspec
from flowrt.dataflow.outbound_edges import OutboundEdges

markers, kinds, sent = {markers!r}, {kinds!r}, [0]
init = OutboundEdges.__init__

def replace(message, **fields):
    return msgspec.structs.replace(message, **fields)

def bad_messages(message, edge):
    kind, tag = kinds[len(os.listdir(markers))], message.tag
    if kind == "wrong edge":
        return [replace(message, edge=edge.request_id)]
    if kind == "double response":
        return [message, message]
    if kind == "stale tag":
        return [replace(message, tag=msgspec.structs.replace(tag, step=max(tag.step - 1, 0), layer=tag.layer + 1))]
    tensor = message.tensors[0]
    spec = tensor.spec
    wrong = msgspec.structs.replace(spec, shape=(spec.shape[0] + 1, spec.shape[1]))
    return [replace(message, tensors=(msgspec.structs.replace(tensor, spec=wrong, data=bytes(wrong.nbytes)),))]

def begin(self, edges, staying, post, *more):
    def post_bad(edge, message):
        sent[0] += message.kind == "data" and edge.source == "experts.0"
        if sent[0] == 20 and edge.source == "experts.0" and len(os.listdir(markers)) < len(kinds):
            bad = bad_messages(message, edge)
            open(os.path.join(markers, str(os.getpid())), "w").close()
            for each in bad:
                post(edge, each)
        else:
            post(edge, message)
    init(self, edges, staying, post_bad, *more)

OutboundEdges.__init__ = begin
"""
KINDS = ("wrong edge", "double response", "stale tag", "wrong shape")


async def test_bad_message_fences_its_sender_alone(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, markers = tmp_path / "custom", tmp_path / "markers"
    folder.mkdir()
    markers.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOM.format(kinds=KINDS, markers=str(markers)))
    monkeypatch.syspath_prepend(folder)
    lost: list[str] = []
    changed = asyncio.Event()

    def on_event(event: events.Event) -> None:
        if isinstance(event, events.WorkerLost):
            lost.append(event.name)
        changed.set()

    deploy = {"attention": {"groups": 1}, "experts": {"servers": 3, "replicas": 2}}
    graph = served.write(tmp_path, deploy, limits={"max_tokens": 64}, reliability={"restarts": len(KINDS)})
    parameters = flowrt.SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [(None, tokens[:12]) for tokens in served.expected[:4]]
    async with asyncio.timeout(100), flowrt.open(graph, on_event=on_event) as running:
        for number in range(1, len(KINDS) + 1):
            while len(list(markers.iterdir())) < number:
                done = await asyncio.gather(*(running.complete(prompt, parameters) for prompt in served.prompts[:4]))
                assert [(each.error, list(each.token_ids)) for each in done] == expected
            while len(lost) < number:
                changed.clear()
                await changed.wait()
    assert lost == ["experts.0"] * len(KINDS)
