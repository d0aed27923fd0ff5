"""Runs graphs of hostile operators, and kinds of tensors over every transport. `make hostile` runs all; test_hostile_operators.py a part.

    python tests/end_to_end/hostile_runs.py

Each call must end with its value or with one line that names node and edge. Other calls go on, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from end_to_end import hostile_module as hostile  # noqa: E402
from left_processes import left_processes  # noqa: E402

import flowrt  # noqa: E402
from flowrt.transports.registry import unavailable_reason  # noqa: E402

TRANSPORTS = ["inproc", *(scheme for scheme in ("shm", "zmq", "ucx") if unavailable_reason(scheme) is None)]
IN_FLIGHT = 4
ROUNDS = 2  # of each kind: more hostile calls than an edge has credits
HANG_SECONDS = 5.0


class WrongResultError(AssertionError):
    """A call did not end as it must."""


def write_graph(folder: Path, transport: str, operator: str = "act", ports: str = "") -> Path:
    """Two nodes in two workers, whose edge has this transport; `ports`: more keys of node b."""
    top = "processes: one" if transport == "inproc" else f"links: {{a-b: {{transport: {transport}}}}}"
    path = folder / f"{transport}-{operator}.yaml"
    path.write_text(
        f"flowrt: 1\nfolder: {HERE}\n{top}\nlimits: {{in_flight: {IN_FLIGHT}, max_message_bytes: 1048576}}\nnodes:\n"
        f'  a: {{operator: "hostile_module:{operator}", process: a}}\n'
        f'  b: {{operator: "hostile_module:pass_on", process: b{ports}}}\n'
        "edges:\n  input.x -> a.x:\n  a.y -> b.x:\n  b.y -> output.y:\n"
    )
    return path


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[flowrt.RunningGraph, list[str]]]:
    """The running graph, and the lines that its processes write. Checks at the end that nothing is left."""
    lines: list[str] = []
    running = flowrt.open(path, on_line=lambda process, line: lines.append(line), on_event=lambda event: None)
    segments = set(os.listdir("/dev/shm"))
    async with running as graph:
        yield graph, lines
    pids = [pid for pid in running.pids.values() if pid != os.getpid()]
    left = [f"process {pid}" for pid in left_processes(pids)]
    left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - segments if str(os.getpid()) in name]
    if any("Traceback" in line for line in lines):
        left += lines
    if left:
        raise WrongResultError(f"left behind: {', '.join(left)}")


def check_line(error: Exception, kind: str, text: str) -> None:
    line = str(error)
    if not (line.isprintable() and len(line) <= 1000 and text in line and line.startswith(("a failed at step ", "b failed at step "))):
        raise WrongResultError(f"{kind}: {line[:300]!r}, expected {text!r}")
    if "a.y -> b.x" not in line and "fed by input.x -> a.x" not in line:
        raise WrongResultError(f"{kind}: no edge in {line!r}")


def check_equal(found: torch.Tensor, expected: torch.Tensor, kind: str) -> None:
    same = found.dtype == expected.dtype and found.shape == expected.shape
    if not (same and torch.equal(found.detach().resolve_conj().nan_to_num(), expected.resolve_conj().nan_to_num())):
        raise WrongResultError(f"{kind}: gave {found}, expected {expected}")


async def call(graph: flowrt.RunningGraph, kind: str, is_inproc: bool) -> None:
    """One call of this kind, which must end as it must."""
    x = torch.tensor([hostile.KINDS.index(kind), 7])
    if kind in hostile.PASSING:
        found = await graph(x=x)
        if (expected := hostile.PASSING.get(kind, (None, None))[1]) is not None:
            check_equal(found, expected(x), kind)
        return
    text = (hostile.FAILING.get(kind) or hostile.UNSENDABLE[kind])[1]
    try:
        found = await graph(x=x)
    except flowrt.OperatorError as error:
        check_line(error, kind, "" if is_inproc and kind in hostile.UNSENDABLE else text)
    else:
        if not (is_inproc and kind in hostile.UNSENDABLE):
            raise WrongResultError(f"{kind}: gave {found}, expected an error")


async def call_good(graph: flowrt.RunningGraph, number: int) -> None:
    x = torch.tensor([hostile.GOOD, number])
    check_equal(await graph(x=x), x, "a good call")


async def check_kinds(folder: Path, transport: str, kinds: list[str]) -> None:
    """Calls of these kinds, each beside good ones."""
    async with opened(write_graph(folder, transport)) as (graph, _):
        for kind in kinds:
            for _ in range(ROUNDS):
                async with asyncio.timeout(60):
                    hostile_calls = [call(graph, kind, transport == "inproc") for _ in range(IN_FLIGHT // 2)]
                    await asyncio.gather(*hostile_calls, *(call_good(graph, number) for number in range(IN_FLIGHT)))


async def check_declared(folder: Path, transport: str) -> None:
    """Outputs that do not fit what the file declares at the node behind the edge."""
    for operator, text in {"wrong_dtype": "float64[2]", "wrong_shape": "float32[1,2]"}.items():
        path = write_graph(folder, transport, operator, ', inputs: {x: "float32[n]"}')
        async with opened(path) as (graph, _):
            for _ in range(IN_FLIGHT + 1):
                try:
                    await graph(x=torch.ones(2))
                except flowrt.OperatorError as error:
                    if text not in str(error) or not str(error).isprintable():
                        raise WrongResultError(f"{operator}: {error}") from error
                else:
                    raise WrongResultError(f"{operator}: no error")
                check_equal(await graph(x=torch.zeros(2)), torch.zeros(2), operator)


async def check_fatal(folder: Path, transport: str, kind: str) -> None:
    """The death of a process is fatal, in one error. A hang holds its caller until it leaves, and ends when the graph is closed."""
    x = torch.tensor([hostile.KINDS.index(kind), 7])
    try:
        async with opened(write_graph(folder, transport)) as (graph, _):
            await call_good(graph, 1)
            async with asyncio.timeout(HANG_SECONDS if kind == "hang" else 60):
                await graph(x=x)
    except flowrt.WorkerDiedError as error:
        if kind == "hang" or error.process not in ("a", "b") or not str(error).isprintable():
            raise WrongResultError(f"{kind}: {error}") from error
    except TimeoutError as error:
        if kind != "hang":
            raise WrongResultError(f"{kind}: did not end") from error
    else:
        if kind != "closed descriptors":  # a transport may have needed none of them
            raise WrongResultError(f"{kind}: no error")


def tensors() -> dict[str, torch.Tensor]:
    """Kinds of tensors: each passes through a graph, or is refused in one line."""
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn]
    found = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    grid = torch.arange(24.0).reshape(4, 6)
    return found | {
        "no dimension": torch.tensor(1.0),
        "zero rows": torch.zeros(0, 3),
        "transposed": grid.T,
        "strided": grid[::2, 1::3],
        "expanded": torch.ones(1, 3).expand(50, 3),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "eight dimensions": torch.ones([1] * 8),
        "nine dimensions": torch.ones([1] * 9),
        "one megabyte": torch.arange(1 << 18, dtype=torch.int32),
        "requires_grad": torch.nn.Parameter(torch.ones(2)),
        "not a number": torch.tensor([float("nan"), float("-inf")]),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
    }


REFUSED = ("sparse", "meta", "nine dimensions")


async def check_tensors(folder: Path, transport: str) -> None:
    async with opened(write_graph(folder, transport, "pass_on")) as (graph, _):
        for kind, tensor in tensors().items():
            for _ in range(IN_FLIGHT + 1):
                try:
                    async with asyncio.timeout(60):
                        found = await graph(x=tensor)
                except (flowrt.OperatorError, flowrt.UserError) as error:
                    if kind not in REFUSED or not str(error).isprintable():
                        raise WrongResultError(f"{kind}: {error}") from error
                else:
                    if kind not in REFUSED:
                        check_equal(found.float() if "float8" in kind else found, tensor.float() if "float8" in kind else tensor, kind)


def run(name: str, check: Callable[[Path], Any]) -> str | None:
    """Run one check. Returns its failure in one line."""
    threads = threading.active_count()
    with tempfile.TemporaryDirectory() as folder:
        try:
            asyncio.run(check(Path(folder)))
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    return None


def checks() -> dict[str, Callable[[Path], Any]]:
    """Every check, by name."""
    found: dict[str, Callable[[Path], Any]] = {}
    sharing = [kind for kind in [*hostile.FAILING, *hostile.UNSENDABLE, *hostile.PASSING] if kind not in ALONE]
    for transport in TRANSPORTS:
        is_inproc = transport == "inproc"
        kinds = [kind for kind in sharing if not is_inproc or kind not in IN_OWN_PROCESS]
        found[f"{transport}: kinds"] = partial(check_kinds, transport=transport, kinds=kinds)
        found[f"{transport}: declared"] = partial(check_declared, transport=transport)
        found[f"{transport}: tensors"] = partial(check_tensors, transport=transport)
        if not is_inproc:
            found |= {f"{transport}: {kind}": partial(check_kinds, transport=transport, kinds=[kind]) for kind in ALONE}
            found |= {f"{transport}: {kind}": partial(check_fatal, transport=transport, kind=kind) for kind in hostile.FATAL}
    return found


def main() -> int:
    failures = [failure for name, check in checks().items() if (failure := run(name, check)) is not None]
    for failure in failures:
        print(failure, file=sys.stderr)
    num_operators, num_tensors = len(hostile.KINDS) + 2, len(tensors())
    print(f"{num_operators} kinds of operators and {num_tensors} of tensors over {', '.join(TRANSPORTS)}: {len(failures)} checks failed")
    return 1 if failures else 0


ALONE = ("other device", "other defaults")  # change the process of their operator for good
# In the user's own process an operator may stop the loop, or change what the user has set.
IN_OWN_PROCESS = ("KeyboardInterrupt", "thread", "other defaults", "other device", "mutated later")

if __name__ == "__main__":
    sys.exit(main())
