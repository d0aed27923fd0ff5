"""Traffic: drawn loads, the three forms of traces, and one line of error for everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrt.errors import UserError
from flowrt.planner.traffic import drawn_traffic, parse_traffic


def test_a_drawn_load_is_a_poisson_process_of_its_rate() -> None:
    traffic = parse_traffic("in=2048,out=256,rate=8")
    assert len(traffic.arrivals) == 1000
    assert traffic.tokens == (2048, 256)
    assert traffic.rate == pytest.approx(8, rel=0.1)
    gaps = [after.at_seconds - before.at_seconds for before, after in zip(traffic.arrivals, traffic.arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)  # as of an exponential distribution
    assert parse_traffic("in=2048,out=256,rate=8") == traffic
    assert parse_traffic("in=2048,out=256,rate=8,seed=1").arrivals != traffic.arrivals


def test_a_closed_loop_and_lengths_that_vary() -> None:
    traffic = parse_traffic("in=100, out=10, concurrency=4, requests=50, spread=0.5")
    assert (traffic.concurrency, len(traffic.arrivals)) == (4, 50)
    lengths = [each.num_input for each in traffic.arrivals]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 10


def test_scaled_traffic_comes_faster() -> None:
    traffic = drawn_traffic(10, 10, rate=4.0, num_requests=100)
    assert traffic.scaled(2).rate == pytest.approx(2 * traffic.rate)
    assert len(traffic.first(7).arrivals) == 7


TRACES = {
    "mooncake.jsonl": "\n".join(
        json.dumps({"timestamp": at, "input_length": 1000, "output_length": 20, "hash_ids": [1, at]}) for at in (3000, 0, 1000)
    ),
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,1000,20,1020,x\n"
    "6,GPT-4,1000,20,1020,x\n8,GPT-4,1000,20,1020,x",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,1000,20\n2023-11-16 18:17:04.9799600,1000,20\n"
    "2023-11-16 18:17:06.9799600,1000,20",
}


@pytest.mark.parametrize("name", TRACES)
def test_traces_begin_at_zero_in_order(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(TRACES[name], encoding="utf-8")
    traffic = parse_traffic(str(path))
    assert [each.at_seconds for each in traffic.arrivals] == pytest.approx([0, 1, 3])
    assert traffic.tokens == (1000, 20)
    assert parse_traffic(str(path), 2).arrivals == traffic.arrivals[:2]
    if name == "mooncake.jsonl":
        assert [each.blocks for each in traffic.arrivals] == [(1, 0), (1, 1000), (1, 3000)]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("in=10,out=10", "give in and out"),
        ("in=10,out=10,rate=1,concurrency=1", "give in and out"),
        ("in=10,out=10,rate=nan", "rate=nan is not a number"),
        ("in=10,out=10,rate=1,out=20", "out is given twice"),
        ("in=10,out=10,rate=-1", "rate=-1 is not a number"),
        ("in=0,out=10,rate=1", "in=0 is not a number"),
        ("in=10,out=10,rat=1", "did you mean 'rate'"),
        ("missing.jsonl", "does not exist"),
    ],
)
def test_wrong_loads_are_one_line(text: str, error: str) -> None:
    with pytest.raises(UserError, match=error) as raised:
        parse_traffic(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no request|neither JSON"),
        ("hello", "line 1 is neither JSON"),
        ('{"timestamp": 1}', ":1: is not an object with"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{broken', ":2: is not an object"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', ":1: timestamp is 'x'"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 1}', ":1: input tokens is -1"),
        ('{"timestamp": 0, "input_length": 1e300, "output_length": 1}', "are more than"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": "x"}', "hash_ids is not a list"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1", ":2: TIMESTAMP is 'yesterday'"),
        ("Timestamp,Request tokens,Response tokens\n1,,1", ":2: input tokens is ''"),
        ("Timestamp,Request tokens,Response tokens\n1", ":2: input tokens is None"),
    ],
)
def test_wrong_traces_name_the_line(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=error) as raised:
        parse_traffic(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mark", ["", "\ufeff", "\n\n"], ids=["plain", "with a mark", "behind empty lines"])
def test_titles_may_have_spaces_and_quotes(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f'{mark}Timestamp , "Request tokens", Response tokens\n1, 5, 6\n\n3,7,8\n', encoding="utf-8")
    found = parse_traffic(str(path)).arrivals
    assert [(each.at_seconds, each.num_input, each.num_output) for each in found] == [(0, 5, 6), (2, 7, 8)]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('Timestamp,Request tokens,Response tokens\n1,5,6\n2,"5,6\n' + "3,5,6\n" * 30_000, "closing quote"),
        ("Timestamp,Request tokens,Response tokens\n1," + "5" * 140_000 + ",6\n", ":2"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ' + "[" * 200_000 + "]" * 200_000 + "}", ":1"),
    ],
    ids=["a quote that is not closed", "a long field", "nested"],
)
def test_damaged_traces_are_one_line(text: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=where) as caught:
        parse_traffic(str(path))
    assert "\n" not in str(caught.value)
