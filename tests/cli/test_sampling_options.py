"""Advanced sampling options: which ones reach the requests, and which appear in the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import flowrt_here

from flowrt.actors.outputs import ChoiceEvent, EndEvent, Logprobs, TokenEvent
from flowrt.cli.prompts import PromptRequest, checked_options
from flowrt.cli.record import Figures, Record
from flowrt.errors import UserError
from flowrt.sampling_params import SamplingParams


def test_choices_and_logprobs_are_in_the_record(graph_file: Path, tmp_path: Path) -> None:
    path, lines = tmp_path / "record.json", tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one", "n": 3, "temperature": 1.0, "seed": 4}\n{"prompt": "two", "ignore_eos": true}\n')
    words = ("--prompts", lines, "--max-tokens", "6", "--min-tokens", "6", "--logprobs", "2", "--repetition-penalty", "1.3", "--json", path)
    done = flowrt_here("run", graph_file, *words)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    drawn, greedy = record["requests"]
    assert len({tuple(choice["token_ids"]) for choice in drawn["choices"]}) == 3
    assert drawn["token_ids"] == drawn["choices"][0]["token_ids"]
    assert [choice["finish_reason"] for choice in drawn["choices"]] == ["length"] * 3
    assert "choices" not in greedy
    for each in (*drawn["choices"], greedy):
        assert len(each["token_ids"]) == len(each["logprobs"]) == len(each["top_logprobs"]) == 6
        assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in each["top_logprobs"])
    assert record["summary"]["num_tokens"] == 24


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("n", 0, "--n is 0, it must be a whole number from 1 to 128"),
        ("logprobs", 21, "--logprobs is 21, it must be a whole number from 0 to 20"),
        ("min_tokens", -1, r"--min-tokens is -1, it must be a whole number from 0 to 2\*\*63 - 1"),
        ("presence_penalty", 3.0, "--presence-penalty is 3.0, it must be a number from -2 to 2; 0 is off"),
        ("frequency_penalty", float("nan"), "--frequency-penalty is nan, it must be a number from -2 to 2"),
        ("repetition_penalty", 0.0, r"--repetition-penalty is 0.0, it must be a number from 1e-09 to 1e\+09; 1 is off"),
        ("repetition_penalty", 1e-320, r"--repetition-penalty is 1e-320, it must be a number from 1e-09 to 1e\+09; 1 is off"),
        ("temperature", 1e308, r"--temperature is 1e\+308, it must be a number from 0 to 1e\+09; 0 is greedy"),
        ("max_tokens", 10**22, r"--max-tokens is 1\d+, it must be a whole number from 1 to 2\*\*63 - 1"),
    ],
)
def test_impossible_values_are_refused(name: str, value: float, text: str) -> None:
    with pytest.raises(UserError, match=text):
        checked_options({name: value})


def test_a_record_keeps_choices_apart() -> None:
    record = Record(0, PromptRequest("x", SamplingParams(n=2)), submitted_seconds=0.0)
    record.add(TokenEvent(0, 0, (7,), "a"), 1.0)
    record.add(TokenEvent(0, 0, (8,), "b", 1, (Logprobs(-0.5, ((8, -0.5),)),)), 2.0)
    record.add(ChoiceEvent(0, 1, "stop", "c"), 3.0)
    assert (record.text, record.token_ids, record.is_ended) == ("a", [7], False)
    record.add(ChoiceEvent(0, 0, "length"), 4.0)
    record.add(EndEvent(0, "length"), 4.0)
    assert record.as_json()["choices"] == [
        {"token_ids": [7], "text": "a", "finish_reason": "length"},
        {"token_ids": [8], "text": "bc", "finish_reason": "stop", "logprobs": [-0.5], "top_logprobs": [((8, -0.5),)]},
    ]
    assert Figures.of([record]).num_tokens == 2
    assert record.ttft_seconds == 1.0
