"""Graphs of a user's own operators: the examples, loops, gathers, and what goes wrong in one line."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served_models import Served

import flowrt

EXAMPLES = Path(__file__).parents[2] / "examples"

OPERATORS = """
from __future__ import annotations
import torch
from served_models import Served

def double(x: "float32[rows,4]") -> "float32[rows,4]":
    return 2 * x

def fail_below_zero(x):
    if x.sum() < 0:
        raise RuntimeError("this one\\nalways fails")
    return x

def wrong(x: "float32[rows,4]") -> "float32[rows,4]":
    return x[:, :2]

def step(x):
    return x + 1

def cut(x):
    return {"count": torch.tensor(len(x) % 3), "a": x if len(x) % 3 > 0 else None, "b": x if len(x) % 3 > 1 else None}

def some(x):
    count = len(x) % 3
    given = {"count": torch.tensor(count)}
    if count > 0:
        given["a"] = x
    if count > 1:
        given["b"] = x * 10
    return given

def total(parts, count):
    return torch.stack([part.sum() for part in parts]).sum().reshape(1) if parts else torch.zeros(1)

def spread(x):
    return torch.zeros(1 << 20)

def write_into(x):
    return x.add_(1)

class Counter:
    def __init__(self):
        self.seen = 0

    def __call__(self, x):
        self.seen += 1
        return x + self.seen

count_up = Counter()
"""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with operators under a module name of this test's own: modules stay imported in this process."""
    (tmp_path / f"{module_of(tmp_path)}.py").write_text(OPERATORS)
    return tmp_path


def module_of(folder: Path) -> str:
    return f"ops_{abs(hash(str(folder)))}"


def write(folder: Path, nodes: str, edges: str, top: str = "processes: one") -> Path:
    text = f"flowrt: 1\n{top}\nnodes:\n{nodes}\nedges:\n{edges}\n".replace("ops:", f"{module_of(folder)}:")
    path = folder / "graph.yaml"
    path.write_text(text)
    return path


LINE = "  input.x -> a.x:\n  a.y -> output.y:"
LOOP = (
    "  a: {operator: ops:step, process: p}\n  b: {operator: ops:step, process: q}",
    "  input.x -> a.x:\n  a.y -> b.x:\n  b.y -> a.x: {layers: 0-8, tag: layer+1}\n  b.y -> output.y: {layers: 9}",
)


@pytest.mark.parametrize("script", ["two_actors/run.py", "moe_layer/run.py", "three_transports.py"])
def test_the_examples_run(script: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / script], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "False" not in done.stdout
    if "moe_layer" in script:
        assert all(float(line.split()[-1]) < 1e-5 for line in done.stdout.splitlines())
    else:
        assert "True" in done.stdout


def test_the_small_model_from_python() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "small_model.py"], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, *sums = done.stdout.splitlines()
    assert first == " 632   (stop)"
    for line in sums:
        question, answer = line.removeprefix("What is ").split("?")
        assert sum(map(int, question.split(" + "))) == int(answer)
    assert len(sums) == 8


async def test_a_stream_keeps_order_and_bound(folder: Path) -> None:
    graph = write(folder, "  a: {operator: ops:double, process: p}", LINE, "processes: one\nlimits: {in_flight: 3}")
    inputs = [torch.full((1 + number % 3, 4), float(number)) for number in range(20)]
    async with flowrt.open(graph) as running:
        outputs = [out async for out in running.stream(inputs)]
        assert all(torch.equal(out, 2 * x) for out, x in zip(outputs, inputs, strict=True))
        async for _ in running.stream(inputs):
            break  # leaving early leaves nothing behind, and the graph goes on
        assert torch.equal(await running(x=inputs[1]), 2 * inputs[1])


async def test_a_loop_over_layers(folder: Path) -> None:
    """Ten rounds between two processes: the tag's layer counts them, an edge leaves at the last."""
    async with flowrt.open(write(folder, *LOOP)) as running:
        outputs = [out async for out in running.stream([torch.tensor([float(number)]) for number in range(6)])]
    assert [out.item() for out in outputs] == [number + 20.0 for number in range(6)]


async def test_a_gather_takes_the_number_on_its_count_port(folder: Path) -> None:
    nodes = (
        "  cut: {operator: ops:some, process: p}\n"
        "  left: {operator: ops:step, process: q}\n"
        "  right: {operator: ops:step, process: r}\n"
        "  total: {operator: ops:total, process: p, inputs: {parts: {takes: gather, count: count}, count: 'int64[]'}}"
    )
    edges = (
        "  input.x -> cut.x:\n"
        "  cut.a -> left.x:\n"
        "  cut.b -> right.x:\n"
        "  cut.count -> total.count:\n"
        "  left.y -> total.parts:\n"
        "  right.y -> total.parts:\n"
        "  total.y -> output.y:"
    )
    async with flowrt.open(write(folder, nodes, edges)) as running:
        outputs = [out async for out in running.stream([torch.ones(rows) for rows in range(1, 7)])]
    assert [out.item() for out in outputs] == [2.0, 4.0 + 22.0, 0.0, 8.0, 10.0 + 55.0, 0.0]


