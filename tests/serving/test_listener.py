"""The socket that front ends share: who may reach it, and the errors of addresses that cannot be bound."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from serving.served_app import Connection, served_app

from flowrt.errors import UserError
from flowrt.serving.listener import open_tcp_listener, open_unix_listener


@pytest.mark.parametrize(("host", "is_public"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_only_loopback_addresses_are_not_public(host: str, is_public: bool) -> None:
    listener = open_tcp_listener(host, 0)
    try:
        assert listener.is_public == is_public
        assert bool(listener.hosts) != is_public
    finally:
        listener.close()


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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_https_is_served_with_a_certificate(tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make, *name, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    async with served_app(certificate=certificate, private_key=key) as served:
        host, port = served.listener.socket.getsockname()
        context = ssl.create_default_context(cafile=certificate)
        connection = Connection(*await asyncio.open_connection(host, port, ssl=context, server_hostname="localhost"))
        connection.send("GET", "/version")
        assert (await connection.response()).json() == {"version": "1.2.3"}
        await connection.close()
