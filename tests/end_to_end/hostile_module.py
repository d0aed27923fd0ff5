"""Operators of a hostile user, by kind. The graphs of hostile_runs.py import this module; `act` chooses the kind by its input."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


class BaseTrouble(BaseException):
    """Not an Exception."""


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NumberTextError(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


def raises(error: BaseException) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        raise error.with_traceback(None)

    return run


def recurse(x: torch.Tensor) -> Any:
    return recurse(x)


def generate(x: torch.Tensor) -> Any:
    yield x


async def wait(x: torch.Tensor) -> torch.Tensor:
    return x


def wait_unawaited(x: torch.Tensor) -> Any:
    coroutine = wait(x)
    coroutine.close()  # otherwise Python warns that it was never awaited
    return coroutine


def print_much(x: torch.Tensor) -> torch.Tensor:
    print("output of an operator\r\x1b[2J")
    return x


def start_thread(x: torch.Tensor) -> torch.Tensor:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return x


def change_defaults(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return x


def change_device(x: torch.Tensor) -> torch.Tensor:
    torch.set_default_device("meta")
    return x


def write_into(x: torch.Tensor) -> torch.Tensor:
    return x.zero_()


_kept: list[torch.Tensor] = []


def overwrite() -> None:
    with torch.inference_mode():  # it is a tensor of inference mode
        _kept.pop().fill_(-1)


def write_later(x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    _kept.append(result)
    threading.Timer(0.01, overwrite).start()
    return result[:1]


def close_descriptors(x: torch.Tensor) -> torch.Tensor:
    os.closerange(3, 4096)
    return x


def hang(x: torch.Tensor) -> torch.Tensor:
    time.sleep(10_000)
    return x


def leave(x: torch.Tensor) -> torch.Tensor:
    os._exit(5)


LONG = "ten megabytes " * (10 << 20 >> 4) + "\n"


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError("no function")


# The call raises OperatorError, whose text contains the second entry.
FAILING: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "text of many lines": (raises(ValueError("first\nsecond\r\nthird")), "ValueError: first second third"),
    "control characters": (raises(ValueError("\x1b[31m\x00\x07\u202e\ud800")), r"ValueError: \x1b[31m\x00\x07\u202e\ud800"),
    "text of ten megabytes": (raises(ValueError(LONG)), "ValueError: ten megabytes ten megabytes"),
    "BaseException": (raises(BaseTrouble("base")), "BaseTrouble: base"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt("mine")), "KeyboardInterrupt: mine"),
    "SystemExit": (raises(SystemExit(3)), "SystemExit: 3"),
    "StopIteration": (raises(StopIteration("over")), "StopIteration: over"),
    "GeneratorExit": (raises(GeneratorExit("out")), "GeneratorExit: out"),
    "CancelledError": (raises(asyncio.CancelledError("mine")), "CancelledError: mine"),
    "MemoryError": (raises(MemoryError()), "MemoryError"),
    "RecursionError": (recurse, "RecursionError: maximum recursion depth"),
    "no text": (raises(UnspeakableError()), "UnspeakableError: its text cannot be shown, str() raises RuntimeError"),
    "text that is a number": (raises(NumberTextError()), "NumberTextError: its text cannot be shown, str() raises TypeError"),
    "exception group": (raises(ExceptionGroup("two", [ValueError("a"), KeyError("b")])), "ExceptionGroup: two (2 sub-exceptions)"),
    "None": (lambda x: None, "a gave nothing for its output y"),
    "int": (lambda x: 3, "a gave int for its outputs y"),
    "str": (lambda x: "rows\n", "a gave str for its outputs y"),
    "numpy array": (lambda x: x.numpy().copy(), "a gave ndarray for its outputs y"),
    "list": (lambda x: [1, 2, 3], "a gave 3 values for its outputs y"),
    "list of one int": (lambda x: [1], "a gave int as 'y'"),
    "dict of int": (lambda x: {"y": 1}, "a gave int as 'y'"),
    "dict of another port": (lambda x: {"no\nport": x}, "a gave Tensor as 'no\\nport'"),
    "wrong count": (lambda x: (x, x), "a gave 2 values for its outputs y"),
    "generator": (generate, "a gave generator for its outputs y"),
    "coroutine": (wait_unawaited, "a gave coroutine for its outputs y"),
    "exception as a value": (lambda x: ValueError("returned"), "a gave ValueError for its outputs y"),
    "too large": (lambda x: torch.zeros(1 << 19), "a message on a.y -> b.x cannot be sent: it has 2097152 bytes"),
    "expanded to terabytes": (lambda x: torch.zeros(1).expand(1 << 40), "cannot be sent: it has 4398046511104 bytes"),
    "hostile subclass": (lambda x: x.as_subclass(HostileTensor), "a message on a.y -> b.x cannot be sent: no function"),
    "torch error": (lambda x: x.reshape(7, 7, 7), "RuntimeError: shape"),
}

# Between two processes the call raises OperatorError; within one, such a tensor passes by reference.
UNSENDABLE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "meta tensor": (lambda x: torch.empty(3, device="meta"), "a message on a.y -> b.x cannot be sent"),
    "sparse tensor": (lambda x: torch.eye(3).to_sparse(), "a message on a.y -> b.x cannot be sent: a torch.sparse_coo tensor"),
    "sparse CSR tensor": (lambda x: torch.eye(3).to_sparse_csr(), "a message on a.y -> b.x cannot be sent: a torch.sparse_csr tensor"),
    "quantized tensor": (lambda x: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "cannot travel"),
}

# The call returns this; None: whatever the race gives.
PASSING: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], torch.Tensor] | None]] = {
    "input itself": (lambda x: x, lambda x: x),
    "view of the input": (lambda x: x[:1], lambda x: x[:1]),
    "non-contiguous": (lambda x: torch.arange(12).reshape(3, 4).T[:, ::2], lambda x: torch.arange(12).reshape(3, 4).T[:, ::2]),
    "expanded": (lambda x: torch.ones(1).expand(1000, 3), lambda x: torch.ones(1000, 3)),
    "zero huge rows": (lambda x: torch.zeros(0, 1 << 62), lambda x: torch.zeros(0, 1 << 62)),
    "zero rows": (lambda x: torch.zeros(0, 4), lambda x: torch.zeros(0, 4)),
    "no dimension": (lambda x: torch.tensor(3.0), lambda x: torch.tensor(3.0)),
    "complex": (lambda x: torch.tensor([1 + 2j]).conj(), lambda x: torch.tensor([1 - 2j])),
    "requires_grad": (lambda x: torch.nn.Parameter(torch.ones(3)), lambda x: torch.ones(3)),
    "not a number": (lambda x: torch.tensor([float("nan"), float("inf")]), lambda x: torch.tensor([float("nan"), float("inf")])),
    "mutated input": (write_into, torch.zeros_like),
    "mutated later": (write_later, None),
    "prints": (print_much, lambda x: x),
    "thread": (start_thread, lambda x: x),
    "other defaults": (change_defaults, lambda x: x),
    "other device": (change_device, lambda x: x),
}

# The process dies, or does not return: the run ends, or the caller does not wait any longer.
FATAL: dict[str, Callable[[torch.Tensor], Any]] = {"os._exit": leave, "closed descriptors": close_descriptors, "hang": hang}

KINDS = [*FAILING, *UNSENDABLE, *PASSING, *FATAL]
GOOD = len(KINDS)


def act(x: torch.Tensor) -> Any:
    number = int(x[0])
    if number == GOOD:
        return x
    kind = KINDS[number]
    found: Any = FAILING.get(kind) or UNSENDABLE.get(kind) or PASSING.get(kind) or (FATAL.get(kind),)
    return found[0](x)


def pass_on(x: torch.Tensor) -> torch.Tensor:
    return x


def wrong_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x[0] else x


def wrong_shape(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, -1) if x[0] else x


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("first\nsecond")


def drop_zero(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"y": x} if x.any() else {}


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right