async def test_a_stateful_node_fires_in_step_order(folder: Path) -> None:
    nodes = "  a: {operator: ops:count_up, process: p, stateful: true}"
    async with flowrt.open(write(folder, nodes, LINE)) as running:
        outputs = [out async for out in running.stream([torch.zeros(1)] * 5)]
    assert [out.item() for out in outputs] == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("processes", ["one", "many"])
async def test_an_operator_that_raises_ends_its_call_by_name(folder: Path, processes: str) -> None:
    graph = write(folder, "  a: {operator: ops:fail_below_zero, process: worker}", LINE, f"processes: {processes}")
    lines: list[str] = []
    async with flowrt.open(graph, on_line=lambda process, line: lines.append(line)) as running:
        for step in (0, 2):
            with pytest.raises(flowrt.OperatorError) as caught:
                await running(x=-torch.ones(1))
            cause = rf"{module_of(folder)}\.py:\d+: RuntimeError: this one always fails"
            assert re.fullmatch(rf"a failed at step {step}, layer 0, fed by input\.x -> a\.x: {cause}", str(caught.value))
            assert caught.value.node == "a"
            assert (await running(x=torch.ones(1))).item() == 1.0
    assert lines == []


async def test_an_output_that_breaks_its_spec_is_named(folder: Path) -> None:
    graph = write(folder, "  a: {operator: ops:wrong, process: p}", LINE)
    async with flowrt.open(graph, on_line=lambda process, line: None) as running:
        with pytest.raises(flowrt.OperatorError, match=r"output a\.y is float32\[3,2\]; float32\[rows,4\] is declared"):
            await running(x=torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ("operator: no_such_module:f", "cannot import 'no_such_module'"),
        ("operator: ops:nothing", r"has no function 'nothing', 'ops.*' was loaded from .*ops.*\.py; it has .*double"),
        ("operator: json.layers:f", r"cannot import 'json\.layers' .*'json' was loaded from .*json.__init__\.py"),
        ("operator: ops:total", "takes parts, count, the graph feeds x"),
        ('operator: ops:double, inputs: {x: "float32[rows,5]"}', r"float32\[rows,5\] in the graph file and float32\[rows,4\]"),
    ],
)
async def test_missing_operator_or_another_spec_is_a_user_error(folder: Path, node: str, text: str) -> None:
    graph = write(folder, f"  a: {{{node}, process: p}}", LINE)
    with pytest.raises(flowrt.UserError, match=text):
        async with flowrt.open(graph, on_line=lambda process, line: None):
            pass


async def test_wrong_inputs_are_refused_and_the_graph_goes_on(folder: Path) -> None:
    graph = write(folder, "  a: {operator: ops:step, process: p}", LINE)
    async with flowrt.open(graph) as running:
        with pytest.raises(flowrt.UserError, match="takes x; got y"):
            await running(y=torch.zeros(1))
        with pytest.raises(flowrt.UserError, match=r"a torch\.Tensor is needed"):
            await running(x=[1.0])
        with pytest.raises(flowrt.UserError, match="serves no model"):
            await running.submit("text")
        assert (await running(x=torch.zeros(1))).item() == 1.0


@pytest.mark.parametrize(
    ("more", "limits", "shape", "text"),
    [
        (', inputs: {x: "float32[rows,4]"}', "", (2, 3), r"input x is float32\[2,3\]; float32\[rows,4\] is declared"),
        ("", "\nlimits: {max_message_bytes: 1048576}", (1 << 18, 4), "input x has 4194304 bytes; limits.max_message_bytes is 1048576"),
    ],
    ids=["spec of the file", "larger than a message"],
)
async def test_an_input_that_does_not_fit_is_refused_in_the_call(
    folder: Path, more: str, limits: str, shape: tuple[int, int], text: str
) -> None:
    graph = write(folder, f"  a: {{operator: ops:double, process: p{more}}}", LINE, f"processes: one{limits}")
    async with flowrt.open(graph) as running:
        with pytest.raises(flowrt.UserError, match=text):
            await running(x=torch.zeros(shape))
        assert torch.equal(await running(x=torch.ones(2, 4)), torch.full((2, 4), 2.0))


async def test_a_message_too_large_between_nodes_ends_its_call_by_name(folder: Path) -> None:
    nodes = "  a: {operator: ops:spread, process: p}\n  b: {operator: ops:step, process: q}"
    edges = "  input.x -> a.x:\n  a.y -> b.x:\n  b.y -> output.y:"
    graph = write(folder, nodes, edges, "processes: one\nlimits: {max_message_bytes: 1048576}")
    async with flowrt.open(graph, on_line=lambda process, line: None) as running:
        for _ in range(20):  # more than the edge has credits
            with pytest.raises(flowrt.OperatorError, match=r"a failed at .*a\.y -> b\.x cannot be sent: it has 4194304 bytes"):
                await running(x=torch.zeros(1))


