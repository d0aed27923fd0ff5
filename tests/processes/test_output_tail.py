"""The output of OS processes, as far as they have written it."""

from __future__ import annotations

import subprocess

from flowrt.processes.output_tail import OUTPUT_TAIL_LINES, OutputTail


async def test_a_process_that_never_stops_writing_holds_nothing_up() -> None:
    lines: list[str] = []
    tail = OutputTail("a", lambda name, line: lines.append(line))
    writer = subprocess.Popen(["yes", "much"], stdout=tail.write_end)
    try:
        tail.given_away()
        while not lines:
            assert set(tail.last[:OUTPUT_TAIL_LINES]) <= {"much"}
        tail.close()
    finally:
        writer.kill()
        writer.wait()
    assert lines[0] == "much"
