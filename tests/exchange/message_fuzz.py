"""Mutated responses of expert servers, from their bytes on the wire to the runner of an attention process.

Whatever arrives is accepted or refused with an error that names its sender, and the sums stay exact after the sender is fenced.
`python tests/exchange/message_fuzz.py --executions 1000000` also reports the branches that were found, and when.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for use as a script
from exchange.failover_client import SERVERS, WIDTH, Client, respond

from flowrt.actors.link import BadMessageError
from flowrt.dataflow.outbound_edges import CreditHeader
from flowrt.dataflow.parts import FAILED, FailedHeader, PartHeader
from flowrt.dataflow.payload import Payload, from_message, to_message
from flowrt.dataflow.schemas import MessageSchema, parse_spec
from flowrt.transports.contract import Limits
from flowrt.transports.wire.codec import WireError, decode, encode
from flowrt.transports.wire.message import DTYPE_BYTES, Message, Tag, Tensor, TensorSpec

LIMITS = Limits(max_message_bytes=4096)
MESSAGES_PER_STEP = 40
NUMBERS = (-(1 << 63), -1, 0, 1, 2, 7, (1 << 31) - 1, (1 << 63) - 1)
TRACED = (
    "dataflow/inbound_edges.py", "dataflow/outbound_edges.py", "dataflow/schemas.py", "dataflow/matching.py",
    "dataflow/parts.py", "dataflow/payload.py", "dataflow/outbound_edges.py", "dataflow/runner.py", "wire/codec.py",
)  # fmt: skip


def schemas_of(client: Client) -> dict[int, MessageSchema]:
    """What a client and its servers send each other, as flowrt/workers/message_schemas.py has it for a model."""
    request = tuple(map(parse_spec, (f"float32[rows,{WIDTH}]", "int64[pairs]", "int64[pairs]", "float32[pairs]")))
    response = (parse_spec(f"float32[{'pairs' if client.strict else 'rows'},{WIDTH}]"),)
    found = {}
    for server in SERVERS:
        found[client.request_edge(server)] = MessageSchema(request, frozenset({"s"}), 1, header=PartHeader)
        found[client.response_edge(server)] = MessageSchema(response, frozenset({"s"}), 1, header=PartHeader)
    return found


class Fuzz:
    """Steps of one client. Each is disturbed by mutated messages of its servers, and must then end with the exact sum."""

    def __init__(self, seed: int, strict: bool = False) -> None:
        self.random = Random(seed)
        self.client = Client(strict, schemas=schemas_of)
        self.num_executions = self.num_refused = self.num_steps = 0

    def step(self) -> None:
        client, random = self.client, self.random
        client.begin(self.num_steps)
        refused: set[int] = set()
        has_changed_values = False
        for _ in range(MESSAGES_PER_STEP):
            server = random.choice([each for each in SERVERS if each not in refused] or list(SERVERS))
            peer = random.choice(sorted(SERVERS)) if random.random() < 0.05 else server
            genuine = self._message_of(server)
            parts, has_values = self._mutated(genuine)
            self.num_executions += 1
            try:
                client.runner.accept(f"experts.{peer}", decode(parts, LIMITS)[0])
            except (BadMessageError, WireError):
                self.num_refused += 1
                refused.add(peer)
            else:
                has_changed_values |= has_values
            client.runner.settle()
        for server in sorted(SERVERS):  # each is fenced, and a new incarnation joins
            client.die(server)
            client.join(server)
        client.serve_all()
        if client.failures:  # a step that a server could not compute
            client.runner.roll_back("s@1", 0)
        elif has_changed_values:
            assert [tag.step for tag, _ in client.ends] == [self.num_steps]
        else:
            client.check((self.num_steps,))
        self.num_steps += 1
        self.client = client if not client.failures else Client(client.strict, schemas=schemas_of)
        self.client.ends.clear()

    def _message_of(self, server: int) -> Message:
        """The response to the oldest request of a server, or credits, or a failure; an invented one when there is no request."""
        client, random = self.client, self.random
        if client.requested[server] and random.random() < 0.9:
            request = random.choice(client.requested[server])
            payload = from_message(request)
            y = respond(*payload.tensors, client.strict)
            message = to_message(Payload((y,), payload.header), client.response_edge(server), request.tag)
            if random.random() < 0.02:
                header = FailedHeader("no room", request.decode_header(PartHeader).part)
                return Message(FAILED, message.tag, message.edge, header)
            return message
        if random.random() < 0.3:
            return Message("credit", edge=client.request_edge(server), header=CreditHeader(random.choice((0, 1, 2, 100))))
        tensor = Tensor(TensorSpec("float32", (1, WIDTH)), bytes(4 * WIDTH))
        return Message(
            "data", Tag("s@1", step=self.num_steps), client.response_edge(server), PartHeader(1000 + random.randrange(4)), (tensor,)
        )

    def _mutated(self, message: Message) -> tuple[list[bytearray], bool]:
        """The parts of a message on the wire after some mutations; whether values of its tensors may differ from the genuine ones."""
        random = self.random
        has_values = False
        for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
            message, changes = random.choice(MUTATIONS)(message, random)
            has_values |= changes
        parts = [bytearray(part) for part in encode(message, 0)]
        if random.random() < 0.3:
            for _ in range(random.choice((1, 1, 2, 8))):
                part = random.choice([part for part in parts if part])
                part[random.randrange(len(part))] ^= 1 << random.randrange(8)
            has_values = True
        if random.random() < 0.05:
            part = random.choice([part for part in parts if part])
            del part[random.randrange(len(part)) :]
        return parts, has_values


Mutation = Callable[[Message, Random], tuple[Message, bool]]


def _with(message: Message, **fields: Any) -> Message:
    return msgspec.structs.replace(message, **fields)


def _tag(message: Message, random: Random) -> tuple[Message, bool]:
    tag = message.tag or Tag("s@1")
    name = random.choice(("source", "epoch", "micro_batch", "step", "layer", "none"))
    if name == "none":
        return _with(message, tag=None), False
    value: object = random.choice(("s@1", "s@2", "combine@1", "", "@", "s")) if name == "source" else random.choice(NUMBERS)
    return _with(message, tag=msgspec.structs.replace(tag, **{name: value})), False


def _kind(message: Message, random: Random) -> tuple[Message, bool]:
    return _with(message, kind=random.choice(("data", "credit", FAILED, "", "opening.ready", "x" * 100))), False


def _edge(message: Message, random: Random) -> tuple[Message, bool]:
    return _with(message, edge=random.choice((*NUMBERS, *EDGES))), True  # as the response to another request


def _header(message: Message, random: Random) -> tuple[Message, bool]:
    headers = (None, PartHeader(0), PartHeader(1), PartHeader(-1), CreditHeader(1), CreditHeader(1 << 40), FailedHeader("x", 0))
    return _with(message, header=random.choice(headers)), True


def _tensors(message: Message, random: Random) -> tuple[Message, bool]:
    tensors = list(message.tensors)
    match random.choice(("drop", "double", "shape", "dtype", "nan")):
        case "drop":
            tensors = tensors[:-1]
        case "double":
            tensors = tensors * 2
        case "shape" if tensors:
            shape = random.choice(((), (0,), (1,), (0, WIDTH), (1, WIDTH), (2, WIDTH), (3, WIDTH), (1, WIDTH, 1), (WIDTH, 2)))
            tensors[0] = _zeros(tensors[0].spec.dtype, shape)
        case "dtype" if tensors:
            tensors[0] = _zeros(random.choice(sorted(DTYPE_BYTES)), tensors[0].spec.shape)
        case "nan" if tensors and tensors[0].spec.dtype == "float32":
            spec = tensors[0].spec
            tensors[0] = Tensor(spec, torch.full(spec.shape, torch.nan).numpy())
    return _with(message, tensors=tuple(tensors)), True


def _zeros(dtype: str, shape: tuple[int, ...]) -> Tensor:
    spec = TensorSpec(dtype, shape)
    return Tensor(spec, bytes(spec.nbytes))


MUTATIONS: tuple[Mutation, ...] = (_tag, _kind, _edge, _header, _tensors)
EDGES = [edge.id for edge in Client().graph.edges.values()]


class Branches:
    """The pairs of lines that followed each other in TRACED files."""

    def __init__(self) -> None:
        self.found: set[tuple[object, int, int]] = set()
        self._is_traced: dict[object, bool] = {}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        traced = self._is_traced.get(code)
        if traced is None:
            traced = self._is_traced[code] = code.co_filename.endswith(TRACED)
        if not traced:
            return None
        before, found = -1, self.found

        def trace_line(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal before
            line = frame.f_lineno
            found.add((code, before, line))
            before = line
            return trace_line

        return trace_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    branches, fuzzes = Branches(), [Fuzz(arguments.seed), Fuzz(arguments.seed + 1, strict=True)]
    latest = reported = num_found = 0
    sys.settrace(branches.trace)
    try:
        while (done := sum(fuzz.num_executions for fuzz in fuzzes)) < arguments.executions:
            for fuzz in fuzzes:
                fuzz.step()
            if len(branches.found) > num_found:
                num_found, latest = len(branches.found), done
            if done >= reported + 100_000:
                reported = done
                print(f"{done} executions, {num_found} branches, the latest new one at {latest}", flush=True)
    finally:
        sys.settrace(None)
    refused = sum(fuzz.num_refused for fuzz in fuzzes)
    print(f"{done} executions, {refused} refused, {num_found} branches, the latest new one at {latest}")


if __name__ == "__main__":
    main()
