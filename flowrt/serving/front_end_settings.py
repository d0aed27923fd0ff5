"""The settings of front ends: what `flowrt serve` chooses, and what each front end is given in its Start message beside the graph."""

from __future__ import annotations

from typing import Any

import msgspec

from flowrt.serving.cors import CorsRules
from flowrt.serving.listener import HttpListener
from flowrt.serving.output_formats import NO_FORMATS, OutputFormats

ENTRY = "flowrt.serving.http_front_end:run_front_end"
LISTENER, ADMIN_LISTENER = "listener", "admin listener"  # names of descriptors of listening sockets


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`api_key` "": none. `certificate` and `private_key`: files for TLS, "" without. `formats`: in which the model writes tool calls and
    reasoning."""

    model_name: str
    version: str
    api_key: str = ""
    certificate: str = ""
    private_key: str = ""
    formats: OutputFormats = NO_FORMATS
    cors: CorsRules = CorsRules()


class ServeOptions(HttpSettings, frozen=True, kw_only=True):
    """`max_model_len`: bounds the prompt and the new tokens of a request together; None: as many as the model and the graph allow.
    `admin`: the socket for admin calls."""

    listener: HttpListener
    max_model_len: int | None = None
    admin: HttpListener | None = None


class FrontEndSettings(HttpSettings, frozen=True, kw_only=True):
    """`model_dir`: where the tokenizer is. `sampling_defaults`: of requests that give no value of their own. `hosts`: what the Host header
    may name; (): anything."""

    model_dir: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any] = {}
    hosts: tuple[str, ...] = ()
