"""Loads a graph file into a checked graph: reads, overrides, validates, finds the model and the prompts, expands, checks."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from os.path import exists, isfile, normpath
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Literal

from flowrt.costs.cards import card_names, find_card
from flowrt.document import Document, Path_, apply_overrides, document_of, dotted, read_document, read_text
from flowrt.errors import GraphError
from flowrt.graph.checks import check
from flowrt.graph.default import default_graph, folder_hint, hint_of_card, hub_hint
from flowrt.graph.expand import equal_ranks, expand_deploy, trampoline_choice
from flowrt.graph.explicit import build_explicit, role_pair
from flowrt.graph.facts import ModelFacts
from flowrt.graph.folded import MAX_WHOLE, num_processes
from flowrt.graph.hosts import check_hosts, place_processes
from flowrt.graph.model import KEPT_KEYS, Graph, ModelPart, role_of
from flowrt.graph.notation import shown_value
from flowrt.graph.numerics import processes_of_one_thread_count
from flowrt.graph.problems import read_sections, refuse_unbuilt
from flowrt.graph.recovery import attention_groups, prefill_workers
from flowrt.graph.schema import DeploySection, GraphFile
from flowrt.graph.settings import ROUTING_ENTRY_POINTS, ROUTING_POLICIES, Emulation, GraphSettings

FactsOf = Callable[[Path, Any], ModelFacts]  # of a directory and a value of model.implementation
BUILT_IN_SCHEMES = ("inproc", "shm", "zmq", "ucx", "cuda")
TRANSPORT_ENTRY_POINTS = "flowrt.transports"

_EXPLICIT_ONLY = {
    "links": "the short form has deploy.links; write it there",
    "processes": "the short form has deploy.processes; write it there",
    "micro_batches": "the short form has deploy.attention.micro_batches; write it there",
    "devices": "the short form has deploy.attention.device and deploy.experts.device; write it there",
    "threads": "the short form has deploy.attention.threads and deploy.experts.threads; write it there",
    "cores": "the short form has deploy.attention.cores and deploy.experts.cores; write it there",
    "role_numerics": "the short form has deploy.prefill.numerics and deploy.attention.numerics; write it there",
    "folder": "the short form has no functions to find; remove the key",
}


def known_schemes() -> tuple[str, ...]:
    """The transports that a file may name: those of flowrt and those of installed packages. Imports none of them."""
    return (*BUILT_IN_SCHEMES, *sorted(_provided(TRANSPORT_ENTRY_POINTS, tuple(sys.path)) - set(BUILT_IN_SCHEMES)))


@lru_cache(maxsize=8)  # a scan of all installed packages takes 14 ms, and each graph that is loaded asks
def _provided(group: str, path: tuple[str, ...]) -> frozenset[str]:
    return frozenset(entry_points(group=group).names)


def load_graph(
    source: Path | str | Mapping[str, Any],
    overrides: Iterable[str] = (),
    model_dir: Path | str | None = None,
    facts_of: FactsOf | None = None,
    schemes: Collection[str] | None = None,
    folds: bool = False,
) -> Graph:
    """Load a graph, expanded and checked: `source` is the path of a graph file or of a model directory, which has a default graph, or the
    keys of a graph file as a mapping.

    `overrides` are the "path=value" texts of `--set`; `model_dir` replaces model.path. `facts_of` reads the facts of a model directory for
    an implementation (ValueError: no such model); only files with a model need it. `schemes` are the transports that may be named.
    `folds`: of a large deployment only one process of each kind is needed, as to show it: the graph may be `folded`.

    Raises GraphError: one line with file, line, key, what is wrong and what to do. Starts nothing and imports no operator.
    """
    if isinstance(source, Mapping):
        path, document = Path("graph"), document_of(source, "graph")
    else:
        path = Path(source)
        document = _document(path)
    document = apply_overrides(document, overrides)
    folder = _absolute(path, str(path)).parent
    return build_graph(document, folder, model_dir, facts_of, known_schemes() if schemes is None else schemes, folds)


def _absolute(path: Path, where: str) -> Path:
    """The absolute path, which can be sent to workers. Raises GraphError with `where`."""
    try:
        whole = path.absolute()
        str(whole).encode()
    except OSError:  # the working directory was removed
        raise GraphError(where, "", "the working directory was removed; change to another, or give the whole path") from None
    except UnicodeEncodeError:
        raise GraphError(where, "", "the path holds bytes that are not UTF-8; rename the file or folder") from None
    return whole


def _document(path: Path) -> Document:
    wanted = "give the path of a graph file or of a model directory"
    try:
        is_folder = S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise GraphError(str(path), "", f"no such file or folder; {hub_hint(str(path)) or wanted}") from None
    except (OSError, ValueError):
        is_folder = False  # reading the file gives the error
    if not is_folder:
        return read_document(path)
    if not isfile(path / "config.json"):
        if hint := folder_hint(path):
            raise GraphError(str(path), "", hint)
        found = next((file for file in (path / "graph.yaml", path / "graph.yml") if isfile(file)), None)
        raise GraphError(str(path), "", f"is a folder without config.json; {f'did you mean {found}?' if found else wanted}")
    return Document(str(path), default_graph(path))


def build_graph(
    document: Document,
    folder: Path,
    model_dir: Path | str | None,
    facts_of: FactsOf | None,
    schemes: Collection[str],
    folds: bool = False,
) -> Graph:
    """Works as `load_graph` for a document that was read from `folder`. Of equal processes of a large deployment one is checked."""
    read = _validate(document)
    if read.emulation is not None:
        read = read.replace(emulation=_with_paths(read.emulation, folder))
    is_short = read.nodes is None
    model, facts = _model(read, document, folder, model_dir, facts_of)
    choices, ranks = {}, {}
    if is_short and facts is not None:
        deploy = read.deploy or DeploySection()
        if choice := trampoline_choice(deploy):
            choices["deploy.experts.trampoline"] = choice
        if read.hosts is None:  # else processes of a kind differ in their host
            ranks = equal_ranks(deploy)

    def build(folded: dict[str, int]) -> Graph:
        file = read
        if is_short and facts is not None:
            file = expand_deploy(read, read.limits.of_role("attention"), facts, document, folded)
        nodes, edges = build_explicit(file, document)
        return Graph(
            nodes,
            edges,
            model=model,
            prompts=prompts,
            folder=str(folder) if file.folder is None else str(_existing(file.folder, ("folder",), document, folder)),
            choices=choices,
            folded=folded,
            **{name: getattr(file, name) for name in GraphSettings.__struct_fields__},
        )

    prompts = _prompts(read, document, folder)
    graph = build(ranks if sum(ranks.values()) > MAX_WHOLE else {})
    for problem in check(graph, facts, schemes):
        document.fail(_written_path(problem.path, graph, document, is_short), problem.text)
    known = (*ROUTING_POLICIES, *sorted(_provided(ROUTING_ENTRY_POINTS, tuple(sys.path))))
    if graph.routing not in known:
        document.fail(("routing",), f"there is no routing policy {shown_value(graph.routing)}; known are {', '.join(known)}")
    if graph.cores and graph.processes != "many":
        text = f"only a process of its own has cores of its own, and processes is {graph.processes}; write processes: many"
        document.fail(_written_path(("cores", next(iter(graph.cores))), graph, document, is_short), text)
    computing = num_processes(graph, prefill_workers(graph) or attention_groups(graph))
    if graph.long_prompts is not None and graph.long_prompts.workers >= computing:
        text = f"{graph.long_prompts.workers} of {computing} workers are for long prompts; write fewer, so that short ones have one"
        document.fail(("long_prompts", "workers"), text)
    if graph.folded and not folds:
        with _without_collection():
            graph = build({})
    if graph.hosts is not None:
        graph = graph.replace(process_hosts=place_processes(graph, graph.hosts))
    for path, text in check_hosts(graph):
        document.fail(path, text)
    if bound := processes_of_one_thread_count(graph):
        # Bits depend on the number of threads, and `auto` depends on the number of processes.
        num_threads = next((number for process, number in graph.threads.items() if process in bound and number != "auto"), 1)
        graph = graph.replace(threads={**graph.threads, **{name: num_threads for name in graph.process_names() if name in bound}})
    written = {dotted(path): _written_path(path, graph, document, is_short) for path in _checked_later(graph)}
    return graph.replace(places={key: (document.where(path), dotted(path)) for key, path in written.items()})


def _checked_later(graph: Graph) -> Iterator[Path_]:
    """Yield the keys that are checked against this machine, the files of the model and the user's modules."""
    yield from (("model", "path"), ("prompts",))
    yield from (("hosts", "engine"),) if graph.hosts is not None else ()
    yield from (("devices", process) for process, device in graph.devices.items() if device != "cpu")
    yield from (("cores", process) for process in graph.cores)
    yield from (("nodes", node.name, "operator") for node in graph.nodes.values() if node.kind.is_users)
    yield from (("edges", edge.name, "transport") for edge in graph.edges.values() if edge.transport != "auto")


