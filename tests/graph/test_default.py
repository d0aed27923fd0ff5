"""A model directory is a graph: the default one, which is also what `flowrt init` writes with comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from graph.model_facts import FACTS

from flowrt.document import parse_document
from flowrt.errors import GraphError
from flowrt.graph.default import default_graph, default_graph_text, hub_hint
from flowrt.graph.file import load_graph
from flowrt.graph.model import Graph


def load(path: Path | str, *overrides: str, model: Path | str | None = None) -> Graph:
    return load_graph(path, overrides, model, lambda *_: FACTS, ("inproc", "shm", "zmq"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / 'my "model", é: #1'
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_model_directory_loads_as_its_default_graph(model: Path) -> None:
    graph = load(model)
    assert graph.model is not None
    assert graph.model.path == str(model)
    assert graph.process_names() == ["attention.0", "experts.0", "experts.1"]
    assert load(model, "deploy.experts.servers=3").process_names()[-1] == "experts.2"


def test_the_commented_text_is_the_default_graph(model: Path) -> None:
    text = default_graph_text(model, ("What is 1 + 2?", 'a "quoted": #prompt'))
    value = parse_document(text, "text").value
    assert value.pop("prompts") == ["What is 1 + 2?", 'a "quoted": #prompt']
    assert value == default_graph(model)
    assert "prompts" not in parse_document(default_graph_text(model), "text").value


def test_an_error_about_a_default_graph_names_no_line(model: Path) -> None:
    with pytest.raises(GraphError) as caught:
        load(model, "deploy.experts.servers=0", "deploy.links.attention-experts.transport=none")
    assert ":1" not in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"is a folder without config\.json; give the path of a graph file or of a model directory"):
        load(tmp_path)
    (tmp_path / "graph.yaml").write_text("flowrt: 1\n")
    with pytest.raises(GraphError, match=r"is a folder without config\.json; did you mean .*/graph\.yaml\?"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://127.0.0.1:8000", "flowrt chat --url http://127.0.0.1:8000 talks with a server"),
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B/tree/main", "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B"),
    ],
)
def test_a_url_gets_what_takes_it(url: str, hint: str, model: Path) -> None:
    for load_it in (lambda: load(Path(url)), lambda: load(model, model=Path(url)), lambda: load(model, f"model.path={url}")):
        with pytest.raises(GraphError, match=f"no (such )?f.*; .*{re.escape(hint)}"):
            load_it()


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"])
def test_a_hub_id_gets_the_command_that_downloads_it(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = f"hf download {name} --local-dir {name.partition('/')[2]}"
    (tmp_path / "g.yaml").write_text(f"flowrt: 1\nmodel: {{path: {name}}}\n")
    for path, other in ((name, None), (model, name), ("g.yaml", None)):
        with pytest.raises(GraphError) as caught:
            load(path, model=other)
        assert command in str(caught.value)


def test_a_path_that_cannot_be_looked_up_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("flowrt: 1")
    for path in (tmp_path / ("n" * 300), tmp_path / "file" / "x"):
        with pytest.raises(GraphError, match="cannot be read"):
            load(path)
    with pytest.raises(GraphError, match="no such file or folder; give the path of a graph file or of a model directory"):
        load(tmp_path / "nothing")


def test_other_names_are_no_hub_ids() -> None:
    assert [hub_hint(name) for name in ("model", "./org/model", "/org/model", "org/model/x", "examples/quickstart.yaml", "a b/c")] == [
        ""
    ] * 6
