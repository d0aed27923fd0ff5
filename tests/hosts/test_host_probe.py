"""`flowrt doctor --hosts`: what each host has, and the way from each to each other one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrt.bench.measure.host_probe import HostFacts, HostReport, PeerMeasured
from flowrt.cli.doctor import collect_hosts, host_checks
from flowrt.errors import UserError
from flowrt.transports.registry import unavailable_reason

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"


def facts(version: str, address: str) -> HostFacts:
    return HostFacts(version, "3.11.9", "Linux 6.8 x86_64", {"ucx": "needs the package ucxx"}, {"zmq": address})


needs_ucx = pytest.mark.skipif(unavailable_reason("ucx") is not None, reason=str(unavailable_reason("ucx")))


@pytest.mark.parametrize("schemes", [("zmq",), pytest.param(("ucx", "zmq"), marks=needs_ucx)], ids=["encrypted", "trusted"])
async def test_all_ways_between_hosts_are_measured(schemes: tuple[str, ...], tmp_path: Path) -> None:
    hosts = {"engine": "local", "count": 3, "ports": "23000-23299", "trusted": ["127.0.0.0/8"] if "ucx" in schemes else []}
    document = {"flowrt": 1, "model": {"path": str(QUICKSTART.parent / "tiny-moe")}, "deploy": {"attention": {"groups": 3}}, "hosts": hosts}
    (graph := tmp_path / "hosts.yaml").write_text(json.dumps(document))
    checks = {check.name: check for check in await collect_hosts(str(graph))}
    names = [f"host.{number}" for number in range(3)]
    ways = [f"{source} to {target}, {each}" for source in names for target in names if source != target for each in schemes]
    assert list(checks) == [*names, *ways]
    assert all(check.ok for check in checks.values())
    assert all(f"{each}://127.0.0.2:23" in checks["host.1"].text for each in schemes)
    assert checks["host.2 to host.0, zmq"].text.endswith("/s")


def test_a_way_that_is_closed_names_both_ends_and_the_ports() -> None:
    here, there = "zmq://10.0.0.1:7000?curve", "zmq://10.0.0.2:7001?curve"
    measured = PeerMeasured(error="no answer within 10 s"), PeerMeasured(2.5e-4, 3e9)
    ways = dict(zip([("host.0", "host.1", "zmq"), ("host.1", "host.0", "zmq")], measured, strict=True))
    checks = host_checks(HostReport({"host.0": facts("1.0", here), "host.1": facts("1.1", there)}, ways))
    assert [check.ok for check in checks] == [True, False, False, True]
    assert checks[0].text == f"flowrt 1.0, Python 3.11.9, Linux 6.8 x86_64, listens at {here}; not ucx: needs the package ucxx"
    assert checks[1].remedy == "install the same packages as on the first host"
    assert checks[2].text == f"cannot connect from {here} to {there}: no answer within 10 s"
    assert checks[2].remedy == "let TCP connections between these two pass (docs/hosts.md)"
    assert checks[3].text == "250 us one way, 2.8 GiB/s"


async def test_a_graph_of_one_host_is_refused() -> None:
    with pytest.raises(UserError, match=r"the graph has one host; write hosts: into it"):
        await collect_hosts(str(QUICKSTART))
