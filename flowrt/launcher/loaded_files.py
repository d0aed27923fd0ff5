"""Remembers the files of the model that the first workers have loaded, and compares those of later ones. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from flowrt.graph.model import Graph


class LoadedFiles:
    """Fingerprints are those of flowrt/workers/model_files.py: a digest, "@" and a time. The times are compared on one host, the digests
    between hosts."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._fingerprints: dict[tuple[str, str], str] = {}  # by host and path
        self._digests: dict[str, str] = {}  # by name

    def difference(self, process: str, files: Mapping[str, str]) -> str | None:
        """Why the files that the process has loaded are not those of the run. None: they are, and count as loaded from now on."""
        host = self._graph.host_of(process)
        for path, fingerprint in files.items():
            if self._fingerprints.setdefault((host, path), fingerprint) != fingerprint:
                return f"{path} has changed since the run began; restore the file, or start the run again"
            name, digest = path.rpartition("/")[2], fingerprint.partition("@")[0]
            if self._digests.setdefault(name, digest) != digest:
                return f"{path} of {host} is not the {name} of the other hosts; copy the same model to each, or remove it on {host}"
        return None
