"""Sampling defaults of a model folder: which keys of generation_config.json are read, and which calls get them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import flowrt
from flowrt.api.sampling_defaults import AUTO, NONE, read_sampling_defaults
from flowrt.launcher import events
from flowrt.sampling_params import PARAMETER_TYPES

TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"
OFF = "(--generation-config none turns them off)"


def write(folder: Path, values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("given", "values", "listed"),
    [
        ({}, {}, ""),
        ({"do_sample": False, "eos_token_id": 5, "top_k": None, "typical_p": 0.5}, {}, ""),
        ({"do_sample": True, "temperature": 1}, {"temperature": 1.0}, "temperature 1"),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 2048},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 2048},
            "temperature 0.6, top_p 0.95, top_k 20, repetition_penalty 1.05, max_tokens 2048",
        ),
        ({"top_k": -1}, {"top_k": 0}, "top_k 0"),
        ({"min_p": 0.1}, {"min_p": 0.1} if "min_p" in PARAMETER_TYPES else {}, "min_p 0.1" if "min_p" in PARAMETER_TYPES else ""),
    ],
)
def test_the_keys_that_vllm_takes_are_taken(tmp_path: Path, given: dict[str, Any], values: dict[str, Any], listed: str) -> None:
    path = write(tmp_path, given) / "generation_config.json"
    found = read_sampling_defaults(tmp_path)
    assert (dict(found.values), found.notes) == (values, ())
    assert found.text == (f"defaults of requests, from {path}: {listed} {OFF}" if listed else "")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("temperature", "hot", "temperature is 'hot', it must be a number from 0 to 1e+09; 0 is greedy; it is not used"),
        ("temperature", True, "temperature is True, it must be"),
        ("top_p", 0, "top_p is 0, it must be a number above 0 and at most 1; 1 is off; it is not used"),
        ("top_k", 2.5, "top_k is 2.5, it must be a whole number"),
        ("repetition_penalty", -1, "repetition_penalty is -1, it must be"),
        ("max_new_tokens", 0, "max_new_tokens is 0, it must be a whole number from 1"),
        ("max_new_tokens", [], "max_new_tokens is [], it must be"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_with_file_and_key(tmp_path: Path, key: str, value: Any, text: str) -> None:
    path = write(tmp_path, {key: value, "top_k" if key != "top_k" else "top_p": 1}) / "generation_config.json"
    found = read_sampling_defaults(tmp_path)
    (note,) = found.notes
    assert note.startswith(f"{path}: {text}")
    assert "\n" not in note
    assert list(found.values) == ["top_k" if key != "top_k" else "top_p"]


def test_the_file_is_chosen(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", {"top_k": 1}), write(tmp_path / "other", {"top_k": 2})
    assert read_sampling_defaults(model, AUTO).values == {"top_k": 1}
    assert read_sampling_defaults(model, NONE).values == {}
    assert read_sampling_defaults(model, str(other)).values == {"top_k": 2}
    (model / "generation_config.json").unlink()
    assert read_sampling_defaults(model).values == {}
    with pytest.raises(
        flowrt.UserError, match=r"--generation-config .*: there is no .*/generation_config.json; give auto, none, or a folder"
    ):
        read_sampling_defaults(other, str(model))
    (other / "generation_config.json").write_text("[]")
    with pytest.raises(flowrt.UserError, match=r"generation_config.json holds a list; a mapping"):
        read_sampling_defaults(model, str(other))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(TINY, tmp_path / "model")
    return write(tmp_path / "model", {"eos_token_id": 0, "max_new_tokens": 3, "temperature": 9.0, "top_k": 1})


PROMPT = "Count from 3 to 11"


async def test_keywords_get_the_defaults_and_an_object_is_used_as_it_is(model: Path) -> None:
    found: list[events.Event] = []
    async with flowrt.open(model, overrides=["deploy.processes=one"], on_event=found.append) as graph:
        assert graph.sampling_defaults == {"max_tokens": 3, "temperature": 9.0, "top_k": 1}
        greedy = (await graph.complete(PROMPT, flowrt.SamplingParams(max_tokens=8))).token_ids
        assert len(greedy) == 8
        assert (await graph.complete(PROMPT)).token_ids == greedy[:3]
        assert (await graph.complete(PROMPT, max_tokens=8)).token_ids == greedy, "top_k 1 at any temperature"
        assert (await graph.complete(PROMPT, max_tokens=8, top_k=0, seed=1)).token_ids != greedy, "temperature 9"
    assert [each for each in found if isinstance(each, events.ModelNotice)] == [
        events.ModelNotice(f"defaults of requests, from {model}/generation_config.json: temperature 9, top_k 1, max_tokens 3 {OFF}", False)
    ]


def test_blocking_calls_get_them_too(model: Path) -> None:
    options: Any = {"overrides": ["deploy.processes=one"]}
    (whole,) = flowrt.generate(model, PROMPT, max_tokens=8, generation_config="none", **options)
    (short,) = flowrt.generate(model, PROMPT, **options)
    assert short.token_ids == whole.token_ids[:3]
    with pytest.raises(flowrt.ArgumentError, match="generation_config is 5, it must be 'auto', 'none' or the path of a folder"):
        flowrt.open(model, generation_config=5)  # type: ignore[arg-type]
