"""Checks of a process before it loads anything: the device exists, the modules of user operators have the named functions.

Each worker checks itself first. `flowrt graph validate` and the start of a run execute this module as a short process (the launcher's
start_check_process.py) with the graph on standard input: the launching process imports neither torch nor a module of the user.
"""

from __future__ import annotations

import gc
import os
import sys

import torch

from flowrt.dataflow.subgraph import NodeFunction
from flowrt.errors import UserError
from flowrt.graph.model import Graph, from_json
from flowrt.graph.notation import format_ids, parse_ids
from flowrt.workers.user_nodes import build_user_nodes


def check_process(graph: Graph, process: str) -> dict[str, NodeFunction]:
    """The functions of the process's user operators. Raises GraphError for a device, a core or a function that is not there."""
    return build_user_nodes(graph, process, check_machine(graph, process))


def check_machine(graph: Graph, process: str) -> torch.device:
    """The device of the process. Raises GraphError for a device or a core that is not there."""
    if (reason := _cores_problem(graph.cores.get(process))) is not None:
        raise graph.error(f"cores.{process}", reason)
    device = torch.device(graph.devices.get(process, "cpu"))
    if device.type == "cuda" and (reason := _cuda_problem(device)) is not None:
        raise graph.error(f"devices.{process}", f"{reason}, or write cpu")
    return device


def _cores_problem(cores: str | int | None) -> str | None:
    """Why the process cannot run on these cores, and what to do; None when it can, and without cores of its own."""
    if cores is None:
        return None
    if not hasattr(os, "sched_getaffinity"):
        return "this system binds no process to cores; remove the key"
    usable = os.sched_getaffinity(0)
    if missing := set(parse_ids(cores)) - usable:
        return f"core {min(missing)} cannot be used here; write some of {format_ids(usable)}"
    return None


def _cuda_problem(device: torch.device) -> str | None:
    """Why the CUDA device cannot be used here, and what to do; None when it can."""
    if torch.version.cuda is None:
        return f"{device} needs a torch with CUDA, this one ({torch.__version__}) has none; install one (pytorch.org)"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return f"torch finds no GPU for {device}; check the driver with nvidia-smi"
    if device.index is not None and device.index >= count:
        return f"there is no {device}, torch finds {count}; write cuda:{count - 1} or a smaller number"
    return None


def main() -> None:
    """Print "valid", or the first error of any process of the graph on one line. No output: a module of the user ended the process. With
    an argument, no module of the user is imported."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a module of the user prints is not an error of the graph
    gc.disable()  # what this short process allocates lives until its end
    graph = from_json(sys.stdin.buffer.read())
    check = check_process if len(sys.argv) < 2 else check_machine
    try:
        for process in graph.process_names():
            check(graph, process)
        output.write("valid")
    except UserError as error:
        output.write(str(error))
    output.flush()
    os._exit(0)  # threads of the user's modules do not delay the answer


if __name__ == "__main__":
    main()
