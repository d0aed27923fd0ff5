"""MixServe's grammar: texts of the paper are read, written back and enumerated; others give one line that says what to write."""

from __future__ import annotations

import pytest

from flowrt.costs.models import read_model_card
from flowrt.errors import UserError
from flowrt.planner.strategies import Strategy, parse_strategy, strategies

PUBLISHED = {  # MixServe, table II and section III-B
    "TP=8 [PP=4]": Strategy(8, 1, 8, 1, 4),
    "TP=8 + DP=4, EP=32": Strategy(8, 4, 1, 32),
    "TP=4 + DP=8, EP=32": Strategy(4, 8, 1, 32),
    "TP=8 + DP=4, TP=8 + EP=4": Strategy(8, 4, 8, 4),
    "TP=4 + DP=8, TP=8 + EP=4": Strategy(4, 8, 8, 4),
}


@pytest.mark.parametrize("text", PUBLISHED)
def test_a_published_strategy_is_read_and_written_back(text: str) -> None:
    strategy = parse_strategy(text)
    assert strategy == PUBLISHED[text]
    assert str(strategy) == text
    assert strategy.num_devices == 32


def test_every_published_strategy_is_among_the_enumerated() -> None:
    model = read_model_card("deepseek-r1")
    assert set(PUBLISHED.values()) <= set(strategies(model, 32, 8))


@pytest.mark.parametrize("num_devices", [1, 2, 8, 24, 40, 288])
def test_each_enumerated_strategy_uses_all_devices_and_is_read_back(num_devices: int) -> None:
    found = list(strategies(read_model_card("deepseek-r1"), num_devices, 8))
    assert found
    assert len(set(found)) == len(found)
    for strategy in found:
        assert strategy.num_devices == num_devices == strategy.expert_tp * strategy.expert * strategy.pipeline
        assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a block"),
        ("TP=0", "is not a block"),
        ("EP=8, EP=8", "is not a block of TP and DP"),
        ("TP=2 + DP=4", "the block of the experts is missing"),
        ("TP=2, EP=4", "attention takes 2 devices, experts take 4"),
        ("TP=2, EP=2, EP=2", "has 3 blocks"),
        ("TP=2 + DP=2 + DP=2, EP=8", "is not a block"),
        ("TP=2 [PP=0]", "is not a block"),
        ("TP=99999999999", "is not a block"),
    ],
)
def test_another_text_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_strategy(text)
    assert "\n" not in str(caught.value)
