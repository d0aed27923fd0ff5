"""`flowrt graph validate|show|expand|schema`: reads graph files without starting a process or loading torch."""

from __future__ import annotations

import gc
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from flowrt.cli.options import SET_HELP, Switch
from flowrt.errors import UserError

if TYPE_CHECKING:
    from flowrt.graph.model import Graph

graph_app = App(name="graph", help="Check, show and expand graph files without starting a worker.")

GraphPath = Annotated[Path, Parameter(help="A graph file, or a Hugging Face model directory.")]
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=(), help=SET_HELP)]
ModelDirectory = Annotated[Path | None, Parameter(name="--model", help="Use this Hugging Face model directory instead of the graph's.")]


@graph_app.command
def validate(file: GraphPath, /, *, overrides: Overrides = None, model: ModelDirectory = None) -> None:
    """Check a graph file, the files of its model, its devices and the modules of its operators.

    Prints one line with the first error, or with the size of the graph. It
    starts no worker; a short process imports your modules and torch.
    """
    from flowrt.graph.emulated import emulation_note
    from flowrt.launcher.model_facts import facts_of, has_weights
    from flowrt.launcher.start_check_process import check_processes, start_check_process

    with ExitStack() as stack:
        # Importing torch takes as long as reading a large graph, so the process starts first where it is probably needed.
        process = stack.enter_context(start_check_process()) if _is_probably_explicit(file) else None
        graph = load(file, overrides, model, folds=True)
        from flowrt.graph.show import summary_of_valid
        from flowrt.launcher.start_checks import check_engine, check_model, check_prompts, memory_needs, needs_text
        from flowrt.observe import print_line, size_text
        from flowrt.serving.tokenizer import Tokenizer
        from flowrt.system.machine_limits import memory_limit_bytes

        check_engine(graph)
        notes = check_model(graph, runs=False)
        check_prompts(graph)
        if graph.model is not None and (tokenizer := Tokenizer.open(graph.model.path)) and (problem := tokenizer.chat_problem()):
            notes = (*notes, problem)
        has_functions = any(node.kind.is_users for node in graph.nodes.values())
        if graph.cores or has_functions or any(device != "cpu" for device in graph.devices.values()):
            check_processes(graph, process or stack.enter_context(start_check_process()))
    for note in notes:
        print_line(f"flowrt: warning: {note}")
    needs = memory_needs(graph)
    memory = f"; memory: {needs_text(needs)}, of {size_text(memory_limit_bytes())} here" if needs else ""
    emulated = emulation_note(graph, facts_of(Path(graph.model.path), graph.model.implementation)) if graph.model is not None else ""
    card = "" if graph.model is None or has_weights(graph.model) else "; the model is a card without weights: the graph cannot run"
    print(f"{file}: valid; {summary_of_valid(graph)}{memory}{card}{'; ' * bool(emulated)}{emulated}")


@graph_app.command
def show(
    file: GraphPath,
    /,
    *,
    mermaid: Annotated[Switch, Parameter(help="Print Mermaid text instead.")] = False,
    dot: Annotated[Switch, Parameter(help="Print Graphviz text instead.")] = False,
    svg: Annotated[Path | None, Parameter(help="Write an SVG picture to this file with Graphviz instead.")] = None,
    html: Annotated[Path | None, Parameter(help="Write a page with a picture to this file instead; it needs no other program.")] = None,
    overrides: Overrides = None,
    model: ModelDirectory = None,
) -> None:
    """Show the expanded graph: its processes, fused chains, recovery, and the edges between processes."""
    graph = load(file, overrides, model, folds=True)
    if html is not None:
        from flowrt.graph.html_page import to_html
        from flowrt.system.output_file import check_writable, write_bytes

        check_writable(str(html), "--html")
        write_bytes(str(html), to_html(graph, file.name).encode(), "--html")
        print(f"wrote {html}")
    if mermaid or dot or svg:
        from flowrt.graph.diagrams import to_dot, to_mermaid

        if mermaid or dot:
            print(to_mermaid(graph) if mermaid else to_dot(graph), end="")
        if svg is not None:
            _draw(to_dot(graph), svg)
    if mermaid or dot or svg or html:
        return
    from rich.console import Console

    from flowrt.graph.show import print_graph
    from flowrt.launcher.model_facts import facts_of
    from flowrt.launcher.start_checks import memory_needs

    facts = None if graph.model is None else facts_of(Path(graph.model.path), graph.model.implementation)
    memory = {process: f"{need}" for process, need in memory_needs(graph).items()}
    print_graph(graph, file.name, Console(), facts, memory)


def _is_probably_explicit(file: Path) -> bool:
    """Whether `file` looks like the explicit form, whose operators are mostly the user's functions."""
    with suppress(OSError, ValueError):
        return file.is_file() and b"nodes" in file.read_bytes()
    return False


def _draw(dot: str, path: Path) -> None:
    """Writes an SVG picture with Graphviz."""
    try:
        done = subprocess.run(["dot", "-Tsvg", "-o", str(path)], input=dot, text=True, capture_output=True, check=False)
    except FileNotFoundError:
        raise UserError("--svg needs the program `dot`; install Graphviz, or use --mermaid") from None
    if done.returncode:
        raise UserError(f"--svg {path}: dot failed ({' '.join(done.stderr.split())})")
    print(f"wrote {path}")


@graph_app.command
def expand(file: GraphPath, /, *, overrides: Overrides = None, model: ModelDirectory = None) -> None:
    """Print the explicit form with every default. It gives the same tokens as the file itself."""
    from flowrt.graph.written import to_yaml

    print(to_yaml(load(file, overrides, model), file.name), end="")


@graph_app.command
def schema() -> None:
    """Print the JSON Schema of graph files, for editors."""
    import json

    from flowrt.graph.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def load(file: Path, overrides: list[str] | None, model: Path | None, folds: bool = False) -> Graph:
    """The graph of a file or model directory, without torch; with `folds`, a large one may be folded. Raises GraphError."""
    from flowrt.graph.file import load_graph
    from flowrt.launcher.model_facts import facts_of

    gc.disable()  # the commands that read a graph here end soon; searching a large graph for garbage takes a third of their time
    return load_graph(file, overrides or (), model, facts_of, folds=folds)
