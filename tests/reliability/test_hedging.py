"""Hedging: which parts are late, which servers are avoided, and how many parts may be sent twice."""

import random
from itertools import pairwise

import pytest

from flowrt.reliability.hedging import FIRST_SECONDS, MAX_BUDGET, MIN_RESPONSES, MIN_SECONDS, PROBE, HedgingPolicy


def policy(*seconds: float, rows: int = 1, times: int = MIN_RESPONSES) -> HedgingPolicy:
    """One server per number, which takes so long."""
    policy = HedgingPolicy(range(len(seconds)))
    for _ in range(times):
        for server, each in enumerate(seconds):
            policy.record_response(server, rows, each)
    policy.update_slow()
    return policy


def test_before_something_is_known_only_what_takes_very_long_is_late():
    assert HedgingPolicy(range(2)).late_after(0, 1) == FIRST_SECONDS
    assert policy(0.01, 0.01, times=MIN_RESPONSES - 1).late_after(0, 1) == FIRST_SECONDS


def test_late_is_what_takes_much_longer_than_usual_or_than_another_would():
    usual = policy(0.010, 0.010)
    late = usual.late_after(0, 1)
    assert late is not None
    assert 0.010 < late <= 0.030
    assert policy(0.010, 0.200).late_after(1, 1) == pytest.approx(0.030)


def test_short_responses_are_not_late_at_once():
    assert policy(1e-4, 1e-4).late_after(0, 1) == MIN_SECONDS


def test_sizes_are_distinguished():
    both = policy(0.010, 0.010)
    assert both.late_after(0, 500) == FIRST_SECONDS
    for _ in range(MIN_RESPONSES):
        both.record_response(0, 500, 2.0)
    assert both.late_after(0, 500) > 1.9
    assert both.late_after(0, 1) < 0.1


def test_a_slow_server_is_avoided_and_taken_back():
    servers = policy(0.010, 0.010, 0.050)
    assert servers.slow == {2}
    seen = [servers.slow]
    for _ in range(40):
        servers.record_response(2, 1, 0.010)
        servers.update_slow()
        seen.append(servers.slow)
    assert sum(before != after for before, after in pairwise(seen)) == 1
    assert servers.slow == frozenset()


def test_equally_slow_or_short_responses_mark_no_server_slow():
    assert policy(0.5, 0.5, 0.5).slow == frozenset()
    assert policy(1e-5, 1e-5, 1e-3).slow == frozenset()


def test_new_incarnation_starts_as_not_slow():
    servers = policy(0.010, 0.050)
    assert servers.slow == {1}
    servers.forget(1)
    assert servers.slow == frozenset()
    assert servers.late_after(1, 1) == pytest.approx(0.030)


def test_at_most_one_part_in_ten_is_hedged():
    servers = policy(0.010, 0.010)
    for _ in range(int(MAX_BUDGET)):
        assert servers.has_budget
        servers.spend()
    assert not servers.has_budget
    for _ in range(1000):
        servers.record_response(0, 1, 0.010)
        if servers.has_budget:
            servers.spend()
    assert 99 <= servers.num_hedged - MAX_BUDGET <= 101


def test_one_tag_in_so_many_probes():
    servers = HedgingPolicy(range(2))
    assert sum(servers.probes() for _ in range(10 * PROBE)) == 10


@pytest.mark.parametrize("num_servers", [2, 3, 5])
def test_servers_that_are_slow_together_or_for_a_moment_are_not_avoided(num_servers: int):
    """Busy moments, in which all responses take long, and single responses that take much longer; estimates of rare sizes are old."""
    chance, servers = random.Random(num_servers), HedgingPolicy(range(num_servers))
    for tag in range(3000):
        busy = 20.0 if tag // 100 % 3 == 2 else 1.0
        for server in range(num_servers):
            alone = 50.0 if chance.random() < 0.02 else 1.0
            seconds = 0.003 * busy * alone * chance.lognormvariate(0, 0.5)
            servers.record_response(server, chance.choice((3, 9, 9, 9, 20)), seconds)
        servers.update_slow()
        assert servers.slow == frozenset(), tag


def test_server_that_gets_its_rows_last_is_not_avoided():
    """Three servers that share one core: each begins when the one before has ended."""
    assert policy(0.010, 0.020, 0.030, times=1000).slow == frozenset()


def test_one_server_at_least_is_in_use_and_of_several_slow_ones_the_slowest_is_avoided():
    assert policy(0.010, 0.050, 0.100, times=100).slow <= {2}
    assert policy(0.010, 0.011, 0.012, 0.100, 0.200, times=100).slow == {3, 4}


def test_server_that_becomes_slow_is_avoided_after_a_few_responses_and_taken_back_after_a_few_probes():
    servers = policy(0.010, 0.010, 0.010, times=200)
    num_slow = 0
    while not servers.slow:
        num_slow += 1
        for server, seconds in enumerate((0.010, 0.010, 0.100)):
            servers.record_response(server, 1, seconds)
        servers.update_slow()
    assert servers.slow == {2}
    assert num_slow <= 16
    num_probes = 0
    while servers.slow:
        num_probes += 1
        for _ in range(PROBE):
            servers.record_response(0, 1, 0.010)
            servers.record_response(1, 1, 0.010)
        servers.record_response(2, 1, 0.010)
        servers.update_slow()
    assert num_probes <= 8
