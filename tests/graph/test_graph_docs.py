"""The graph files in the documentation and in the examples are valid, and the errors it quotes are the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrt.errors import GraphError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "graph-files.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(flowrt: 1\n.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_each_file_on_the_page_is_valid(load, tmp_path: Path, index: int) -> None:
    (tmp_path / "tiny-moe").mkdir()
    graph = load(BLOCKS[index])
    assert graph.edges


def test_the_page_has_all_its_examples() -> None:
    assert len(BLOCKS) == 6


def test_the_errors_on_the_page_are_real(load) -> None:
    text = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  attention: {micro_batches: 2}\n  experts: {servers: 2}\n"
    with pytest.raises(GraphError) as caught:
        load(text + "  links: {attention-experts: {credits: 1}}\n")
    assert str(caught.value).rpartition("/")[2] in PAGE
    with pytest.raises(GraphError) as caught:
        load(text, "deploy.experts.replicas=3")
    assert str(caught.value) in PAGE
