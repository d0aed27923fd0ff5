"""`flowrt models`: the models that this build can run, and what a checkpoint needs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrt.errors import UserError, install_command
from flowrt.graph.default import hub_hint
from flowrt.graph.file import load_graph
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.start_checks import find_shortage, memory_needs, needs_text
from flowrt.observe import size_text
from flowrt.operators.families.architectures import that_run
from flowrt.operators.families.library import missing_package
from flowrt.operators.families.registry import known_families, read_model_config
from flowrt.operators.model_config import ModelConfig, ModelError
from flowrt.system.machine_limits import memory_limit_bytes


def print_known(console: Console) -> None:
    """Print the families of flowrt, and the architectures of the installed transformers that may run through it."""
    console.print(f"flowrt's own operators: {', '.join(known_families())}", highlight=False)
    if missing := missing_package():
        text = f"through transformers: none, as {missing} is not installed ({install_command('transformers')})"
        console.print(text, highlight=False, markup=False)  # its brackets are no markup
        return
    found = [name for name in that_run() if name not in known_families()]
    console.print(f"through transformers, where its config allows: {', '.join(found)}", highlight=False)
    console.print("flowrt models FOLDER reads the config.json of a checkpoint and says whether it runs, and how.", highlight=False)


def print_model(path: Path, console: Console) -> None:
    """Print how a checkpoint runs, its memory, and whether the default graph fits into this machine. Raises UserError, one line, for one
    that cannot run. `path`: its folder, or its config.json; no weight is needed."""
    directory = path.parent if path.name == "config.json" else path
    if not directory.is_dir():
        raise UserError(f"{path}: no such folder; {hub_hint(str(path)) or 'give the folder of a checkpoint, or its config.json'}")
    try:
        config = read_model_config(directory)
    except ModelError as error:
        raise UserError(str(error)) from error
    graph = load_graph(directory, facts_of=facts_of)
    needs, limit_bytes = memory_needs(graph), memory_limit_bytes()
    shortage = find_shortage(graph, needs, limit_bytes)
    table = Table.grid(padding=(0, 2))
    table.add_row("runs by", _how(config))
    table.add_row("model", _layers(config))
    table.add_row("contexts", f"up to {config.max_position_embeddings} tokens; {_kv_text(config)}")
    table.add_row("default graph", needs_text(needs))
    table.add_row("this machine", shortage or f"has {size_text(limit_bytes)}, which is enough")
    console.print(table, highlight=False)


def _how(config: ModelConfig) -> str:
    return f"flowrt's own operators ({config.family})" if config.library is None else "the module of transformers, cut at its experts"


def _layers(config: ModelConfig) -> str:
    moe = f"{len(config.moe_layers)} of {config.num_layers} layers with {config.num_experts} experts"
    return f"{moe}, {config.num_experts_per_token} for each token; {config.dtype}"


def _kv_text(config: ModelConfig) -> str:
    chosen = "" if config.library is None else config.library.index_tokens
    text = f"{config.kv_elements} numbers of KV for each"
    return f"{text}; attention reads {chosen} tokens, which an indexer chooses" if chosen else text
