"""A host without the model's files gets a copy of them for the run; whatever else arrives is refused with one line."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from end_to_end.test_expert_failover import tokens_of
from hosts.mounts import can_mount, hide
from left_processes import left_processes
from served_models import Served

import flowrt
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.hosts import model_copy
from flowrt.hosts.messages import FileChunk, FileEnd, HostMessage, ModelFile, ModelOffer, as_message
from flowrt.hosts.model_copy import CHUNK_BYTES, PREFIX, ModelFolder, has_model, receive_model, remove_left, send_model
from flowrt.launcher.run_state import LoadedFiles
from flowrt.launcher.run_table import RunTable
from flowrt.processes.leftover import marked_processes
from flowrt.seams import ThreadCompute
from flowrt.system.process_backend import CONTROL_LIMITS
from flowrt.transports.contract import Identity
from flowrt.transports.stream import StreamChannel
from flowrt.workers.model_files import fingerprints


def write_model(folder: Path) -> dict[str, bytes]:
    """Files of a model: an empty one, one that fills its last chunk, and one that does not travel."""
    contents = {"config.json": b"{}", "a.safetensors": os.urandom(2 * CHUNK_BYTES), "b.safetensors": b"", "c.safetensors": os.urandom(1001)}
    folder.mkdir()
    for name, data in {**contents, "notes.txt": b"x"}.items():
        (folder / name).write_bytes(data)
    return contents


async def receive(messages: Sequence[HostMessage] | Path, target: Path) -> int:
    """Receive a model that is sent, or these messages. Returns the number of parts."""
    here, there = [
        await StreamChannel.from_socket(each, CONTROL_LIMITS, Identity(name))
        for name, each in zip(("there", "here"), socket.socketpair(), strict=True)
    ]
    computes, num_parts = (ThreadCompute(), ThreadCompute()), 0

    def count() -> None:
        nonlocal num_parts
        num_parts += 1

    async def send() -> None:
        async with here:
            if isinstance(messages, Path):
                await send_model(messages, here, computes[0], count)
            else:
                for each in messages:
                    await here.send(as_message(each))

    sending = asyncio.ensure_future(send())
    try:
        async with there:
            await receive_model(there, computes[1], target)
    finally:
        await asyncio.gather(sending, return_exceptions=True)
        for compute in computes:
            await compute.aclose()
    return num_parts


async def test_the_files_arrive_whole(tmp_path: Path) -> None:
    contents, target = write_model(tmp_path / "model"), tmp_path / "copy"
    target.mkdir()
    assert await receive(tmp_path / "model", target) == 1 + 2 + 1
    assert {path.name: path.read_bytes() for path in target.iterdir()} == contents


CONFIG = ModelFile("config.json", 2)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([ModelOffer((CONFIG,)), FileChunk(b"{}"), FileEnd(bytes(64))], "config.json has another digest than announced"),
        ([ModelOffer((CONFIG,)), FileChunk(b"{ }")], "config.json has another size than announced"),
        ([ModelOffer((CONFIG,)), FileChunk(b"")], "config.json has another size than announced"),
        ([ModelOffer((CONFIG,)), FileChunk(b"{}")], "the model did not arrive whole"),
        ([ModelOffer((CONFIG, CONFIG))], "its list of files is not valid"),
        ([ModelOffer((ModelFile("../config.json", 2),))], "its list of files is not valid"),
        ([ModelOffer((ModelFile(".", 2),))], "its list of files is not valid"),
        ([ModelOffer((ModelFile("config.json", -1),))], "Expected `int` >= 0"),
        ([ModelOffer((ModelFile("config.json", 1 << 60),))], "GiB; copy the model to the same path on this host, or set TMPDIR there"),
        ([FileEnd(bytes(64))], "FileEnd came in place of ModelOffer"),
        ([], "the model did not arrive whole"),
    ],
)
async def test_what_is_not_the_model_is_one_error(messages: list[HostMessage], error: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        await receive(messages, tmp_path)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_a_file_that_another_host_could_not_name_is_one_error(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model" / "model (1).safetensors").write_bytes(b"x")
    (tmp_path / "copy").mkdir()
    here, there = socket.socketpair()
    compute = ThreadCompute()
    async with await StreamChannel.from_socket(here, CONTROL_LIMITS, Identity("there")) as channel:
        with pytest.raises(UserError, match=r"model \(1\)\.safetensors cannot be copied to another host: .* rename the file"):
            await send_model(tmp_path / "model", channel, compute, lambda: None)
    await compute.aclose()
    there.close()


async def test_a_disk_that_becomes_full_within_the_last_part_is_noticed(tmp_path: Path) -> None:
    """The system writes what fits, and reports no error."""
    write_model(tmp_path / "model")
    (tmp_path / "copy").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * CHUNK_BYTES - 100, limits[1]))
    try:
        with pytest.raises(UserError, match=r"the model cannot be written to .* \(File too large\)"):
            await receive(tmp_path / "model", tmp_path / "copy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_folders_of_killed_host_servers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left := tmp_path / f"{PREFIX}left").mkdir()
    (left / "a.safetensors").write_bytes(b"x")
    first = ModelFolder()
    remove_left()
    assert list(tmp_path.iterdir()) == [first.path]
    second = ModelFolder()
    remove_left()
    assert {first.path, second.path} == set(tmp_path.iterdir())
    second.remove()
    assert list(tmp_path.iterdir()) == [first.path]
    first.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_other_users_leave_in_the_folder_above_is_neither_followed_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"x")
    os.mkfifo(tmp_path / "tmp" / f"{PREFIX}pipe")
    (tmp_path / "tmp" / f"{PREFIX}link").symlink_to(tmp_path / "precious")
    above = os.open(tmp_path / "tmp", os.O_RDONLY)
    fcntl.flock(above, fcntl.LOCK_EX)
    remove_left()
    ModelFolder().remove()
    os.close(above)
    assert (tmp_path / "precious" / "file").exists()


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"^no folder for the model can be made: .*none.*; copy the model to the same path on this host"):
        ModelFolder()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(model_copy, "_lock", lambda folder: None)
    with pytest.raises(UserError, match="has no file locks"):
        ModelFolder()
    assert list(tmp_path.iterdir()) == []


def test_hosts_may_have_written_their_files_at_other_times(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    graph = Graph({}, {}, process_hosts={name: name for name in ("host.1", "host.2")})
    loaded, files = LoadedFiles(RunTable(graph, lambda: "1")), fingerprints(tmp_path / "model")
    assert loaded.difference("here", files) is None
    os.utime(tmp_path / "model" / "c.safetensors", (1, 1))
    assert loaded.difference("host.1", fingerprints(tmp_path / "model")) is None
    changed = str(tmp_path / "model" / "c.safetensors")
    assert str(loaded.difference("here", fingerprints(tmp_path / "model"))).startswith(f"{changed} has changed since the run began")
    (tmp_path / "model" / "c.safetensors").write_bytes(b"other")
    assert str(loaded.difference("host.2", fingerprints(tmp_path / "model"))).startswith(f"{changed} of host.2 is not the c.safetensors of")


def write(served: Served, folder: Path) -> Path:
    deploy = {"attention": {"groups": 2}, "experts": {"servers": 2, "replicas": 2}}
    return served.write(folder, deploy, numerics="strict", hosts={"engine": "local", "count": 2})


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
async def test_a_host_without_the_model_serves_the_same_tokens(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(served.directory, monkeypatch)
    async with flowrt.open(write(served, tmp_path)) as running:
        assert len(folders := list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))) == 1
        assert {path.name for path in folders[0].iterdir()} >= {"config.json", "model.safetensors"}
        pids = [marked.pid for marked in marked_processes() if marked.run_id.startswith(running.launcher.run_id)]
        assert await tokens_of(running, served.prompts[:4], lambda count: None) == served.expected[:4]
    assert not left_processes(pids)
    assert not folders[0].exists()


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
async def test_a_host_without_room_for_the_model_is_one_error(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (room := tmp_path / "room").mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setattr(tempfile, "tempdir", None)
    hide(served.directory, monkeypatch, also=room)
    with pytest.raises(
        UserError, match=r"^host\.1: the model needs .* GiB, and .* has .* GiB; copy the model to the same path on this host"
    ):
        async with flowrt.open(write(served, tmp_path)):
            pass


def test_a_model_that_this_user_may_not_reach_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    assert not has_model("/models/a")
