"""Opens the request log of a graph, and says which graphs and models may continue one."""

from __future__ import annotations

from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flowrt.gateway.log_contents import LogContents
from flowrt.gateway.log_writer import LogWriter, open_log
from flowrt.graph.model import Graph
from flowrt.graph.numerics import is_exact, numerics_text
from flowrt.seams import Seams

NUM_SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file of a model: to read gigabytes would delay the start


def open_request_log(graph: Graph, seams: Seams, resumes: bool) -> tuple[LogWriter, LogContents] | None:
    """The log that the graph asks for, and what an earlier launcher left there. None: it asks for none. Raises UserError."""
    settings = graph.reliability
    if not settings.request_log or graph.model is None:
        return None
    folder = seams.open_log_folder(Path(graph.folder, settings.request_log))
    compute = seams.new_compute("request log") if settings.request_log_sync else None
    return open_log(folder, identity_of(graph), resumes, compute, first_number=seams.new_seed())


def identity_of(graph: Graph) -> dict[str, str]:
    """What the tokens of a request depend on: a log is continued by a graph with the same values. How the model is deployed is not part
    of it."""
    assert graph.model is not None
    limits = graph.group_limits()
    model = graph.model
    found = {"model": model_digest(Path(model.path)), "dtype": model.dtype, "numerics": numerics_text(graph)}
    found |= model.kept  # a log of before has none of these
    if is_exact(graph):
        threads = str(next(iter(graph.threads.values()), 1))  # the same everywhere
        found |= {"page_size": str(limits.page_size), "chunk_tokens": str(limits.chunk_tokens), "threads": threads, "torch": _torch_build()}
    return found


def _torch_build() -> str:
    """The version of torch and its kind ("2.9.0+cpu"), without an import of it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"


def model_digest(directory: Path) -> str:
    """A digest of the model's configuration, stop tokens, tokenizer and weights: name, size and samples of each file."""
    digest = blake2b(digest_size=16)
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    paths = [*(directory / name for name in names), *sorted(directory.glob("*.safetensors"))]
    for path in paths:
        if path.exists():
            num_bytes = path.stat().st_size
            digest.update(f"{path.name} {num_bytes} ".encode())
            with path.open("rb") as file:
                for sample in range(NUM_SAMPLES):
                    file.seek(max(0, num_bytes - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
