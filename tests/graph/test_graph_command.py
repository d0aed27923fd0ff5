"""flowrt graph validate|show|expand|schema, as a user calls them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from rich.console import Console

from flowrt.cli.app import main
from flowrt.graph.diagrams import drawn_edges, to_dot, to_mermaid
from flowrt.graph.html_page import to_html
from flowrt.graph.show import print_graph

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
DEPLOY = "flowrt: 1\nmodel: {path: m}\ndeploy:\n  attention: {groups: 2, micro_batches: 2}\n  experts: {servers: 3, replicas: 2}\n"


def call(*words: str) -> int:
    with patch("sys.argv", ["flowrt", "graph", *words]):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def test_validate_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("validate", str(QUICKSTART)) == 0
    model = QUICKSTART.parent / "tiny-moe"
    made_of = f"2 attention groups and 3 expert servers for {model} in float32; 5 processes, 17 nodes, 36 edges"
    out = capsys.readouterr().out
    memory = r"memory: attention 2 x \(1\.5 MiB weights \+ 16\.0 MiB KV\), experts 3 x \(4\.5 MiB weights\), of [0-9.]+ [GT]iB here"
    assert re.fullmatch(rf"{re.escape(f'{QUICKSTART}: valid; {made_of}')}; {memory}\n", out), out


def test_validate_counts_one_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("deploy.attention.groups=1", "deploy.experts.servers=0", "deploy.experts.replicas=1")
    assert call("validate", str(QUICKSTART), *(word for each in alone for word in ("--set", each))) == 0
    shown = capsys.readouterr().out
    assert "valid; 1 attention group for " in shown
    assert "; 1 process, " in shown


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (
        ("validate", str(QUICKSTART), "--set", "deploy.experts.servers=1"),
        ("show", str(QUICKSTART), "--set", "deploy.experts.servers=1"),
        ("expand", str(QUICKSTART), "--set", "deploy.experts.servers=1"),
        ("validate", str(QUICKSTART), "--model", str(tmp_path)),
        ("validate", str(tmp_path / "none.yaml")),
    ):
        assert call(*words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err


def test_expand_prints_what_loads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("expand", str(QUICKSTART), "--set", "deploy.attention.groups=3") == 0
    (tmp_path / "expanded.yaml").write_text(capsys.readouterr().out)
    assert call("expand", str(tmp_path / "expanded.yaml")) == 0
    repeated = capsys.readouterr().out
    assert repeated.split("\n")[1:] == (tmp_path / "expanded.yaml").read_text().split("\n")[1:]


def test_show_in_every_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("show", str(QUICKSTART)) == 0
    plain = capsys.readouterr().out
    assert "process attention.1\n" in plain
    assert plain.count("  memory: 1.5 MiB weights + 16.0 MiB KV\n") == 2
    assert "  fires: combine -> attention -> gate -> dispatch -> head\n" in plain
    assert "edge attention.0.dispatch.server1 <-> experts.1.rows: auto, 3 credits\n" in plain
    # 512 rows of a step, each with 128 float32 values and, for 2 experts, two 8-byte numbers and a weight
    assert plain.count("  slots: 2 clients x 3 credits x 276.0 KiB = 1.6 MiB\n") == 3
    assert "\x1b" not in plain
    assert call("show", str(QUICKSTART), "--mermaid") == 0
    assert capsys.readouterr().out.startswith("flowchart LR\n")
    assert call("show", str(QUICKSTART), "--dot") == 0
    assert capsys.readouterr().out.startswith("digraph flowrt {\n")


def test_svg_is_drawn_by_the_users_graphviz(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "q.svg"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert call("show", str(QUICKSTART), "--svg", str(picture)) == 2
    assert "install Graphviz" in capsys.readouterr().err
    dot = tmp_path / "dot"
    dot.write_text('#!/bin/sh\nread -r line\ntest "$1 $2" = "-Tsvg -o" && echo "<svg/> $line" > "$3"\n')
    dot.chmod(0o755)
    assert call("show", str(QUICKSTART), "--svg", str(picture)) == 0
    assert capsys.readouterr().out == f"wrote {picture}\n"
    assert picture.read_text() == "<svg/> digraph flowrt {\n"
    assert call("show", str(QUICKSTART), "--svg", str(tmp_path / "no" / "q.svg")) == 2
    assert "dot failed" in capsys.readouterr().err


def test_the_schema_knows_every_key_of_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["required"] == ["flowrt"]
    assert {"model", "deploy", "nodes", "edges", "limits", "prompts"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["AttentionSection"]["properties"]["groups"]["default"] == 1
    assert schema["$defs"]["LinksSection"]["properties"].keys() == {"attention-experts", "prefill-attention"}
    assert schema["$defs"]["EdgeSection"]["required"] == []


def test_nothing_heavy_is_imported_to_validate() -> None:
    code = (
        "import sys\nfrom flowrt.cli.graph import graph_app\n"
        f"graph_app(['validate', {str(QUICKSTART)!r}], result_action='return_value')\n"
        "heavy = ('torch', 'zmq', 'numpy', 'multiprocessing', 'flowrt.transports.registry', 'flowrt.cluster', 'flowrt.workers')\n"
        "print(sorted(name for name in sys.modules if name.startswith(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_data_types_load_without_the_file_libraries() -> None:
    code = "import sys, flowrt.graph.model, flowrt.graph.fuse, flowrt.graph.placement\n"
    code += "print([name for name in ('yaml', 'rich', 'cyclopts') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def test_large_graphs_are_drawn_and_shown_by_role(load, capsys: pytest.CaptureFixture[str]) -> None:
    graph = load(DEPLOY, "deploy.attention.groups=12", "deploy.experts.servers=8")
    drawn = re.findall(r'^  "([^"]+)" \[', to_dot(graph), re.MULTILINE)
    assert drawn == ["attention.0-11", "experts.0-7"]
    assert '["attention.0-11<br/>12 processes, 84 nodes"]' in to_mermaid(graph)
    assert '[label="experts.0-7\\n8 processes, 8 nodes"]' in to_dot(graph)
    assert '==>|"96 edges; auto; 3 credits"|' in to_mermaid(graph)
    print_graph(graph, "g.yaml", Console(width=80))
    shown = capsys.readouterr().out
    assert "process attention.0-11, 12 processes such as attention.0\n" in shown
    assert "edge attention.0-11 -> experts.0-7: 96 edges; auto; 3 credits\n" in shown


def test_a_link_is_shown_only_where_it_is_emulated(load) -> None:
    graph = load(DEPLOY, "deploy.links.attention-experts.link=ub")
    emulated = load(DEPLOY, "deploy.links.attention-experts.link=ub", "emulate={dilation: 100}")
    for draw in (to_dot, to_mermaid):
        assert "(ub)" not in draw(graph)
        assert "auto (ub)" in draw(emulated)


def test_each_label_between_processes_has_the_colour_of_its_line(load) -> None:
    lines = re.findall(r'^  "(.+)" -> "(.+)" \[label="(.+?)"(.*)\];$', to_dot(load(DEPLOY)), re.MULTILINE)
    colours: dict[str, set[str]] = {}
    for source, target, _, style in lines:
        servers = [name for name in (source, target) if name.startswith("experts.")]
        assert ("decorate=true" in style) == bool(servers)
        if servers:
            line, label = re.findall(r'color="(#[0-9a-f]{6})"', style)
            assert line == label
            colours.setdefault(servers[0], set()).add(line)
    assert [len(found) for found in colours.values()] == [1, 1, 1]
    assert len(set.union(*colours.values())) == 3


def test_mermaid_and_dot_name_every_node_and_line(load) -> None:
    graph = load(DEPLOY)
    mermaid, dot = to_mermaid(graph), to_dot(graph)
    pairs = {(edge.source, edge.target) for edge in graph.edges.values()}
    assert mermaid.count("-->|") + mermaid.count("==>|") == dot.count(" -> ") == len(pairs)
    for process in graph.process_names():
        assert f'subgraph p{graph.process_names().index(process)}["{process}"]' in mermaid
        assert f'label="{process}";' in dot


def test_a_terminal_gets_the_same_lines_with_bold_names(load, capsys: pytest.CaptureFixture[str]) -> None:
    for terminal in (False, True):
        console = Console(force_terminal=terminal, width=400, color_system=None)  # the path of the model may be long
        print_graph(load(DEPLOY), "g.yaml", console)
    plain, styled = capsys.readouterr().out.split("g.yaml: ")[1:]
    assert re.sub("\x1b[^m]*m", "", styled) == plain
    assert "  holds: experts 0-1,5-7\n" in plain
    assert "  on death: redispatch (state: nothing between two requests)\n" in plain
    assert "  on death: replay (state: sequences)\n" in plain
    assert "edge attention.1.dispatch.server2 <-> experts.2.rows: auto, 3 credits\n" in plain


@pytest.mark.parametrize("groups", [2, 12])
def test_page_has_each_box_inside_and_each_edge_and_nothing_from_elsewhere(groups: int, load) -> None:
    graph = load(DEPLOY, f"deploy.attention.groups={groups}")
    page = ElementTree.fromstring(to_html(graph, "a <graph>").removeprefix("<!doctype html>\n"))
    assert page.findtext("body/h1") == "a <graph>"
    svg = page.find(".//svg")
    assert svg is not None
    boxes = [{name: float(box.attrib[name]) for name in ("x", "y", "width", "height")} for box in svg.iter("rect")]
    for box in boxes:
        assert box["x"] + box["width"] < float(svg.attrib["width"])
        assert box["y"] + box["height"] < float(svg.attrib["height"])
    names = [text.text for text in svg.iter("text") if text.attrib.get("class") == "name"]
    assert names == (graph.process_names() if groups == 2 else ["attention.0-11", "experts.0-2"])
    assert len(boxes) == len(names)
    edges = list(drawn_edges(graph))
    assert len(page.findall(".//table/tr")) == len(edges) + 1
    shown = [line for path in svg.iter("path") for line in (path.findtext("title") or "").splitlines()]
    assert set(shown) <= {f"{edge.source} to {edge.target}: {edge.label}" for edge in edges}
    assert len(shown) == sum(edge.colour is not None or groups == 12 for edge in edges)
    assert not re.search(r"https?:|<script|src=|@import|url\(", to_html(graph, "g"))


def test_page_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", str(QUICKSTART), "--html", str(tmp_path / "graph.html")) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'graph.html'}\n"
    assert (tmp_path / "graph.html").read_text().startswith("<!doctype html>\n")
    assert call("show", str(QUICKSTART), "--html", str(tmp_path)) == 2
    assert "--html" in capsys.readouterr().err
