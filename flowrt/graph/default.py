"""The default graph of a model directory, and the commented file that `flowrt init` writes of it."""

from __future__ import annotations

import json
import re
from os.path import isfile
from pathlib import Path
from typing import Any

from flowrt.costs.cards import card_names
from flowrt.document import parse_document
from flowrt.errors import nearest

_TEXT = """\
# flowrt run graph.yaml --prompt "TEXT"      answer a prompt; --chat: by the model's chat template
# flowrt graph validate graph.yaml           check this file after a change
# flowrt graph show graph.yaml               see the processes and the messages between them
# flowrt graph schema                        all keys; without a key, its default holds
flowrt: 1
model:
  path: {path}   # a Hugging Face directory: config.json, *.safetensors, tokenizer.json
  # dtype: float32                # default: the checkpoint's own
deploy:
  attention:
    groups: 1                     # processes that schedule, batch and keep the KV cache of their own requests
    micro_batches: 2              # at most; while one batch waits for experts, another computes
  experts:
    servers: 2                    # processes that share the experts; 0: the groups hold them
    replicas: 1                   # servers that hold each expert; with 2, a server may die and no request fails
limits:
  max_num_seqs: 16                # sequences that a group computes at a time
  dynamic_micro_batches: true     # use as many micro-batches as give the most tokens per second
  kv_pages: 512                   # pages of KV cache per group, 16 tokens each
  # max_tokens: 1024              # maximum number of new tokens of an answer; default: as many as fit
"""
_URL = re.compile(r"(https?):/+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def default_graph(model_dir: Path | str) -> dict[str, Any]:
    """The graph file, as plain values, that serves the model directory on this machine: one group and two expert servers."""
    value: dict[str, Any] = parse_document(_TEXT.format(path="''"), "default graph").value
    value["model"] = {"path": str(Path(model_dir).absolute())}
    return value


def default_graph_text(model_dir: Path | str, prompts: tuple[str, ...] = ()) -> str:
    """The file of `default_graph`, with comments; `prompts` are those that it answers when given none."""
    text = _TEXT.format(path=_quoted(str(Path(model_dir).absolute())))
    return (
        text
        + ("prompts:                          # answered when flowrt run is given none\n" if prompts else "")
        + "".join(f"  - {_quoted(prompt)}\n" for prompt in prompts)
    )


def url_of(name: str) -> str:
    """The URL that was given in place of a path, whose "//" a Path shortens; "" for a path."""
    return _URL.sub(r"\1://", name) if _URL.match(name) else ""


def hub_hint(name: str) -> str:
    """What to do about a missing graph or model directory: how to download it, when its name is one of the Hugging Face hub or a URL of it;
    what takes another URL."""
    if url := url_of(name):
        name = url.partition("huggingface.co/")[2]
        name = "/".join(name.split("/")[:2])
        if not _HUB_ID.fullmatch(name):
            return f"a graph or model is a path of this machine; flowrt chat --url {url} talks with a server"
    organization, _, folder = name.partition("/")
    if _HUB_ID.fullmatch(name) and not name.endswith((".yaml", ".yml", ".json")) and not Path(organization).exists():
        download = f"hf download {name} --local-dir {folder}, then use ./{folder}"
        return f"only Mixture-of-Experts models are served; download one of the hub first: {download}"
    return ""


def hint_of_card(name: str) -> str:
    """The name of a model card that is meant, if one is near."""
    hint = nearest(name, card_names("models"))
    return hint if hint.startswith("did you mean") else ""


def folder_hint(path: Path) -> str:
    """What to give in place of a folder without config.json: one of the hub's cache, whose models are in `snapshots`, or an adapter (LoRA
    and its like, as PEFT writes them); "" for other folders."""
    if isfile(path / "adapter_config.json"):
        return "holds an adapter (adapter_config.json), not a model; merge it into its base model, and give that folder"
    found = sorted(str(each.parent) for each in (path / "snapshots").glob("*/config.json"))
    return f"is a folder of the hub's cache; give its snapshot {' or '.join(found[:3])}" if found else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
