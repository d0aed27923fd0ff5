"""No decision depends on the wall clock, which may jump: intervals and deadlines are those of monotonic clocks."""

from __future__ import annotations

import ast
import time

import pytest
from repository.source_tree import sources

from flowrt.seams import Seams

FOR_PEOPLE = {
    "flowrt/seams.py": "the seam itself",
    "flowrt/cli/graphs.py": "the age of a graph in flowrt ps",
    "flowrt/cli/serve.py": "when a graph was started",
    "flowrt/serving/http_app.py": "`created` of responses",
    "flowrt/serving/chat_template.py": "the date in a prompt",
}


WALL_CLOCKS = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today")
ENDS = {name.rpartition(".")[2] for name in WALL_CLOCKS}


def test_the_wall_clock_is_read_for_people_only() -> None:
    """The bench may publish when it ran."""
    found = {
        source.path
        for source in sources()
        for node in source.nodes()
        if isinstance(node, ast.Attribute) and (node.attr == "wall_now" or (node.attr in ENDS and ast.unparse(node) in WALL_CLOCKS))
    }
    assert {path for path in found if not path.startswith("flowrt/bench/")} <= set(FOR_PEOPLE)


async def test_clocks_of_a_process_do_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seams = Seams()
    before = seams.clock.now(), seams.machine_now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert (seams.clock.now(), seams.machine_now()) >= before
    await seams.clock.sleep(0.0)
