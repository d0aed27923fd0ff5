"""KV transfers in the explicit form: every group can pull from every prefill worker."""

from __future__ import annotations

import pytest
import yaml

from flowrt.errors import GraphError
from flowrt.graph.written import to_yaml

PREFILL = "flowrt: 1\nmodel: {path: m}\ndeploy: {prefill: {workers: 2}, attention: {groups: 2}}\n"


@pytest.mark.parametrize(
    ("nodes", "edges", "text"),
    [
        ((), "attention.1.kv_unpack.pull1", "group attention.1 does not pull from prefill worker prefill.1, whose prompts it may get"),
        (("attention.1.kv_unpack",), "attention.1.kv_unpack", "group attention.1 has no kv_unpack, so it cannot pull the prompts of"),
    ],
)
def test_a_group_that_does_not_pull_from_a_prefill_worker_is_refused(load, nodes: tuple[str, ...], edges: str, text: str) -> None:
    """Its requests would wait for ever."""
    written = yaml.safe_load(to_yaml(load(PREFILL)))
    written["nodes"] = {name: node for name, node in written["nodes"].items() if name not in nodes}
    removed = {name for name in written["edges"] if edges in name}
    assert removed
    kept = {name: edge for name, edge in written["edges"].items() if name not in removed and edge.get("response_to") not in removed}
    with pytest.raises(GraphError, match=text):
        load(yaml.safe_dump(written | {"edges": kept}))
