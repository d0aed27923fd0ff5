"""End-of-sequence ids of a model folder: the union of what its files name, and one line where they differ."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrt.operators.families.end_tokens import read_end_tokens
from flowrt.operators.families.registry import note_on_end_tokens, read_model_config
from flowrt.operators.model_config import ModelError

TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"  # its tokenizer: <|endoftext|> is 0, <|pad|> is 1
FILES = {"generation": "generation_config.json", "config": "config.json", "tokenizer": "tokenizer_config.json"}


def change(directory: Path, **changes: dict[str, Any] | None) -> Path:
    """The model of the demo with changed keys of its files; None: without this file."""
    shutil.copytree(TINY, directory)
    for name, values in changes.items():
        path = directory / FILES[name]
        if values is None:
            path.unlink()
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


BOTH = "the files name different end-of-sequence tokens ("
ENDS = "), and an answer ends at each of them"


def ids(generation: Any, config: Any = "same", **tokenizer: Any) -> dict[str, Any]:
    return {
        "generation": None if generation == "none" else {"eos_token_id": generation},
        "config": {"eos_token_id": generation if config == "same" else config},
        "tokenizer": tokenizer,
    }


@pytest.mark.parametrize(
    ("files", "found", "note"),
    [
        ({}, (0,), ""),
        (ids(0), (0,), ""),
        (ids([0, 5]), (0, 5), ""),
        (ids([0, 5], 5), (0, 5), ""),
        (ids("none", 0), (0,), ""),
        (ids(None, None), (0,), ""),
        (ids(5), (5, 0), f"{BOTH}generation_config.json 5, config.json 5, tokenizer_config.json 0{ENDS}"),
        (ids(0, [0, 7, 8]), (0, 7, 8), f"{BOTH}generation_config.json 0, config.json 0 and 7 and 8, tokenizer_config.json 0{ENDS}"),
        (ids(5, eos_token=None), (5,), ""),
        (
            ids(5, eos_token={"content": "<|pad|>", "lstrip": False}),
            (5, 1),
            f"{BOTH}generation_config.json 5, config.json 5, tokenizer_config.json 1{ENDS}",
        ),
        (ids(5, eos_token="a"), (5, 66), f"{BOTH}generation_config.json 5, config.json 5, tokenizer_config.json 66{ENDS}"),
        (ids(0, eos_token="<|end|>"), (0,), "tokenizer_config.json names '<|end|>', which is not a token of tokenizer.json"),
        (ids(0, eos_token="<|end|>", added_tokens_decoder={"0": {"content": "<|end|>"}}), (0,), ""),
        (
            ids(70000),
            (0,),
            "generation_config.json names 70000, outside of the vocabulary of 768 tokens; "
            "config.json names 70000, outside of the vocabulary of 768 tokens",
        ),
        (ids([0, 768], 0), (0,), "generation_config.json names 768, outside of the vocabulary of 768 tokens"),
        (
            ids(None, None, eos_token=None),
            (),
            "no file names an end-of-sequence token (eos_token_id in generation_config.json), so answers end at max_tokens",
        ),
    ],
)
def test_the_ids_of_all_files_count(tmp_path: Path, files: dict[str, Any], found: tuple[int, ...], note: str) -> None:
    directory = change(tmp_path / "model", **files)
    assert read_model_config(directory).eos_token_ids == found
    assert note_on_end_tokens(directory) == (f"{directory}: {note}" if note else "")


def test_the_map_of_special_tokens_counts_where_the_tokenizer_names_none(tmp_path: Path) -> None:
    directory = change(tmp_path / "model", **ids(None, None, eos_token=None))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|pad|>"}))
    assert read_end_tokens(directory, (), 768).token_ids == (1,)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    directory = change(tmp_path / "model")
    assert read_model_config(directory).eos_token_ids == (0,)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [0, 9]}))
    os.utime(path, ns=(1, 1))
    assert read_model_config(directory).eos_token_ids == (0, 9)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_broken_file_is_one_line(tmp_path: Path, name: str) -> None:
    directory = change(tmp_path / "model", tokenizer={"eos_token": None})
    (directory / name).write_text("{")
    with pytest.raises(ModelError, match=rf"{name} is not valid JSON: ") as error:
        read_model_config(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"added_tokens": 5}', '{"model": {"vocab": [["a", 0.0], ["<|endoftext|>", 1.0]]}}'])
def test_a_tokenizer_of_any_form_gives_an_id_or_none(tmp_path: Path, text: str) -> None:
    directory = change(tmp_path / "model", **ids(7))
    (directory / "tokenizer.json").write_text(text)
    assert read_model_config(directory).eos_token_ids == ((7, 1) if "vocab" in text else (7,))
