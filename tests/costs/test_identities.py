"""Identities of published numbers that the cost model must reproduce (I1 to I10), and the exchange's rules."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flowrt.bench.published.identities import DEEPEP
from flowrt.costs.devices import read_device
from flowrt.costs.equations import (
    best_pipelines,
    collective_rows,
    exchanged_volumes,
    expert_use,
    fleet_nodes,
    knee_rows,
    m2n_bytes,
    pipeline_gain,
    replica_slots,
)
from flowrt.costs.exchange import (
    Routing,
    all_reduce_seconds,
    bulk_exchange_seconds,
    exchange_seconds,
    fabric_of,
    overlapped_seconds,
    reduce_scatter_seconds,
    row_bytes,
    spread,
    transfer_seconds,
)
from flowrt.costs.experts import chances_of_counts, heaviest_rows, power_law_chances, server_chances, touched, touched_experts
from flowrt.costs.links import PROFILES
from flowrt.costs.ping_pong import PingPong
from flowrt.graph.placement import balanced_placement


@pytest.mark.parametrize("endpoints", DEEPEP)
def test_i1_published_bandwidth_is_payload_over_latency(endpoints: int) -> None:
    dispatch_us, dispatch_rate, combine_us, combine_rate = DEEPEP[endpoints]
    pairs = 128 * 8
    assert pairs * row_bytes(7168, "fp8") / (dispatch_us * 1e-6) == pytest.approx(dispatch_rate * 1e9, rel=0.021)
    assert pairs * row_bytes(7168, "bfloat16") / (combine_us * 1e-6) == pytest.approx(combine_rate * 1e9, rel=0.021)


def test_i2_batch_over_time_per_token_is_throughput() -> None:
    assert pytest.approx(1943, rel=0.003) == 96 / 49.4e-3


def test_i3_i4_steps_of_xdeepserve_add_up() -> None:
    colocated = (93 + 2) / 1.9
    assert colocated == pytest.approx(50.0)
    assert 2 * 60 / (colocated / 1e3) == pytest.approx(2400)
    assert 288 * 60 / (colocated / 1e3) == pytest.approx(345.6e3)
    split = 0.7 * 2 * 61 + 2 + 5 + 0.17 + 0.12 + 0.19
    assert split == pytest.approx(92.9, abs=0.05)
    assert split / 1.9 == pytest.approx(48.9, abs=0.05)


def test_i5_fleet_is_tokens_over_rate() -> None:
    assert fleet_nodes(86400 * 50e3, 25e3) + fleet_nodes(86400 * 10e3, 20e3) == 2.5


def test_i6_megascale_payload_knee_and_use() -> None:
    assert m2n_bytes(128, 2, 8, 6144, 2) == 196_608
    assert knee_rows(312e12, 2e12) == 156
    assert expert_use(156, 2, 8, knee_rows(312e12, 2e12)) == 0.25


def test_i7_ping_pong_fills_with_three_where_the_exchange_is_short() -> None:
    for exchange in np.linspace(0.01, 0.99, 25):
        times = PingPong(1.0, 0.9, float(exchange))
        assert times.fills_pipeline(3) == (exchange <= 0.5)
        assert times.smallest_micro_batches() == math.ceil(2 * (1 + exchange) - 1e-9)
        layers, count = 40, times.smallest_micro_batches()
        assert times.total_seconds(count, layers) == pytest.approx(1.9 + 2 * exchange + count * layers - 1)


def test_i8_touched_experts_pipelines_and_volumes() -> None:
    assert touched_experts(160, 6, 1) == pytest.approx(6)
    assert touched_experts(160, 6, 100) == pytest.approx(160 * (1 - (1 - 6 / 160) ** 100))
    assert touched(power_law_chances(160, 6, 0.0), 100) == pytest.approx(touched_experts(160, 6, 100))
    assert touched_experts(8, 8, 3) == 8
    ideal = math.sqrt(1e-3 / 10e-6)
    gains = {count: pipeline_gain(1e-3, 2e-3, count, 10e-6) for count in range(1, 41)}
    assert max(gains, key=gains.__getitem__) == best_pipelines(1e-3, 2e-3, 10e-6, 40) == round(ideal)
    assert best_pipelines(1e-6, 1e-6, 10e-6, 40) == 1
    tensor, least, most = exchanged_volumes(1.0, 8, 8)
    assert (tensor, least, most) == (14.0, 1.75, 14.0)


def test_i9_gains_of_mixserve() -> None:
    pairs = {(100.61, 122.72): 22.0, (113.52, 150.08): 32.2, (362.78, 545.23): 50.3, (435.82, 625.45): 43.5}
    assert all(100 * (after / before - 1) == pytest.approx(gain, abs=0.05) for (before, after), gain in pairs.items())
    reduced, exchanged = collective_rows(rows=64, active=8, tensor_parallel=8, expert_parallel=4)
    assert (reduced, exchanged) == (112.0, 768.0)


def test_i10_replica_slots() -> None:
    assert (replica_slots(256, 32, 144), replica_slots(256, 32, 32), replica_slots(384, 96, 96)) == (2, 9, 5)
    with pytest.raises(ValueError, match="do not divide"):
        replica_slots(256, 32, 100)


@pytest.mark.parametrize(
    ("loads", "most", "balance"),
    [
        ((90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86), 156.0, 0.83),
        ((20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27), 179.5, 0.80),
    ],
)
def test_i10_placement_is_as_balanced_as_eplb(loads: tuple[float, ...], most: float, balance: float) -> None:
    placed = balanced_placement(loads, num_servers=8, num_slots=16, groups=4, nodes=2)
    replicas = [sum(expert in server for server in placed) for expert in range(12)]
    assert all(len(server) == 2 for server in placed)
    assert min(replicas) >= 1
    heaviest = max(sum(loads[expert] / replicas[expert] for expert in server) for server in placed)
    assert heaviest <= most
    assert sum(loads) / 8 / heaviest >= balance - 0.005
    nodes = [{expert // 3 for server in placed[node * 4 : node * 4 + 4] for expert in server} for node in range(2)]
    assert not nodes[0] & nodes[1]  # each group of experts is on one node


def test_balanced_placement_holds_no_expert_twice_on_a_server() -> None:
    loads = list(power_law_chances(256, 8, 0.9))
    placed = balanced_placement(loads, 288, 576)
    assert all(len(set(server)) == 2 for server in placed)
    means = server_chances(np.array(loads), placed)
    native = server_chances(np.array(loads), [(server % 256, (server + 1) % 256) for server in range(288)])
    assert means.sum() == pytest.approx(8)
    assert means.max() < 1.15 * means.mean() < native.max()
    with pytest.raises(ValueError, match="all must divide evenly"):
        balanced_placement(loads, 288, 500)


def test_loads_of_experts_and_servers() -> None:
    """At 0.9, 20 % of experts exceed the mean and the hottest has 30 times it (xDeepServe), and the top 20 % of 128 take 65 %."""
    chances = power_law_chances(256, 8, 0.9)
    assert chances.sum() == pytest.approx(8)
    assert chances.max() <= 1.0
    assert (chances > 8 / 256).mean() == pytest.approx(0.2, abs=0.03)
    assert chances[0] / chances.mean() == pytest.approx(30, rel=0.1)
    assert power_law_chances(128, 8, 0.9)[:26].sum() / 8 == pytest.approx(0.65, abs=0.02)
    assert chances_of_counts([5, 0, 0, 0], 2).tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    with pytest.raises(ValueError, match="finite"):
        chances_of_counts([math.nan, 1.0], 1)


def test_heaviest_of_equal_servers_exceeds_the_mean_by_chance_alone() -> None:
    drawn = np.random.default_rng(7).poisson(480, (400, 288)).max(axis=1).mean()
    assert heaviest_rows(np.full(288, 480.0)) == pytest.approx(drawn, rel=0.01)
    assert heaviest_rows(np.array([5.0])) == 5.0
    assert heaviest_rows(np.zeros(4)) == 0.0


def test_the_fixed_part_of_an_exchange_is_not_multiplied_by_skew() -> None:
    fabric = fabric_of(read_device("h800"))
    even, double = (exchange_seconds(fabric, 64, pairs, 7168, "bfloat16") for pairs in (512.0, 1024.0))
    assert double - even == pytest.approx(even - fabric.fixed_seconds("bfloat16"))
    loads = np.array([512.0, 1024.0])
    assert exchange_seconds(fabric, 64, loads, 7168, "bfloat16").tolist() == pytest.approx([even, double])


def test_two_ports_work_at_once_and_one_port_in_turn() -> None:
    h800, die = fabric_of(read_device("h800")), fabric_of(read_device("910c"))
    assert h800.port_seconds(1e6, 1e6) == max(h800.port_seconds(1e6, 0.0), h800.port_seconds(0.0, 1e6))
    assert die.shares_port
    assert die.port_seconds(1e6, 1e6) == pytest.approx(die.port_seconds(1e6, 0.0) + die.port_seconds(0.0, 1e6))
    assert spread(8, 8) == (7 / 8, 0)
    assert spread(32, 8) == (7 / 32, 24 / 32)


def test_targets_of_a_token() -> None:
    rng = np.random.default_rng(3)
    routing = Routing(256, 8, 8, 4)
    for targets in (4, 8, 32):
        found = []
        for _ in range(3000):
            groups = rng.choice(8, 4, replace=False)
            pool = (groups[:, None] * 32 + np.arange(32)).ravel()
            found.append(len(set(rng.choice(pool, 8, replace=False) // (256 // targets))))
        assert routing.targets(targets) == pytest.approx(np.mean(found), rel=0.02)
    assert Routing(256, 8).targets(1) == pytest.approx(1)


def test_prefill_sends_a_token_once_to_each_node_and_rank() -> None:
    fabric, routing = fabric_of(read_device("h800")), Routing(256, 8, 8, 4)
    seconds = bulk_exchange_seconds(fabric, 32, 4096.0, routing, 7168, "fp8")
    assert seconds < exchange_seconds(fabric, 32, 4096.0 * 8, 7168, "fp8")


def test_messages_have_an_inflection_and_collectives_split_their_volume() -> None:
    link = PROFILES["roce-400g"]
    inflection = link.message_seconds * link.bandwidth_bytes_per_second
    assert transfer_seconds(link, 1.0) == transfer_seconds(link, inflection)
    assert transfer_seconds(link, 2 * inflection) > transfer_seconds(link, inflection)
    assert all_reduce_seconds(link, 1.0, 1e9, 8) == pytest.approx(2 * 1e9 * 7 / 8 / 50e9, rel=0.01)
    assert reduce_scatter_seconds(link, 1.0, 1e9, 1) == 0


def test_computing_and_sending_share_cores() -> None:
    """Where both ask for more cores than there are, both are slower; with fewer for computing than it can use, it is."""
    crowded = overlapped_seconds(3.0, 2.0, 5, compute_share=1.0, send_share=0.12)
    fitting = overlapped_seconds(3.0, 2.0, 5, compute_share=0.88, send_share=0.12)
    assert fitting == pytest.approx(3.4)
    assert crowded == pytest.approx(0.4 + 3.0 * 1.12)
    assert overlapped_seconds(1.0, 2.0, 1) == pytest.approx(3.0)
    assert overlapped_seconds(3.0, 2.0, 5, compute_share=0.44, send_share=0.12, saturation=0.88) == pytest.approx(6.4)
