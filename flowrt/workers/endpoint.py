"""The gateway's half of a user's graph: the source `input`, which emits tags from a counter, and the sink `output`.

Endpoint is a worker with the usual links and runner, whose inputs and outputs are the user's tensors. The launcher hosts it in the
user's process, under the name of the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.schemas import Spec, check_tensor, parse_spec
from flowrt.errors import UserError
from flowrt.graph.model import INPUT, OUTPUT, Graph
from flowrt.seams import Seams
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Tag
from flowrt.workers.process import Worker, serve


class Endpoint:
    """`run` is the worker; `call` sends one tag through the graph. At most `limits.in_flight` tags are in flight at once."""

    def __init__(self, graph: Graph) -> None:
        self.ports = sorted({edge.source_port for edge in graph.edges.values() if edge.source == INPUT})
        self._specs: dict[str, Spec] = {}  # tensors that the file declares for the ports that an input feeds
        for edge in graph.edges.values():
            if edge.source == INPUT and (port := graph.nodes[edge.target].inputs[edge.target_port]).tensors:
                self._specs.setdefault(edge.source_port, parse_spec(port.tensors[0]))
        self._has_output = OUTPUT in graph.nodes
        self._room = asyncio.Semaphore(graph.limits.in_flight)
        self._max_bytes = graph.limits.max_message_bytes
        self._shares_memory = graph.processes == "one"
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._worker: Worker | None = None
        self._source = ""
        self._failure: BaseException | None = None

    async def run(self, control: Channel, seams: Seams) -> None:
        """Serve until Stop. The owner fails the calls that still wait then, with the reason why the graph ended."""

        def begin(worker: Worker) -> None:
            self._worker = worker
            self._source = f"{INPUT}@{worker.incarnation}"

        try:
            await serve(control, seams, self._on_output, begin)
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Make every waiting call and every later call raise `error`."""
        self._failure = self._failure or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._failure)

    async def call(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Send one tensor per input port, and return the output port's tensors by name. Waits while too many tags are in flight.

        Raises UserError for ports that the graph does not have, or for a tensor that does not fit the declared spec.
        """
        self._check(tensors)
        await self._room.acquire()
        if self._failure is not None or self._worker is None:
            self._room.release()
            raise self._failure or RuntimeError("the graph has not been opened")
        tag = Tag(self._source, 0, 0, self._next, 0)
        self._next += 1
        future = self._waiting[tag.step] = asyncio.get_running_loop().create_future()
        try:
            self._worker.emit(INPUT, tag, {name: Payload((self._given(tensor),)) for name, tensor in tensors.items()})
        except BaseException:
            self._end(tag.step)
            raise
        outputs: dict[str, Any] = await future  # cancelled or not, the tag is on its way and keeps its place until its output comes
        return outputs

    def _given(self, tensor: Any) -> Any:
        """The user's tensor as the graph may have it: where operators share the user's memory, a copy."""
        return tensor.detach().clone() if self._shares_memory else tensor.detach()

    def _end(self, step: int) -> asyncio.Future[dict[str, Any]] | None:
        self._room.release()
        return self._waiting.pop(step, None)

    def _on_output(self, firing: Firing) -> None:
        future = self._end(firing.tag.step)
        if future is not None and not future.done():  # done: the caller has cancelled
            tensors = {port: payload.tensors[0] for port, payload in firing.inputs.items()}
            future.set_result({port: tensor.clone() if tensor.is_inference() else tensor for port, tensor in tensors.items()})

    def _check(self, tensors: Mapping[str, Any]) -> None:
        import torch

        if not self._has_output:
            raise UserError("this graph has no edge to output; add one such as 'add.sum -> output.sum:'")
        if sorted(tensors) != self.ports:
            raise UserError(f"this graph takes {', '.join(self.ports)}; got {', '.join(sorted(tensors)) or 'nothing'}")
        sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise UserError(f"input {name} is a {type(tensor).__name__}; a torch.Tensor is needed")
            if tensor.nbytes > self._max_bytes:
                raise UserError(f"input {name} has {tensor.nbytes} bytes; limits.max_message_bytes is {self._max_bytes}")
            spec = self._specs.get(name)
            fault = check_tensor(spec, tensor, sizes) if spec is not None else None
            if fault:
                raise UserError(f"input {name} is {fault}; {spec} is declared")
