"""flowrt: Mixture-of-Experts language models as asynchronous dataflow graphs of processes.

`open`, `generate` and the event types are the Python API (api.py); importing this package loads neither torch nor zmq.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrt.api import Choice, Completion, RunningGraph, generate
    from flowrt.api import open_graph as open
    from flowrt.errors import GraphError, NotRunningError, UserError, WorkerDiedError
    from flowrt.gateway.gateway import ChoiceEvent, EndEvent, TokenEvent
    from flowrt.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "ChoiceEvent",
    "Completion",
    "EndEvent",
    "GraphError",
    "NotRunningError",
    "RunningGraph",
    "SamplingParams",
    "TokenEvent",
    "UserError",
    "WorkerDiedError",
    "generate",
    "open",
]

_HOME = {
    "Choice": "api:Choice",
    "Completion": "api:Completion",
    "RunningGraph": "api:RunningGraph",
    "generate": "api:generate",
    "open": "api:open_graph",
    "ChoiceEvent": "gateway.gateway:ChoiceEvent",
    "EndEvent": "gateway.gateway:EndEvent",
    "SamplingParams": "sampling_params:SamplingParams",
    "TokenEvent": "gateway.gateway:TokenEvent",
    "GraphError": "errors:GraphError",
    "NotRunningError": "errors:NotRunningError",
    "UserError": "errors:UserError",
    "WorkerDiedError": "errors:WorkerDiedError",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flowrt' has no attribute {name!r}")
    module, attribute = _HOME[name].split(":")
    return getattr(import_module(f"flowrt.{module}"), attribute)
