"""Large graphs and files that are not regular files: what `read_document` and `check` do in bounded time. No clock is read."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from flowrt.document import read_document
from flowrt.errors import GraphError
from flowrt.graph.checks import check
from flowrt.text_files import MAX_FILE_BYTES

V = TypeVar("V")


class _Counted(Mapping[str, V]):
    """A mapping that counts its iterations."""

    def __init__(self, values: Mapping[str, V]) -> None:
        self._values = values
        self.num_iterations = 0

    def __getitem__(self, key: str) -> V:
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        self.num_iterations += 1
        return iter(self._values)


def _chain(num_nodes: int) -> str:
    nodes = "".join(f"  n{i}: {{operator: 'ops:f', process: p{i % 4}}}\n" for i in range(num_nodes))
    edges = "".join(f"  n{i}.y -> n{i + 1}.x:\n" for i in range(num_nodes - 1))
    return f"flowrt: 1\nnodes:\n{nodes}edges:\n  input.x -> n0.x:\n{edges}  n{num_nodes - 1}.y -> output.y:\n"


def test_checks_iterate_over_all_edges_as_often_for_large_graphs_as_for_small_ones(load) -> None:
    iterations = []
    for num_nodes in (8, 80):
        graph = load(_chain(num_nodes))
        edges, nodes = _Counted(graph.edges), _Counted(graph.nodes)
        assert list(check(graph.replace(edges=edges, nodes=nodes))) == []
        iterations.append((edges.num_iterations, nodes.num_iterations))
    assert iterations[0] == iterations[1]


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder", "large"])
def test_what_is_not_a_small_regular_file_is_refused_without_reading_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 10 << 30)  # takes no space
    errors: list[GraphError] = []

    def read() -> None:
        with pytest.raises(GraphError) as caught:
            read_document(path)
        errors.append(caught.value)

    thread = threading.Thread(target=read, daemon=True)  # a read that hangs fails the test instead of the suite
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    text = {"folder": "is a folder", "large": f"is larger than {MAX_FILE_BYTES >> 20} MiB"}.get(kind, "is a pipe, socket or device")
    assert str(errors[0]).startswith(f"{path}: {text}")
    assert "; " in str(errors[0])
