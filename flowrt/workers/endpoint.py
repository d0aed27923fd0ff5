"""The gateway's half of a user's graph: the source `input`, which emits tags from a counter, and the sink `output`.

Endpoint is a worker with the usual links and runner, whose inputs and outputs are the user's tensors. The launcher hosts it in the
user's process, under the name of the gateway. call_table.py decides which calls may begin, and which must be fenced.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from flowrt.actors.control import CallFailed, CallsFenced, Control, FenceCalls
from flowrt.dataflow.fences import MAX_FAILED
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.schemas import Spec, check_tensor, parse_spec
from flowrt.errors import OperatorError, UserError, error_text
from flowrt.graph.model import INPUT, OUTPUT, Graph
from flowrt.seams import Seams
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Tag
from flowrt.workers.call_table import CallTable
from flowrt.workers.process import Worker, WorkerObserver, serve

log = logging.getLogger("flowrt.worker")


class Endpoint(WorkerObserver):
    """`run` is the worker; `call` sends one tag through the graph; `on_control` takes the messages of the other workers.

    At most `limits.in_flight` calls hold a place at once; see CallTable.
    """

    def __init__(self, graph: Graph) -> None:
        self.ports = sorted({edge.source_port for edge in graph.edges.values() if edge.source == INPUT})
        # (node, input port of the graph, spec): tensors that the file declares for the ports that an input feeds
        self._specs: list[tuple[str, str, Spec]] = []
        for edge in graph.edges.values():
            if edge.source == INPUT and (port := graph.nodes[edge.target].inputs[edge.target_port]).tensors:
                self._specs.append((edge.target, edge.source_port, parse_spec(port.tensors[0])))
        self._has_output = OUTPUT in graph.nodes
        max_ahead = MAX_FAILED // 2 if any(node.stateful for node in graph.nodes.values()) else None
        self._calls = CallTable(graph.process_names(), graph.limits.in_flight, max_ahead)
        self._unfenced: list[int] = []  # calls that the workers must fence; sent at the next turn of the loop
        self._queue: deque[asyncio.Future[int]] = deque()  # callers that wait for a place; the result is the step of their call
        self._max_bytes = graph.limits.max_message_bytes
        self._shares_memory = graph.processes == "one"
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}  # by step
        self.worker: Worker | None = None
        self._source = ""
        self._failure: BaseException | None = None

    async def run(self, control: Channel, seams: Seams) -> None:
        """Serve until Stop. The owner fails the calls that still wait then, with the reason why the graph ended."""

        try:
            await serve(control, seams, self)
        except Exception as error:
            self.fail(error)
            raise

    def begin(self, worker: Worker) -> None:
        self.worker = worker
        self._source = f"{INPUT}@{worker.incarnation}"

    def fail(self, error: BaseException) -> None:
        """Make every waiting call and every later call raise `error`."""
        self._failure = self._failure or error
        waiting: list[asyncio.Future[Any]] = [*self._waiting.values(), *self._queue]
        for future in waiting:
            if not future.done():
                future.set_exception(self._failure)

    async def call(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Send one tensor per input port, and return the output port's tensors by name. Waits while too many calls are in flight.

        Raises UserError for ports that the graph does not have, or for a tensor that does not fit the declared spec; OperatorError when
        an operator fails in this call. A cancelled call is dropped wherever it is.
        """
        self._check(tensors)
        payloads = {name: Payload((self._given(tensor),)) for name, tensor in tensors.items()}
        step = await self._begin()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[step] = future
        try:
            if self._failure is not None or self.worker is None:  # it may have failed since the turn came
                raise self._failure or RuntimeError("the graph has not been opened")
            self.worker.emit(INPUT, Tag(self._source, 0, 0, step, 0), payloads)
            return await future
        finally:
            del self._waiting[step]
            if future.done() and not future.cancelled():
                future.exception()  # retrieved: the caller may be cancelled at the same moment
            del future  # its exception refers to this frame, and a cycle would keep the tensors
            if self._calls.is_live(step):  # cancelled, or not emitted
                self._fence(step)

    def on_control(self, worker: str, control: Control) -> None:
        """Handle CallFailed and CallsFenced of a worker. Ignores other messages."""
        match control:
            case CallFailed(source, step, text, node) if source == self._source:
                if not self._fence(step):
                    return
                future = self._waiting.get(step)
                if future is not None and not future.done():
                    future.set_exception(OperatorError(text, node))
                elif self._failure is None:
                    log.warning("%s (after the output of the call)", text)
                self._admit()
            case CallsFenced(source, steps) if source == self._source:
                self._calls.confirm(worker, steps)
                self._admit()

    def leftovers(self) -> list[str]:
        """What is left when all calls have ended, and no message is in flight."""
        return self._calls.leftovers()

    async def _begin(self) -> int:
        if self._failure is not None:  # no place becomes free any more
            raise self._failure
        if not self._queue and self._calls.can_begin():
            return self._calls.begin()
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self._fence(turn.result())
            raise

    def _admit(self) -> None:
        """Let the callers that wait begin, in their order, while there are places."""
        while self._queue and self._calls.can_begin():
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(self._calls.begin())

    def _fence(self, step: int) -> bool:
        """Let all workers drop a call. False: they do already."""
        if not self._calls.fence(step):
            return False
        if self.worker is not None and self._failure is None:
            self.worker.fence(self._source, (step,))
            if not self._unfenced:
                asyncio.get_running_loop().call_soon(self._send_fences, self.worker)
            self._unfenced.append(step)
        return True

    def _send_fences(self, worker: Worker) -> None:
        unfenced, self._unfenced = self._unfenced, []
        if self._failure is None:
            worker.control.send(FenceCalls(self._source, tuple(unfenced)))

    def _given(self, tensor: Any) -> Any:
        """The user's tensor as the graph may have it: where operators share the user's memory, a copy."""
        return tensor.detach().clone() if self._shares_memory else tensor.detach()

    def on_sink(self, firing: Firing) -> None:
        step = firing.tag.step
        if not self._calls.end(step):
            return
        self._admit()
        future = self._waiting.get(step)
        if future is None or future.done():  # the caller has cancelled
            return
        try:
            tensors = {port: payload.tensors[0] for port, payload in firing.inputs.items()}
            future.set_result({port: tensor.clone() if tensor.is_inference() else tensor for port, tensor in tensors.items()})
        except Exception as error:  # of a kind of tensor that cannot be copied
            future.set_exception(OperatorError(f"the output of step {step} cannot be returned: {error_text(error)}", OUTPUT))

    def _check(self, tensors: Mapping[str, Any]) -> None:
        import torch

        if not self._has_output:
            raise UserError("this graph has no edge to output; add one such as 'add.sum -> output.sum:'")
        if sorted(tensors) != self.ports:
            raise UserError(f"this graph takes {', '.join(self.ports)}; got {', '.join(sorted(tensors)) or 'nothing'}")
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise UserError(f"input {name} is a {type(tensor).__name__}; a torch.Tensor is needed")
            if tensor.layout is not torch.strided:
                raise UserError(f"input {name} is a {tensor.layout} tensor; a dense one is needed")
            if tensor.nbytes > self._max_bytes:
                raise UserError(f"input {name} has {tensor.nbytes} bytes; limits.max_message_bytes is {self._max_bytes}")
        sizes: dict[str, dict[str, int]] = {}  # by node
        for node, name, spec in self._specs:
            fault = check_tensor(spec, tensors[name], sizes.setdefault(node, {}))
            if fault:
                raise UserError(f"input {name} is {fault}; {spec} is declared")
