"""What watching costs: two graphs that differ in nothing else are asked in turns, and bad input starts nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrt.bench.reliability import KEYS, Options, graphs_of, measure
from flowrt.bench.report import Figure
from flowrt.errors import UserError

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
SMALL = ("deploy.attention.groups=1", "deploy.experts.servers=2", "numerics=strict")


def test_the_two_graphs_differ_in_what_is_measured_alone() -> None:
    on, off = graphs_of(Options(graph=QUICKSTART, overrides=("reliability.hedge=false",)))
    assert [getattr(on.reliability, key) for key in KEYS] == [True, "fine", True]
    assert [getattr(off.reliability, key) for key in KEYS] == [False, "off", False]
    assert replace(off, reliability=on.reliability) == on


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(graph=QUICKSTART, num_pairs=0), "--pairs is 0"),
        (Options(graph=QUICKSTART, batch=0), "--batch is 0"),
        (Options(graph=QUICKSTART, new_tokens=1), "--new-tokens is 1"),
        (Options(graph=QUICKSTART, batch=200), "limits.max_num_seqs is 16, and a batch of 200 needs 100"),
        (
            Options(graph=QUICKSTART, overrides=("deploy.experts.servers=0", "deploy.experts.replicas=1")),
            "no process of it may die, so nothing is watched",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(options: Options, text: str) -> None:
    with pytest.raises(UserError, match=text):
        graphs_of(options)


async def test_both_are_asked_in_turns_and_answer_alike() -> None:
    options = Options(graph=QUICKSTART, overrides=SMALL, batch=2, prompt_tokens=4, new_tokens=48, num_pairs=2)
    said: list[str] = []
    figure, note = [each async for each in measure(options, graphs_of(options), said.append)]
    assert isinstance(figure, Figure)
    assert figure.ratio is not None
    assert figure.ratio.num_pairs == 2
    assert figure.verdict == "not resolved"  # two pairs bound nothing
    assert note == "tokens with and without: all 6 sequences equal"  # with those of the round that is not counted
    assert [line.partition(":")[0] for line in said] == ["two graphs load", "pair 1 of 2", "pair 2 of 2"]
