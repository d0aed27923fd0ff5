"""When a router gives waiting requests up: after `lost_group_seconds` without a group, whatever has ended the last one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
from hypothesis import given

from flowrt.gateway.request_log import RequestLog
from flowrt.gateway.router import Router
from flowrt.gateway.routing import round_robin
from flowrt.graph.settings import GraphLimits

LOST_SECONDS = 2.0
GROUPS = ("a", "b", "c")
sets = st.sets(st.sampled_from(GROUPS), min_size=1)
steps = st.one_of(
    st.tuples(st.just("lose"), st.sampled_from(GROUPS), st.booleans()),
    st.tuples(st.just("give up"), st.sampled_from(GROUPS)),
    st.tuples(st.just("readmit"), st.sampled_from(GROUPS)),
    st.tuples(st.just("use"), sets, sets),
)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), steps), max_size=12))
def test_requests_wait_for_the_whole_time_in_which_no_group_is_left(drawn: list[tuple[float, tuple[Any, ...]]]) -> None:
    now, log = 0.0, cast("RequestLog", SimpleNamespace(waits_since=0.0, index=0))
    router = Router(GROUPS, lambda group: GraphLimits(), LOST_SECONDS, lambda: now, round_robin, "all")
    up, restarting, known = {*GROUPS}, set[str](), {*GROUPS}
    none_since: float | None = None
    for seconds, (kind, *arguments) in drawn:
        now += seconds
        if kind == "use":
            known, leaving = arguments
            router.use(sorted(known), cast("Any", SimpleNamespace(leaving=leaving, limits_of=lambda group: GraphLimits())))
            up, restarting = up & known, restarting & known
        elif (group := arguments[0]) not in known:
            continue
        elif kind == "lose":
            router.lose(group, "was killed", is_restarting=arguments[1])
            up.discard(group)
            restarting |= {group} if arguments[1] else set()
        elif kind == "give up":
            router.give_up(group)
            restarting.discard(group)
        elif group not in router._leaving:
            router.readmit(group)
            up.add(group)
            restarting.discard(group)
        none_since = None if up or restarting else now if none_since is None else none_since
        assert router.has_no_group == (none_since is not None)
        assert router.deadline([log]) == (None if none_since is None else none_since + LOST_SECONDS)
        assert router.expired([log]) == ([] if none_since is None or now - none_since < LOST_SECONDS else [log])