async def test_cancelled_call_keeps_its_credit_until_its_tag_completes(folder: Path) -> None:
    """A loop between two workers has credits for limits.in_flight tags: a cancelled call's tag is still one of them."""
    async with flowrt.open(write(folder, *LOOP, "processes: one\nlimits: {in_flight: 2}")) as running:
        for _ in range(12):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0005):
                    await running(x=torch.zeros(1))
        async with asyncio.timeout(30):
            assert (await running(x=torch.zeros(1))).item() == 20.0


async def test_operator_cannot_write_to_the_callers_tensors(folder: Path) -> None:
    """An operator that writes into its input does not reach the caller's memory; what comes out is an ordinary tensor."""
    graph = write(folder, "  a: {operator: ops:write_into, process: p}", LINE)
    x = torch.zeros(3, requires_grad=True)
    async with flowrt.open(graph) as running:
        out = await running(x=x)
    assert x.sum().item() == 0.0
    assert out.tolist() == [1.0, 1.0, 1.0]
    out.requires_grad_()


BAD_OPERATORS = """
import asyncio
import sys

def nothing(x):
    return None

def cancelled(x):
    raise asyncio.CancelledError("mine")

def leaving(x):
    sys.exit("gone")
"""


async def call_all(graph: Path, inputs: list[torch.Tensor]) -> None:
    async with asyncio.timeout(30), flowrt.open(graph, on_line=lambda process, line: None) as running:
        for x in inputs:
            await running(x=x)


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("nothing", "a gave nothing for its output y; return a dict without the port to send nothing"),
        ("cancelled", "a failed at step 0, layer 0, fed by input.x -> a.x: .*: CancelledError: mine"),
        ("leaving", "a failed at step 0, layer 0, fed by input.x -> a.x: .*: SystemExit: gone"),
    ],
)
@pytest.mark.parametrize("short", [False, True])
async def test_operator_that_returns_nothing_or_cancels_does_not_hang(folder: Path, operator: str, text: str, short: bool) -> None:
    """Whether it runs in the compute thread or, once its label is known to be short, on the loop."""
    (folder / f"{module_of(folder)}.py").write_text(OPERATORS + BAD_OPERATORS.replace("(x):\n", "(x):\n    if x[0] > 0: return x\n"))
    graph = write(folder, f"  a: {{operator: ops:{operator}, process: p}}", LINE)
    with pytest.raises(flowrt.OperatorError, match=text.replace("step 0", r"step \d+")):
        await call_all(graph, [torch.ones(1)] * (5 if short else 0) + [torch.zeros(1)])


async def test_node_without_consumers_may_return_none(folder: Path) -> None:
    (folder / f"{module_of(folder)}.py").write_text(OPERATORS + BAD_OPERATORS)
    nodes = "  a: {operator: ops:step, process: p}\n  log: {operator: ops:nothing, process: p}"
    edges = "  input.x -> a.x:\n  a.y -> output.y:\n  a.y -> log.x:"
    async with flowrt.open(write(folder, nodes, edges)) as running:
        assert (await running(x=torch.zeros(1))).item() == 1.0


@pytest.mark.parametrize("processes", ["one", "many"])
async def test_user_error_is_one_line_without_traceback(folder: Path, processes: str, capfd: pytest.CaptureFixture[str]) -> None:
    graph = write(folder, "  a: {operator: no_such_module:f, process: p}", LINE, f"processes: {processes}")
    lines: list[str] = []
    with pytest.raises(flowrt.UserError, match="cannot import 'no_such_module'"):
        async with flowrt.open(graph, on_line=lambda process, line: lines.append(line)):
            pass
    assert lines == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("processes", ["one", "many"])
@pytest.mark.parametrize("fault", ["truncated", "index"])
async def test_a_broken_checkpoint_is_one_line_without_traceback(
    served: Served, tmp_path: Path, processes: str, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every process that reads the checkpoint fails at about the same time; none prints a traceback."""
    model = tmp_path / "model"
    model.mkdir()
    for path in served.directory.iterdir():
        (model / path.name).symlink_to(path)
    if fault == "truncated":
        weights = model / "model.safetensors"
        whole = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(whole[: len(whole) // 2])
    else:
        (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x"}}')
    graph = Served(model, [], []).write(tmp_path, {"experts": {"servers": 2}, "processes": processes})
    lines: list[str] = []
    with pytest.raises(flowrt.UserError, match=r"model\.safetensors") as caught:
        async with flowrt.open(graph, on_line=lambda process, line: lines.append(line)):
            pass
    gc.collect()  # a future whose exception was never read reports it when it is freed
    assert "\n" not in str(caught.value)
    assert [line for line in lines if "Traceback" in line or "never retrieved" in line] == []
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
