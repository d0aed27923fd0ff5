"""Runs a command on the first of several hosts that are network namespaces of this machine, each with its own Ray node.

    python tests/hosts/network.py --hosts 2 pytest tests/hosts/ray_hosts.py

The namespaces are joined by virtual links and a bridge; the command may cut links (`cut`, `cut_between`) and end hosts (`end_host`,
`start_host`). Without the right to make namespaces, or without Ray, this prints why and does nothing. Everything that it makes is removed
at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PREFIX, PORT, START_SECONDS = "frt", 6379, 90
FOLDER = "FLOWRT_TEST_FOLDER"  # of the logs of the nodes, for the command
IS_IPV6 = os.environ.get("FLOWRT_TEST_FAMILY") == "6"  # the hosts have no other addresses
WHOLE = 128 if IS_IPV6 else 32  # bits of an address


def address(host: int) -> str:
    return f"fd77::{host + 1}" if IS_IPV6 else f"10.77.0.{host + 1}"


def head() -> str:
    """The address of the Ray cluster."""
    return f"[{address(0)}]:{PORT}" if IS_IPV6 else f"{address(0)}:{PORT}"


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def missing() -> str | None:
    """Why no hosts can be made here."""
    if find_spec("ray") is None:
        return "Ray is not installed; install it with: pip install ray"
    if shutil.which("ip") is None:
        return "the command ip is not installed (iproute2)"
    try:
        ip("netns", "add", f"{PREFIX}-probe")
        ip("netns", "del", f"{PREFIX}-probe")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[None]:
    """Namespaces frt-0, frt-1 .. with the addresses 10.77.0.1, 10.77.0.2 .. or fd77::1, fd77::2 .., joined by a bridge in frt-hub."""
    names = [f"{PREFIX}-hub", *(f"{PREFIX}-{host}" for host in range(num_hosts))]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        hub = names[0]
        ip("-n", hub, "link", "add", "hub", "type", "bridge")
        ip("-n", hub, "link", "set", "hub", "up")
        for host, name in enumerate(names[1:]):
            ip("-n", hub, "link", "add", f"to-{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "set", f"to-{host}", "master", "hub", "up")
            ip("-n", name, "address", "add", f"{address(host)}/{WHOLE - 8}", "dev", "eth0", *(["nodad"] if IS_IPV6 else []))
            ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def host_of(pid: int) -> int:
    """The host on which a process runs: Ray decides which one is host.1 of a run."""
    return int(ip("netns", "identify", str(pid)).strip().rpartition("-")[2])


@contextlib.contextmanager
def cut(host: int, one_way: bool = False) -> Iterator[None]:
    """No packet reaches or leaves the host meanwhile; `one_way`: those to the first host do not leave it."""
    link = ("-n", f"{PREFIX}-hub", "link", "set", f"to-{host}")
    route = ("-n", f"{PREFIX}-{host}", "route")
    ip(*route, "add", "blackhole", f"{address(0)}/{WHOLE}") if one_way else ip(*link, "down")
    try:
        yield
    finally:
        ip(*route, "del", "blackhole", f"{address(0)}/{WHOLE}") if one_way else ip(*link, "up")


@contextlib.contextmanager
def cut_between(one: int, other: int) -> Iterator[None]:
    """No packet travels between these two hosts meanwhile; both reach all others."""
    routes = [("-n", f"{PREFIX}-{here}", "route", f"{address(there)}/{WHOLE}") for here, there in ((one, other), (other, one))]
    try:
        for *route, there in routes:
            ip(*route, "add", "blackhole", there)
        yield
    finally:
        for *route, there in routes:
            ip(*route, "del", "blackhole", there)


def start_host(host: int) -> subprocess.Popen[str]:
    """Start the Ray node of a host. The first one is the head, which has taken connections when this returns."""
    folder = os.environ[FOLDER]
    ray = shutil.which("ray", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "ray"
    where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if host == 0 else [f"--address={head()}"]
    options = [f"--node-ip-address={address(host)}", "--num-cpus=8", f"--object-store-memory={80 << 20}", "--block"]
    mount = f'mount -t tmpfs none {folder}/ray && exec "$@"'  # files of its own, as on another machine
    own_files = ["unshare", "--mount", "sh", "-c", mount, "sh"] if host else []
    command = ["ip", "netns", "exec", f"{PREFIX}-{host}", *own_files, ray, "start", *where, *options]
    variables = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with open(f"{folder}/node-{host}.log", "a") as log:
        node = subprocess.Popen(command, env=variables, stdout=log, stderr=log, text=True, start_new_session=True)
    if host == 0:
        probe = f"""
import socket, time
for _ in range({START_SECONDS * 10}):
    try:
        socket.create_connection(("{address(0)}", {PORT}), 1)
        break
    except OSError:
        time.sleep(0.1)
else:
    raise SystemExit("the Ray head does not start")
"""
        subprocess.run(["ip", "netns", "exec", f"{PREFIX}-0", sys.executable, "-c", probe], check=True)
    return node


def end_host(host: int) -> None:
    """Kill every process of a host, as a power cut does."""
    while pids := ip("netns", "pids", f"{PREFIX}-{host}").split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def main() -> int:
    """Set the hosts up, run the command in the first one, take the hosts down."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))  # so that the hosts are taken down
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="frt-") as folder, network(options.hosts):
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ |= {**token, "PYTHONPATH": path, "RAY_ADDRESS": head(), "RAY_TMPDIR": folder, FOLDER: folder}
        os.environ["FLOWRT_TEST_HOSTS"] = str(options.hosts)
        (Path(folder) / "ray").mkdir()
        nodes: list[subprocess.Popen[str]] = []
        try:
            nodes += map(start_host, range(options.hosts))
            return subprocess.run(["ip", "netns", "exec", f"{PREFIX}-0", *options.command], cwd=ROOT, check=False).returncode
        finally:
            for host in reversed(range(options.hosts)):
                end_host(host)
            for node in nodes:
                node.wait()


if __name__ == "__main__":
    sys.exit(main())
