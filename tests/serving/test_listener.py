"""The socket that front ends share: who may reach it, and the errors of addresses that cannot be bound."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import ssl
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest
from ipv6 import has_ipv6_loopback
from serving.served_app import Connection, ServedApp, served_app
from serving.test_http_api import until

from flowrt.errors import UserError
from flowrt.serving.listener import open_tcp_listener, open_unix_listener


@pytest.mark.parametrize(("host", "is_public"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_only_loopback_addresses_are_not_public(host: str, is_public: bool) -> None:
    with closing(open_tcp_listener(host, 0)) as listener:
        assert listener.is_public == is_public
        assert bool(listener.hosts) != is_public


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this system has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_address_with_and_without_brackets(host: str) -> None:
    with closing(open_tcp_listener(host, 0)) as listener:
        assert listener.url == f"http://[::1]:{listener.socket.getsockname()[1]}"
        assert "[::1]" in listener.hosts


@pytest.mark.parametrize(("origin", "number"), [("--uds", errno.ENOSPC), ("FLOWRT_RUNTIME_DIR", errno.EROFS)])
def test_a_file_system_that_takes_no_socket_is_named(origin: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bind(_: socket.socket, address: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", bind)
    text = {errno.ENOSPC: "no space is left for the socket", errno.EROFS: "read-only file system"}[number]
    with pytest.raises(UserError, match=text) as caught:
        open_unix_listener(tmp_path / "socket", origin)
    assert origin in str(caught.value)


@pytest.mark.parametrize("host", ["256.1.1.1", "1.2.3.4", "a\x00b", "a" * 300])
def test_address_of_no_interface_is_one_line(host: str) -> None:
    with pytest.raises(UserError) as caught:
        open_tcp_listener(host, 0)
    assert "\n" not in str(caught.value)


def test_unix_socket_is_for_its_user_only_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    first = open_unix_listener(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="address already in use; give another path"):
        open_unix_listener(path)
    first.socket.close()  # as of a process that was killed
    second = open_unix_listener(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    second.close()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(UserError, match="address already in use"):
        open_unix_listener(path)
    assert path.read_text() == "a file"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """The files of a certificate for localhost and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, *name, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


async def call(served: ServedApp, certificate: str) -> None:
    context = ssl.create_default_context(cafile=certificate)
    host, port = served.listener.socket.getsockname()
    connection = Connection(*await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost"))
    connection.send("GET", "/version")
    assert (await connection.response()).json() == {"version": "1.2.3"}
    await connection.close()


async def test_https_is_served_with_a_certificate(certificate: tuple[str, str]) -> None:
    async with served_app(certificate=certificate[0], private_key=certificate[1]) as served:
        await call(served, certificate[0])
        plain = await served.connect()
        plain.send("GET", "/version")
        with suppress(ConnectionError):
            await plain.reader.read()  # its end: an alert, or a reset
        await plain.close()
        await call(served, certificate[0])


async def test_a_connection_without_its_handshake_gives_way_to_a_new_one(certificate: tuple[str, str]) -> None:
    async with served_app(certificate=certificate[0], private_key=certificate[1], connections=2) as served:
        silent = [await served.connect() for _ in range(5)]
        assert [await each.reader.read() for each in silent[:3]] == [b""] * 3
        assert served.server.num_connections == 2
        await call(served, certificate[0])
        assert await silent[3].reader.read() == b""
        assert served.server.num_connections <= 2
        for each in silent:
            await each.close()


async def test_a_connection_without_room_gets_its_response_behind_the_handshake(certificate: tuple[str, str]) -> None:
    async with served_app(certificate=certificate[0], private_key=certificate[1], connections=1) as served:
        context = ssl.create_default_context(cafile=certificate[0])
        host, port = served.listener.socket.getsockname()
        first = Connection(*await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost"))
        first.send("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        request = await served.submitted.get()
        second = Connection(*await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost"))
        second.send("GET", "/version")
        assert (await second.response()).error[:2] == (503, "service_unavailable")
        served.finish(request)
        assert (await first.response()).status == 200
        for connection in (first, second):
            await connection.close()


async def test_handshakes_in_progress_end_with_the_server(certificate: tuple[str, str]) -> None:
    async with served_app(certificate=certificate[0], private_key=certificate[1]) as served:
        silent = await served.connect()
        await until(lambda: served.server.num_connections == 1)
    assert await silent.reader.read() == b""
    assert served.server.num_connections == 0
    await silent.close()
