"""`flowrt graph validate|show|expand|schema`: work with graph files. It starts no process and loads no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from flowrt.errors import UserError

if TYPE_CHECKING:
    from flowrt.graph.facts import ModelFacts
    from flowrt.graph.model import Graph

graph_app = App(name="graph", help="Check, draw and expand graph files without starting anything.")

GraphPath = Annotated[Path, Parameter(help="A graph file.")]
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=(), help="path=value, such as deploy.experts.servers=2.")]
ModelDirectory = Annotated[Path | None, Parameter(name="--model", help="Another model directory than the file's.")]


def read_facts(directory: Path) -> ModelFacts:
    """The facts of the model in `directory`, for load_graph. Raises ValueError: no such model."""
    from flowrt.graph.facts import ModelFacts
    from flowrt.operators.families.registry import read_model_config

    return ModelFacts.of(read_model_config(directory))


@graph_app.command
def validate(file: GraphPath, /, *, overrides: Overrides = None, model: ModelDirectory = None) -> None:
    """Check a graph file and print one line: what is wrong, or what the graph consists of."""
    graph = _load(file, overrides, model)
    from flowrt.graph.show import valid_words

    print(f"{file}: valid; {valid_words(graph)}")


@graph_app.command
def show(
    file: GraphPath,
    /,
    *,
    mermaid: Annotated[bool, Parameter(negative=(), help="Print Mermaid text instead.")] = False,
    dot: Annotated[bool, Parameter(negative=(), help="Print Graphviz text instead.")] = False,
    svg: Annotated[Path | None, Parameter(help="Write an SVG picture to this file instead.")] = None,
    overrides: Overrides = None,
    model: ModelDirectory = None,
) -> None:
    """Draw the expanded graph: processes, fused nodes, edges between processes."""
    graph = _load(file, overrides, model)
    if mermaid or dot:
        from flowrt.graph.diagrams import to_dot, to_mermaid

        print(to_mermaid(graph) if mermaid else to_dot(graph), end="")
    if svg is not None:
        from flowrt.graph.drawing import to_svg

        try:
            svg.write_text(to_svg(graph, file.name), encoding="utf-8")
        except OSError as error:
            _end(UserError(f"--svg {svg}: cannot be written ({error.strerror}); give a path in a folder that is there"))
        print(f"wrote {svg}")
    if not (mermaid or dot or svg):
        from rich.console import Console

        from flowrt.graph.show import print_graph

        print_graph(graph, file.name, Console())


@graph_app.command
def expand(file: GraphPath, /, *, overrides: Overrides = None, model: ModelDirectory = None) -> None:
    """Print the explicit form: nodes, edges and all defaults. It runs like the file itself."""
    from flowrt.graph.written import to_yaml

    print(to_yaml(_load(file, overrides, model), file.name), end="")


@graph_app.command
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    import json

    from flowrt.graph.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def _load(file: Path, overrides: list[str] | None, model: Path | None) -> Graph:
    from flowrt.graph.file import load_graph

    try:
        return load_graph(file, overrides or (), model, read_facts)
    except UserError as error:
        _end(error)
        raise


def _end(error: UserError) -> None:
    print(f"flowrt: error: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)
