"""From a graph file to a checked Graph: the one door into this room.

Here: `load_graph`, which reads, overrides, validates, finds the model and the prompts, expands, and checks. Not here: each of these
steps (document.py, schema.py, problems.py, expand.py, explicit.py, checks.py). Called by the command line and the Python API.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowrt.errors import GraphError
from flowrt.graph.checks import check
from flowrt.graph.document import Document, Path_, apply_overrides, read_document
from flowrt.graph.emulated import check_emulation, emulation_of
from flowrt.graph.expand import deploy_roles, expand_deploy
from flowrt.graph.explicit import build_explicit
from flowrt.graph.facts import ModelFacts
from flowrt.graph.model import GATEWAY, Graph, GraphLimits, ModelPart, ReliabilitySettings
from flowrt.graph.notation import shown_value
from flowrt.graph.problems import raise_first, refuse_what_is_not_built
from flowrt.graph.schema import DeploySection, GraphFile
from flowrt.transports.wire.message import DTYPE_BYTES

FactsOf = Callable[[Path], ModelFacts]
BUILT_IN_SCHEMES = ("inproc", "shm", "zmq", "ucx", "cuda")
TRANSPORT_ENTRY_POINTS = "flowrt.transports"
MAX_PROMPT_FILE_BYTES = 8 << 20
MIN_SUSPECT_SECONDS = 0.2  # two beats

_EXPLICIT_ONLY = {
    "processes": "the short form has deploy.processes; write it there",
    "micro_batches": "the short form has deploy.attention.micro_batches; write it there",
    "devices": "the short form has deploy.attention.device and deploy.experts.device; write it there",
    "threads": "the short form has deploy.attention.threads and deploy.experts.threads; write it there",
    "folder": "the short form has no functions to find; remove the key",
}
_FAULT_PLAN = re.compile(r"^faulty\+|(?<=[\w.+-])\?.*$")  # faulty+shm?drop@100 is shm, misbehaving as planned


def known_schemes() -> tuple[str, ...]:
    """The transports that can be named: those of flowrt, and those that installed packages bring. Imports none of them."""
    brought = {entry.name for entry in entry_points(group=TRANSPORT_ENTRY_POINTS)}
    return (*BUILT_IN_SCHEMES, *sorted(brought - set(BUILT_IN_SCHEMES)))


def load_graph(
    path: Path | str,
    overrides: Iterable[str] = (),
    model_dir: Path | str | None = None,
    facts_of: FactsOf | None = None,
    schemes: Collection[str] | None = None,
) -> Graph:
    """The graph that the file at `path` describes, expanded and checked.

    `overrides` are "path=value" texts of `--set`; `model_dir` replaces model.path. `facts_of` reads the facts of the model directory it
    is given (ValueError: no such model); it is needed only for files with a model. `schemes` are the transports that may be named.

    Raises GraphError, one line with file, line, key, what is wrong and what would be right. Starts nothing, imports no operator.
    """
    path = Path(path)
    document = apply_overrides(read_document(path), overrides)
    try:
        folder = path.absolute().parent
    except OSError:  # read from a working directory that somebody has removed
        raise GraphError(str(path), "", "the working directory is gone; go to another, or give the whole path") from None
    return build_graph(document, folder, model_dir, facts_of, known_schemes() if schemes is None else schemes)


def build_graph(
    document: Document, folder: Path, model_dir: Path | str | None, facts_of: FactsOf | None, schemes: Collection[str]
) -> Graph:
    """As `load_graph`, of a document already read from `folder`."""
    file = _validate(document)
    explicit = file.nodes is not None
    model, facts = _model(file, document, folder, model_dir, facts_of)
    limits = GraphLimits(**file.limits.model_dump())
    common: dict[str, Any] = {"model": model, "limits": limits, "numerics": file.numerics, "prompts": _prompts(file, document, folder)}
    common["emulation"] = emulation_of(file.emulate)
    common["reliability"] = _reliability(file, document)
    if explicit:
        micro_batches = file.micro_batches or 1
        nodes, edges = build_explicit(file.nodes or {}, file.edges or {}, micro_batches, limits.in_flight, document)
        graph = Graph(
            nodes=nodes,
            edges=edges,
            processes=file.processes or "many",
            micro_batches=micro_batches,
            devices=_per_process(file.devices, "devices", nodes, document),
            threads=_per_process(file.threads, "threads", nodes, document),
            folder=str(folder) if file.folder is None else str(_existing(file.folder, ("folder",), document, folder)),
            **common,
        )
    else:
        deploy = file.deploy or DeploySection()
        assert facts is not None  # _validate asks for a model where there are no nodes
        nodes, edges = expand_deploy(deploy, file.limits, facts, document)
        roles = deploy_roles(deploy)
        graph = Graph(
            nodes=nodes,
            edges=edges,
            processes=deploy.processes,
            micro_batches=deploy.attention.micro_batches,
            devices={process: role.device for process, role in roles.items()},
            threads={process: role.threads for process, role in roles.items()},
            folder=str(folder),
            **common,
        )
    if graph.numerics == "strict":
        graph = _strict(graph, explicit, document)
    _check_schemes(graph, explicit, schemes, document)
    _check_message_size(graph, facts, document)
    problem = next(check(graph, facts), None)
    if problem is not None:
        document.fail(problem.path if explicit else _short_path(problem.path), problem.text)
    problem = next(check_emulation(graph), None)
    if problem is not None:
        document.fail(problem.path if explicit or problem.path[0] == "emulate" else _short_path(problem.path), problem.text)
    return graph


def _validate(document: Document) -> GraphFile:
    if document.value is None:
        raise GraphError(document.where(()), "", "is empty; begin the file with flowrt: 1")
    if not isinstance(document.value, dict):
        raise GraphError(document.where(()), "", "is no mapping; begin the file with flowrt: 1")
    refuse_what_is_not_built(document)
    try:
        file = GraphFile.model_validate(document.value)
    except ValidationError as error:
        raise_first(document, error)
        raise AssertionError from error
    if file.nodes is None:
        if file.edges is not None:
            document.fail(("edges",), "edges without nodes; write nodes: too")
        for key, text in _EXPLICIT_ONLY.items():
            if document.has((key,)):
                document.fail((key,), text)
        if file.model is None:
            document.fail((), "model is missing; write model: {path: DIRECTORY}, or nodes: and edges: of your own")
    elif file.deploy is not None:
        document.fail(("deploy",), "a file has either deploy: or nodes:; remove one of them")
    return file


def _reliability(file: GraphFile, document: Document) -> ReliabilitySettings:
    settings = ReliabilitySettings(**file.reliability.model_dump())
    if settings.suspect_seconds < MIN_SUSPECT_SECONDS:
        text = f"suspected after {settings.suspect_seconds:g} s; a sign of work comes every 0.1 s, write at least {MIN_SUSPECT_SECONDS:g}"
        document.fail(("reliability", "suspect_seconds"), text)
    if settings.dead_seconds <= settings.suspect_seconds:
        key = "dead_seconds" if document.has(("reliability", "dead_seconds")) else "suspect_seconds"
        text = f"dead after {settings.dead_seconds:g} s and suspected after {settings.suspect_seconds:g} s; dead_seconds must be the longer"
        document.fail(("reliability", key), text)
    if settings.unavailable_expert == "degrade" and settings.recovery == "off":
        document.fail(("reliability", "unavailable_expert"), "degrade needs a run that continues when a server dies; write recovery: fine")
    return settings


def _model(
    file: GraphFile, document: Document, folder: Path, model_dir: Path | str | None, facts_of: FactsOf | None
) -> tuple[ModelPart | None, ModelFacts | None]:
    if file.model is None:
        if model_dir is not None:
            document.fail((), "the graph has no model that --model could replace; remove the option, or write model: {path: DIRECTORY}")
        return None, None
    where: Path_ = ("model", "path")
    if model_dir is not None:
        document.overrides[where] = document.overrides.get(where, f"model.path={model_dir}")
        try:
            path = Path(model_dir).absolute()
            there = path.is_dir()
        except OSError as error:
            raise GraphError(f"--model {model_dir}", "", f"cannot be looked at ({error.strerror}); give another path") from None
        if not there:
            raise GraphError(f"--model {model_dir}", "", "no such folder; give a Hugging Face model directory")
    else:
        path = _existing(file.model.path, where, document, folder)
    if facts_of is None:
        raise ValueError("load_graph needs facts_of for a file with a model")
    try:
        facts = facts_of(path)
    except (ValueError, OSError) as error:
        if model_dir is not None:
            raise GraphError(f"--model {model_dir}", "", " ".join(str(error).split())) from error
        document.fail(where, " ".join(str(error).split()))
    return ModelPart(str(path), file.model.dtype or facts.dtype), facts


def _existing(text: str, key: Path_, document: Document, folder: Path, is_file: bool = False) -> Path:
    """The file or folder called `text`: beside the graph file, then in the working directory. Links are kept as they are."""
    kind = "file" if is_file else "folder"
    try:
        path = Path(text).expanduser()
        beside = here = folder / path
        with contextlib.suppress(FileNotFoundError):  # the working directory is gone
            here = Path.cwd() / path
        for candidate in (beside, here):
            if candidate.is_file() if is_file else candidate.is_dir():
                return Path(_normal(candidate))
    except RuntimeError as error:  # ~nobody
        document.fail(key, f"{shown_value(text)}: {str(error).rstrip('.')}; write the path out")
    except (OSError, ValueError) as error:
        document.fail(key, f"{shown_value(text)} cannot be looked at ({_reason(error)}); give the path of a {kind}")
    looked = f"{beside} and {here}" if beside != here else str(beside)
    document.fail(key, f"there is no {kind} {shown_value(text)} (looked for {looked}); give the path of one")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _normal(path: Path) -> str:
    from os.path import normpath

    return normpath(path)


def _prompts(file: GraphFile, document: Document, folder: Path) -> tuple[str, ...]:
    if not isinstance(file.prompts, str):
        return tuple(file.prompts or ())
    path = _existing(file.prompts, ("prompts",), document, folder, is_file=True)
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_PROMPT_FILE_BYTES + 1)
    except OSError as error:
        document.fail(("prompts",), f"{path} cannot be read ({_reason(error)}); give a file that you may read")
    if len(content) > MAX_PROMPT_FILE_BYTES:
        document.fail(("prompts",), f"{path} is larger than {MAX_PROMPT_FILE_BYTES >> 20} MiB; give it to flowrt run --prompts in pieces")
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        document.fail(("prompts",), f"{path} is not UTF-8 text; save it as UTF-8")
    if path.suffix != ".jsonl":
        return tuple(line.rstrip("\r") for line in lines if line.strip())
    return tuple(_prompt(line, f"{path}:{number}", document) for number, line in enumerate(lines, 1) if line.strip())


def _prompt(line: str, where: str, document: Document) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        document.fail(("prompts",), f'{where} is not JSON; write {{"prompt": "text"}}')
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return str(value["prompt"])
    hint = 'write {"prompt": "text"}, or give token ids to flowrt run --prompts'
    document.fail(("prompts",), f'{where} has no text under "prompt"; {hint}')


def _per_process(values: dict[str, Any] | None, key: str, nodes: Any, document: Document) -> dict[str, Any]:
    processes = {node.process for node in nodes.values()} - {GATEWAY}
    for process in values or {}:
        if process not in processes:
            from flowrt.graph.notation import nearest

            document.fail((key, process), f"no node lies in a process {process!r}; {nearest(process, processes)}")
    return dict(values or {})


def _strict(graph: Graph, explicit: bool, document: Document) -> Graph:
    """What strict numerics ask for: one number of compute threads everywhere (`auto` depends on how many processes there are, and
    bits on the number of threads), CPUs, and chunks that fit into a step."""
    numbers = sorted({wish for wish in graph.threads.values() if wish != "auto"})
    if len(numbers) > 1:
        path: Path_ = ("threads",) if explicit else ("deploy", "experts", "threads")
        text = f"strict numerics need the same threads everywhere, here are {' and '.join(map(str, numbers))}; write one number"
        document.fail(path, text)
    for process, device in graph.devices.items():
        if device != "cpu":
            role = "experts" if process.startswith("experts.") else "attention"
            path = ("devices", process) if explicit else ("deploy", role, "device")
            document.fail(path, f"strict numerics are for CPUs, {process} computes on {device}; write cpu, or numerics: fast")
    limits = graph.limits
    if limits.chunk_tokens > limits.max_num_batched_tokens:
        text = f"a chunk of {limits.chunk_tokens} tokens exceeds limits.max_num_batched_tokens {limits.max_num_batched_tokens}"
        document.fail(("limits", "chunk_tokens"), f"{text}; write {limits.max_num_batched_tokens} or less")
    return replace(graph, threads=dict.fromkeys(graph.process_names(), numbers[0] if numbers else 1))


def _check_schemes(graph: Graph, explicit: bool, schemes: Collection[str], document: Document) -> None:
    from flowrt.graph.notation import nearest

    for edge in graph.edges.values():
        path: Path_ = ("edges", edge.name, "transport") if explicit else ("deploy", "links", "attention-experts", "transport")
        if _FAULT_PLAN.sub("", edge.transport) in ("auto", *schemes):
            continue
        document.fail(path, f"there is no transport {edge.transport!r}; {nearest(edge.transport, ('auto', *schemes))}")


def _check_message_size(graph: Graph, facts: ModelFacts | None, document: Document) -> None:
    """A part carries at most one row per (row, slot) pair of a step; answers carry no more."""
    if facts is None or graph.model is None or not any(node.operator == "dispatch" for node in graph.nodes.values()):
        return
    pair_bytes = facts.hidden_size * DTYPE_BYTES[graph.model.dtype] + 32  # and its indices and weight
    needed = graph.limits.max_num_batched_tokens * facts.num_experts_per_token * pair_bytes
    if needed > graph.limits.max_message_bytes:
        tokens = graph.limits.max_num_batched_tokens
        text = f"a step of {tokens} tokens can need {needed} bytes; write at least {needed}, or lower limits.max_num_batched_tokens"
        document.fail(("limits", "max_message_bytes"), text)


def _short_path(path: Path_) -> Path_:
    """Where a problem of an expanded edge or node comes from in the short form."""
    return ("deploy", "links", "attention-experts") if path[:1] == ("edges",) else ("deploy",)
