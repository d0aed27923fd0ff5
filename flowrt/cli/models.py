"""`flowrt models`: the models that this build can run, and what a checkpoint needs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flowrt.errors import GraphError, UserError, install_command
from flowrt.graph.default import folder_hint, hub_hint
from flowrt.graph.file import load_graph
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.start_checks import check_kept, find_shortage, fitting_pages, memory_needs, needs_text
from flowrt.launcher.tokenizer_files import IDS, conversion
from flowrt.launcher.tokenizer_files import NAME as TOKENIZER
from flowrt.observe import size_text
from flowrt.operators.checkpoint_files import check_files
from flowrt.operators.families.architectures import NOT_TRIED, refused, that_run
from flowrt.operators.families.library import missing_package
from flowrt.operators.families.registry import family_named, known_families, read_model_config
from flowrt.operators.model_config import ModelConfig, ModelError
from flowrt.system.machine_limits import memory_limit_bytes

MIN_PAGES = 64  # of a deployment: contexts of 1,024 tokens
_NARROWER = (["model.expert_weights=int8"], ["model.weights=int8", "model.expert_weights=int8"])  # for operators of flowrt


def print_known(console: Console) -> None:
    """Print the families of flowrt, and the architectures of the installed transformers: those that run, and why others do not."""
    console.print("flowrt's own operators:", highlight=False)
    table = Table.grid(padding=(0, 2))
    for name in known_families():
        about = family_named(name).about
        table.add_row(f"  {name}", about.models if about is not None else "")
    console.print(table, highlight=False)
    if missing := missing_package():
        text = f"through transformers: none, as {missing} is not installed ({install_command('transformers')})"
        console.print(text, highlight=False, markup=False)  # its brackets are no markup
        return
    found = [name for name in that_run() if name not in known_families()]
    console.print(f"through transformers, where its config allows: {', '.join(found)}", highlight=False)
    for reason, names in refused().items():
        console.print(f"{reason if reason == NOT_TRIED else f'refused ({reason})'}: {', '.join(names)}", highlight=False)
    console.print(
        "flowrt models FOLDER reads the config.json of a checkpoint and says whether it runs, how, and with what.", highlight=False
    )


def print_model(path: Path, console: Console) -> None:
    """Print how a checkpoint runs, its memory, and a deployment that fits into this machine. Raises UserError, one line, for one that
    cannot run. `path`: its folder, or its config.json; no weight is needed."""
    directory = path.parent if path.name == "config.json" else path
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise UserError(f"{path}: is a graph file, not a checkpoint; flowrt graph show {path} prints what it needs")
    if not directory.is_dir():
        raise UserError(f"{path}: no such folder; {hub_hint(str(path)) or 'give the folder of a checkpoint, or its config.json'}")
    if not (directory / "config.json").exists() and (hint := folder_hint(directory)):
        raise UserError(f"{path}: {hint}")
    try:
        config = read_model_config(directory)
        notes = check_files(directory) if any(directory.glob("*.safetensors")) else ()
    except ModelError as error:
        raise UserError(str(error)) from error
    as_stored = load_graph(directory, ["model.expert_weights=as_stored"], facts_of=facts_of)
    graph = load_graph(directory, facts_of=facts_of)
    needs, limit_bytes = memory_needs(graph), memory_limit_bytes()
    shortage = find_shortage(graph, needs, limit_bytes)
    table = Table.grid(padding=(0, 2))
    table.add_row("runs by", _how(config))
    table.add_row("model", _layers(config))
    table.add_row("contexts", f"up to {config.max_position_embeddings} tokens; {_kv_text(config)}")
    table.add_row("default graph", needs_text(needs))
    table.add_row("this machine", shortage or f"has {size_text(limit_bytes)}, which is enough")
    settings = fitting_settings(directory, config, limit_bytes)
    if settings is None:
        table.add_row("deployment", f"none that fits here{', with weights in 8 bits neither' if config.library is None else ''}")
    else:
        table.add_row("deployment", f"the default graph{' with ' if settings else ''}{', '.join(settings)}")
    if (stored := as_stored.model.expert_weights if as_stored.model is not None else "dtype") != "dtype":
        table.add_row("experts", f"stored as {stored}; model.expert_weights=as_stored keeps them so, else they are restored")
    if not (directory / TOKENIZER).is_file():
        table.add_row("tokenizer", conversion(directory) or f"none: {IDS}")
    for note in notes:
        table.add_row("note", note)
    console.print(table, highlight=False)
    for line in _commands(directory, config, settings):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def fitting_settings(directory: Path, config: ModelConfig, limit_bytes: int) -> list[str] | None:
    """The keys of the default graph to set, as for --set, so that its processes fit into so much memory. None: no such keys are known."""
    narrower = [["model.dtype=bfloat16"]] if config.item_bytes > 2 else []
    if config.library is None:
        narrower += [[*dtype, *kept] for kept in _NARROWER for dtype in (narrower or [[]])]
    for settings in ([], *narrower):
        try:
            graph = load_graph(directory, settings, facts_of=facts_of)
            check_kept(graph)
        except GraphError:  # weights of a shape that 8 bits have no products for
            continue
        if (pages := fitting_pages(graph, memory_needs(graph), limit_bytes)) >= min(MIN_PAGES, graph.limits.kv_pages):
            return [*settings, *([f"limits.kv_pages={pages}"] if pages < graph.limits.kv_pages else [])]
    return None


def _commands(directory: Path, config: ModelConfig, settings: list[str] | None) -> Iterator[str]:
    """Command lines that write and run the deployment, and that find one for given traffic or other devices."""
    model, folder = str(directory), f"{directory.resolve().name}-graph"
    if settings is not None:
        yield shlex.join(["flowrt", "init", folder, "--model", model])
        sets = [word for each in settings for word in ("--set", each)]
        prompt = ["--prompt", "Hello"] if (directory / TOKENIZER).is_file() else ["--prompts", "FILE"]
        yield shlex.join(["flowrt", "run", f"{folder}/graph.yaml", *sets, *prompt])
    if config.library is None:
        hardware = "1xh20" if settings is None else "machine.yaml"
        num_output = min(256, config.max_position_embeddings // 5)  # a prompt has four times as many tokens as its answer
        traffic = ["--traffic", f"in={4 * num_output},out={num_output},rate=0.1", "--out", f"{folder}.yaml"]
        if settings is not None:
            yield f"flowrt profile --out {hardware}"
        yield shlex.join(["flowrt", "plan", model, "--hardware", hardware, *traffic])


def _how(config: ModelConfig) -> str:
    return f"flowrt's own operators ({config.family})" if config.library is None else "the module of transformers, cut at its experts"


def _layers(config: ModelConfig) -> str:
    moe = f"{len(config.moe_layers)} of {config.num_layers} layers with {config.num_experts} experts"
    return f"{moe}, {config.num_experts_per_token} for each token; {config.dtype}"


def _kv_text(config: ModelConfig) -> str:
    chosen = "" if config.library is None else config.library.index_tokens
    text = f"{config.kv_elements} numbers of KV for each"
    return f"{text}; attention reads {chosen} tokens, which an indexer chooses" if chosen else text