def _written_path(path: Path_, graph: Graph, document: Document, is_short: bool) -> Path_:
    """The key of the file that a key of the expanded graph comes from."""
    section, *rest = path
    if section == "edges" and rest and not document.has(path):
        edge = graph.edges[str(rest[0])]
        if is_short:
            is_transfer = graph.nodes[edge.source].kind.kv and graph.nodes[edge.target].kind.kv
            if rest[-1] == "int8":
                return ("deploy", "prefill" if is_transfer else "experts", "int8")
            link = ("deploy", "links", "prefill-attention" if is_transfer else "attention-experts")
            return (*link, *rest[1:]) if document.has((*link, *rest[1:])) else link
        pair = role_pair(*graph.ends_of(edge)) or ("", "")
        links = [("links", "-".join(each), *rest[1:]) for each in (pair, pair[::-1])]
        return next(filter(document.has, links), path)
    if not is_short:
        return path
    if section in ("devices", "threads", "cores", "role_numerics"):
        key = {"devices": "device", "role_numerics": "numerics"}.get(str(section), section)
        return ("deploy", role_of(str(rest[0])), key) if rest else ("deploy",)
    if section == "nodes":
        return ("deploy", role_of(graph.nodes[str(rest[0])].process)) if rest else ("deploy",)
    return path


