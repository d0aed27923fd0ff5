"""What to do about a model folder without tokenizer.json: the command that converts a tokenizer of another format that it has."""

from __future__ import annotations

import shlex
from pathlib import Path

NAME = "tokenizer.json"
# File -> packages that its conversion needs, and the code that writes tokenizer.json into the folder {0}, a Python string.
_CONVERSIONS = {
    "tiktoken.model": (
        "transformers tiktoken blobfile",
        "from transformers import AutoTokenizer; from transformers.integrations.tiktoken import convert_tiktoken_to_fast; "
        "convert_tiktoken_to_fast(AutoTokenizer.from_pretrained({0}, trust_remote_code=True).model, {0})",
    ),
    "tekken.json": (
        "transformers mistral-common",
        "from transformers.integrations.mistral import convert_tekken_tokenizer; "
        "convert_tekken_tokenizer({0} + '/tekken.json').save_pretrained({0})",
    ),
    "tokenizer.model": (
        "transformers sentencepiece protobuf",
        "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained({0}).save_pretrained({0})",
    ),
}


def conversion(directory: str | Path) -> str:
    """The command that writes tokenizer.json, where the folder has a tokenizer of another format and no such file; else ""."""
    directory = Path(directory)
    if (directory / NAME).exists():
        return ""
    for name, (packages, code) in _CONVERSIONS.items():
        if (directory / name).is_file():
            text = code.format(repr(str(directory)))
            quoted = shlex.quote(text) if set('"$`\\!') & set(text) else f'"{text}"'
            return f"{name} is converted by: pip install {packages}; python -c {quoted}"
    return ""


IDS = 'give token ids, from Python or in a file for flowrt run --prompts with lines such as {"prompt_token_ids": [1, 2, 3]}'


def missing_tokenizer(directory: str | Path, instead: str = IDS) -> str:
    """One line for the user of a folder without tokenizer.json. `instead`: what to do where no file is to be had."""
    remedy = conversion(directory) or "add the file"
    return f"{directory} has no {NAME}, which texts need; {remedy}, or {instead}"
