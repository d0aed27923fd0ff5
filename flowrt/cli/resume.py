"""`flowrt up --resume NAME`: starts the graph of a dead launcher again, as it was started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from flowrt.cli.options import ServeCommandOptions
from flowrt.errors import UserError, shown
from flowrt.serving.run_folder import found_graphs


def kept_options(options: ServeCommandOptions, port: int) -> dict[str, Any]:
    """The options for a graph's description: paths are absolute, the port is the one in use, and the API key is left out."""
    paths: dict[str, Any] = {
        each.name: value.absolute() for each in fields(options) if isinstance(value := getattr(options, each.name), Path)
    }
    kept = replace(options, **paths, api_key=None, port=port, resume=True)
    return dict(msgspec.to_builtins(kept, enc_hook=str))


def find_options(name: str, options: ServeCommandOptions) -> tuple[Path, ServeCommandOptions]:
    """The graph file and the options of a dead graph. A path is returned as it is: the name is lost with the folder, as when the machine
    was restarted. Raises UserError."""
    found = next((each for each in found_graphs() if each.name == name), None)
    if found is None and Path(name).exists():
        return Path(name), options
    if found is None:
        raise UserError(f"there is no graph {shown(name)} to resume; give its graph file: flowrt up GRAPH --resume")
    described = found.description
    if found.is_alive:
        pid = f" (pid {described.pid})" if described is not None else ""
        raise UserError(f"{name} is up already{pid}; flowrt down {name} stops it")
    if described is None or not described.options:
        raise UserError(f"{name} had not begun to serve; flowrt up GRAPH starts it")
    if replace(options, api_key=None, resume=False) != ServeCommandOptions():
        raise UserError(f"{name} is resumed with the options that it had; leave out all but --resume and --api-key")
    if described.has_api_key and not options.api_key:
        raise UserError(f"{name} had an API key, which is not kept; give it with --api-key or FLOWRT_API_KEY")
    return Path(described.graph), replace(_read(name, described.options), api_key=options.api_key, name=name)


def _read(name: str, kept: Mapping[str, Any]) -> ServeCommandOptions:
    try:
        return msgspec.convert(kept, ServeCommandOptions, dec_hook=lambda kind, value: kind(value))
    except msgspec.ValidationError:
        raise UserError(f"{name} was started by another version of flowrt; give its graph file: flowrt up GRAPH --resume") from None