def _validate(document: Document) -> GraphFile:
    if document.value is None:
        raise GraphError(document.where(()), "", "is empty; begin the file with flowrt: 1")
    if not isinstance(document.value, dict):
        raise GraphError(document.where(()), "", "is not a mapping; begin the file with flowrt: 1")
    refuse_unbuilt(document)
    file = read_sections(document, GraphFile, "a graph file")
    if file.nodes is None:
        if file.edges is not None:
            document.fail(("edges",), "edges need nodes; write nodes: too")
        for key, text in _EXPLICIT_ONLY.items():
            if document.has((key,)):
                document.fail((key,), text)
        if file.model is None:
            document.fail((), "model is missing; write model: {path: DIRECTORY}, or nodes: and edges: of your own")
    elif file.deploy is not None:
        document.fail(("deploy",), "a file has either deploy: or nodes:; remove one of them")
    return file


def _model(
    file: GraphFile, document: Document, folder: Path, model_dir: Path | str | None, facts_of: FactsOf | None
) -> tuple[ModelPart | None, ModelFacts | None]:
    if file.model is None:
        if model_dir is not None:
            document.fail((), "the graph has no model to replace; remove --model, or write model: {path: DIRECTORY}")
        return None, None
    where: Path_ = ("model", "path")
    if model_dir is not None:
        document.overrides[where] = document.overrides.get(where, f"model.path={model_dir}")
        try:
            path = _absolute(Path(model_dir), f"--model {model_dir}")
            there = path.is_dir()
        except OSError as error:
            raise GraphError(f"--model {model_dir}", "", f"cannot be read ({error.strerror}); give another path") from None
        if not there:
            raise GraphError(
                f"--model {model_dir}", "", f"no such folder; {hub_hint(str(model_dir)) or 'give a Hugging Face model directory'}"
            )
    else:
        path = _card(file.model.path, folder) or _existing(file.model.path, where, document, folder)
    if facts_of is None:
        raise ValueError("load_graph needs facts_of for a file with a model")
    try:
        facts = facts_of(path, file.model.implementation)
    except (ValueError, OSError) as error:
        hint = "" if isfile(path / "config.json") else folder_hint(path)
        text = f"{path} {hint}" if hint else " ".join(str(error).split())
        if model_dir is not None:
            raise GraphError(f"--model {model_dir}", "", text) from error
        document.fail(where, text)
    implementation: Literal["native", "transformers"] = "transformers" if facts.in_library else "native"
    kept: dict[str, Any] = {key: getattr(file.model, key) for key in KEPT_KEYS}
    if file.model.expert_weights == "as_stored":
        kept["expert_weights"] = facts.stored_expert_weights()
    return ModelPart(str(path), file.model.dtype or facts.dtype, facts.eos_token_ids, implementation, **kept), facts


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """No search for garbage: building a large graph makes hardly any, and each search looks at all of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_paths(emulation: Emulation, folder: Path) -> Emulation:
    """The section with whole paths of cards that are beside the graph file."""

    def found(kind: str, card: str) -> str:
        return str(folder / card) if card and card not in card_names(kind) and exists(folder / card) else card

    def devices(named: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return found("devices", named) if isinstance(named, str) else tuple(found("devices", each) for each in named)

    by_name = {name: devices(named) for name, named in emulation.devices.items()}
    return emulation.replace(devices=by_name, model=found("models", emulation.model))


def _card(text: str, folder: Path) -> Path | None:
    """The card of a model without weights: a file beside the graph file, or a card of flowrt where no folder has its name."""
    beside = folder / text
    if text.endswith((".yaml", ".yml", ".json")) and isfile(beside):
        return Path(normpath(beside))
    return None if exists(beside) or exists(text) or text not in card_names("models") else find_card("models", text)


def _existing(text: str, key: Path_, document: Document, folder: Path, is_file: bool = False) -> Path:
    """The file or folder at `text`: beside the graph file, then in the working directory. Does not resolve symbolic links."""
    kind = "file" if is_file else "folder"
    try:
        path = Path(text).expanduser()
        beside = here = folder / path
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            here = Path.cwd() / path
        for candidate in (beside, here):
            if candidate.is_file() if is_file else candidate.is_dir():
                return Path(normpath(candidate))
    except RuntimeError as error:  # an unknown user in "~user"
        document.fail(key, f"{shown_value(text)}: {str(error).rstrip('.')}; write the path out")
    except (OSError, ValueError) as error:
        document.fail(key, f"{shown_value(text)} cannot be read ({_reason(error)}); give the path of a {kind}")
    looked = f"{beside} and {here}" if beside != here else str(beside)
    hint = (hub_hint(text) or hint_of_card(text)) if key == ("model", "path") else ""
    document.fail(key, f"there is no {kind} {shown_value(text)} (looked for {looked}); {hint or 'give the path of one'}")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _prompts(file: GraphFile, document: Document, folder: Path) -> tuple[str, ...]:
    if not isinstance(file.prompts, str):
        return tuple(file.prompts or ())
    path = _existing(file.prompts, ("prompts",), document, folder, is_file=True)
    try:
        lines = read_text(path).split("\n")
    except GraphError as error:
        document.fail(("prompts",), f"{error.where} {error.text}")
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
