"""Folders of graphs: one owner at a time, and what a dead one leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from flowrt.cli.serve import ServeSession
from flowrt.errors import NotRunningError, UserError
from flowrt.processes import leftover
from flowrt.serving.listener import open_tcp_listener, open_unix_listener
from flowrt.serving.run_folder import VARIABLE, Description, RunFolder, begin_stop, claim, find_graph, found_graphs, remove_dead
from flowrt.serving.socket_client import new_client


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    return tmp_path / "run"


def described(name: str, **changes: object) -> Description:
    plain = Description(name=name, pid=1, graph="/g.yaml", model="m", url="u", started=0.0, drain_seconds=1.0, max_requests=1)
    return msgspec.structs.replace(plain, **changes)


def claimed(**changes: object) -> RunFolder:
    folder = claim("a")
    folder.describe(described("a", **changes))
    return folder


def leave_dead(**changes: object) -> None:
    """A folder whose lock is let go, as the kernel does for a killed process."""
    os.close(claimed(**changes)._lock)


def test_folder_has_one_owner(directory: Path) -> None:
    folder = claimed(pid=123)
    assert directory.stat().st_mode & 0o777 == folder.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UserError, match=r"a is up already \(pid 123\); flowrt down a stops it"):
        claim("a")
    assert [each.is_alive for each in found_graphs()] == [True]
    folder.remove()
    assert found_graphs() == []
    claim("a").remove()


def test_process_that_leaves_a_graph_to_its_child_keeps_nothing_of_it() -> None:
    """Else a client of a dead child waits for ever, and the graph seems to live."""
    folder = claimed()
    listeners = [open_tcp_listener("127.0.0.1", 0), open_unix_listener(folder.socket)]
    session = cast(Any, ServeSession.__new__(ServeSession))
    session._serving, session.folder = SimpleNamespace(listener=listeners[0], admin=listeners[1]), folder
    session.leave()
    assert not find_graph("a").is_alive
    with socket.create_server(("127.0.0.1", int(listeners[0].url.rpartition(":")[2]))):
        pass
    assert folder.socket.exists(), "the child has it"
    folder.leave()


def test_what_a_dead_process_left_is_taken_over_or_removed() -> None:
    leave_dead(is_ready=True)
    (found,) = found_graphs()
    assert not found.is_alive
    with pytest.raises(NotRunningError, match="a is dead"):
        new_client(found)
    second = claim("a")
    assert find_graph("a").description is None, "what the dead one wrote is gone"
    assert not remove_dead(found), "a living process has it"
    os.close(second._lock)
    assert remove_dead(found)
    assert found_graphs() == []


def test_socket_of_a_dead_graph_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for is_stale in (False, True):
        leave_dead(options={"uds": str(path)})
        with socket.socket(socket.AF_UNIX) as of_another:
            if not is_stale:
                of_another.bind(str(path))
                of_another.listen()
            remove_dead(find_graph("a"))
            assert path.exists() is not is_stale


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
@pytest.mark.parametrize("end", [lambda: claim("a").remove(), lambda: remove_dead(find_graph("a"))], ids=["up", "down"])
@pytest.mark.parametrize("run_id", ["a-run", "a-run.host.1"])
def test_process_of_a_dead_graph_ends_with_it(end: Callable[[], object], run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftover, "LEFT_SECONDS", 0.0)
    with subprocess.Popen(["sleep", "600"], env={**os.environ, leftover.MARKER: run_id}) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        leave_dead(run_id="a-run")
        end()
        assert stopped.wait() == -signal.SIGKILL


def test_resume_that_fails_leaves_what_it_found() -> None:
    claim("a", resumes=True).remove()
    assert found_graphs() == []
    leave_dead()
    claim("a", resumes=True).remove()
    assert find_graph("a").description == described("a")
    remove_dead(find_graph("a"))


def test_only_the_first_caller_stops_a_graph() -> None:
    folder = claim("a")
    found = find_graph("a")
    assert [begin_stop(found), begin_stop(found)] == [True, False]
    folder.remove()
    assert not begin_stop(found)
    folder = claim("a")
    folder.mark_stopping()
    assert not begin_stop(find_graph("a")), "it has had a signal"
    folder.remove()


def test_name_may_be_left_out_for_the_only_graph() -> None:
    with pytest.raises(UserError, match="no graph is up"):
        find_graph(None)
    folders = [claim("a")]
    assert find_graph(None).name == "a"
    folders.append(claim("b"))
    with pytest.raises(UserError, match="several graphs are up: a, b; name one"):
        find_graph(None)
    with pytest.raises(UserError, match="there is no graph c; there is a, b"):
        find_graph("c")
    for folder in folders:
        folder.remove()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "x" * 33, "a b"])
def test_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a graph"):
        claim(name)


def test_folder_that_others_may_read_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    for call in (found_graphs, lambda: claim("a")):
        with pytest.raises(UserError, match="only this user may use"):
            call()


def test_link_in_place_of_the_folder_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="only this user may use"):
        claim("a")


def test_long_path_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / ("x" * 100)))
    with pytest.raises(UserError, match="too long for the path of a socket"):
        claim("a")


def test_new_log_keeps_the_one_before() -> None:
    folder = claim("a")
    log = folder.open_log()
    for text in (b"first\n", b"second\n", b"third\n"):
        os.write(log, text)
        if text != b"third\n":
            folder.begin_log(log)
    found = find_graph("a")
    assert (found.old_log.read_bytes(), found.log.read_bytes()) == (b"second\n", b"third\n")
    os.close(log)
    folder.remove()
