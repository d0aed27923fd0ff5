"""flowrt: Mixture-of-Experts language models as asynchronous dataflow graphs of processes.

`open`, `generate` and the event types are the Python API (api.py); importing this package loads neither torch nor zmq.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrt.actors.outputs import ChoiceEvent, EndEvent, TokenEvent
    from flowrt.api import AttachedGraph, BlockingGraph, Choice, Completion, RunningGraph, attach, generate, start
    from flowrt.api import open_graph as open
    from flowrt.errors import (
        ArgumentError,
        FlowrtError,
        GraphError,
        NotRunningError,
        OperatorError,
        RequestError,
        TokenizerError,
        UserError,
        WorkerDiedError,
    )
    from flowrt.sampling_params import SamplingParams
    from flowrt.structured_outputs import StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "AttachedGraph",
    "BlockingGraph",
    "Choice",
    "ChoiceEvent",
    "Completion",
    "EndEvent",
    "FlowrtError",
    "GraphError",
    "NotRunningError",
    "OperatorError",
    "RequestError",
    "RunningGraph",
    "SamplingParams",
    "StructuredOutputs",
    "TokenEvent",
    "TokenizerError",
    "UserError",
    "WorkerDiedError",
    "attach",
    "generate",
    "open",
    "start",
]

_MODULES = {  # module -> what it gives; loaded when one of the names is first used
    "api": ("AttachedGraph", "BlockingGraph", "Choice", "Completion", "RunningGraph", "attach", "generate", "start"),
    "actors.outputs": ("ChoiceEvent", "EndEvent", "TokenEvent"),
    "sampling_params": ("SamplingParams",),
    "structured_outputs": ("StructuredOutputs",),
    "errors": (
        "ArgumentError",
        "FlowrtError",
        "GraphError",
        "NotRunningError",
        "OperatorError",
        "RequestError",
        "TokenizerError",
        "UserError",
        "WorkerDiedError",
    ),
}
_HOME = {name: (module, name) for module, names in _MODULES.items() for name in names} | {"open": ("api", "open_graph")}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flowrt' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(f"flowrt.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})
