"""What `flowrt graph validate` and the start find before any worker loads: weight files, tokenizer, devices, modules of operators."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli.conftest import flowrt_here, refusal
from safetensors.torch import load_file, save_file

import flowrt
from flowrt.errors import GraphError
from flowrt.graph.file import load_graph
from flowrt.launcher import events, start_checks
from flowrt.launcher.run import Run
from flowrt.launcher.start_check_process import check_start
from flowrt.launcher.transport_choice import choose_transports
from flowrt.workers.start_check import check_process

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-moe"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
LEFT_OUT = "model.layers.1.mlp.experts.3.up_proj.weight"
USER_GRAPH = """\
flowrt: 1
nodes:
  first: {operator: "validated_ops:plain", process: left}
  second:
    operator: OPERATOR
    process: right
edges:
  input.x -> first.x:
  first.y -> second.x:
  second.y -> output.y:
"""
OPERATORS = """\
print("imported")


def plain(x):
    return x


async def coroutine(x):
    return x


def generator(x):
    yield x


class Callable:
    async def __call__(self, x):
        return x


instance = Callable()
number = 3
"""


def validate(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return flowrt_here("graph", "validate", *words)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "g.yaml").write_text("flowrt: 1\nmodel: {path: model}\nprompts:\n  - a prompt\n")
    return tmp_path / "model"


def _weights(model: Path) -> Path:
    return next(iter(sorted(model.glob("*.safetensors"))))


def _cut_off(model: Path) -> None:
    path = _weights(model)
    path.write_bytes(path.read_bytes()[:-1])


def _without_weights(model: Path) -> None:
    _weights(model).unlink()


def _write_index(model: Path, tensor: str = "a", file: str = "model-00002-of-00002.safetensors") -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {tensor: file}}))


def _index_of_a_missing_file(model: Path) -> None:
    _weights(model).rename(model / "model-00001-of-00002.safetensors")
    _write_index(model)


def _index_of_a_missing_tensor(model: Path) -> None:
    _write_index(model, "none", _weights(model).name)


def _without_a_tensor(model: Path) -> None:
    tensors = load_file(_weights(model))
    del tensors[LEFT_OUT]
    save_file(tensors, _weights(model))


def _another_dtype(model: Path) -> None:
    tensors = load_file(_weights(model))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, _weights(model))


def _another_shape(model: Path) -> None:
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"moe_intermediate_size": 2}))


def _without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("implementation", "damage", "text"),
    [
        ("native", _cut_off, "copy the file again"),
        ("native", _without_weights, "holds no *.safetensors file"),
        ("native", _index_of_a_missing_file, "names model-00002-of-00002.safetensors, which is not there; copy"),
        ("native", _index_of_a_missing_tensor, "tensor none is missing from"),
        ("native", _without_a_tensor, "{tensor} (expert_gate_up) is missing from {model}/model.safetensors; copy"),
        ("native", _another_dtype, "model.norm.weight in {model}/model.safetensors is stored as I8"),
        ("native", _another_shape, "which does not fit the [4, "),
        ("native", _without_tokenizer, "has no tokenizer.json, which texts need"),
        # the library says which tensors its module needs, by their shapes alone
        ("transformers", _without_a_tensor, "is missing from the weights (1 are)"),
        ("transformers", _another_dtype, "model.norm.weight in {model}/model.safetensors is stored as I8"),
        ("transformers", _another_shape, ", and config.json requires ["),
    ],
)
def test_validate_finds_damaged_files_of_a_model(implementation: str, damage: Callable[[Path], None], text: str, model: Path) -> None:
    graph = model.parent / "g.yaml"
    graph.write_text(f"flowrt: 1\nmodel: {{path: model, implementation: {implementation}}}\nprompts:\n  - a prompt\n")
    assert validate(graph).returncode == 0
    damage(model)
    error = refusal(validate(graph))
    assert error.startswith(f"flowrt: error: {graph}:{'3: prompts' if damage is _without_tokenizer else '2: model.path'}: ")
    assert text.format(model=model, tensor=f"tensor {LEFT_OUT}") in error


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("tokenizer.json", "{", "/tokenizer.json is not a readable tokenizer: "),
        ("tokenizer_config.json", '{"eos_token": ', "/tokenizer_config.json is not valid JSON"),
    ],
)
def test_validate_reads_the_files_of_the_tokenizer(name: str, content: str, text: str, model: Path) -> None:
    (model / name).write_text(content)
    assert f"{model}{text}" in refusal(validate(model))


@pytest.mark.parametrize(("damage", "text"), [(_cut_off, "copy the file again"), (_another_dtype, "I8"), (_another_shape, "not fit")])
async def test_a_run_finds_damaged_weights_before_any_process_starts(damage, text: str, model: Path) -> None:
    damage(model)
    started: list[object] = []
    with pytest.raises(GraphError, match=rf"g\.yaml:2: model\.path: .*{text}"):
        flowrt.open(model.parent / "g.yaml", on_event=started.append)
    assert started == []


def test_files_that_are_not_read_are_a_warning(model: Path) -> None:
    _write_index(model)
    done = validate(model)
    assert done.stderr == (
        f"flowrt: warning: {model}/model.safetensors is read, and the files that model.safetensors.index.json names are not: "
        "remove those of the other model\n"
    )
    assert (done.returncode, done.stdout.startswith(f"{model}: valid; ")) == (0, True)


@pytest.mark.parametrize("name", ["tiktoken.model", "tekken.json", "tokenizer.model"])
def test_a_tokenizer_of_another_format_gets_the_command_that_converts_it(name: str, model: Path) -> None:
    (model / "tokenizer.json").rename(model / name)
    done = validate(model)
    assert done.returncode == 0, "it serves token ids"
    warning, error = done.stderr, refusal(validate(model.parent / "g.yaml"))  # which has prompts
    text = f"{model} has no tokenizer.json, which texts need; {name} is converted by: pip install transformers "
    assert warning.startswith(f"flowrt: warning: {text}")
    assert error.startswith(f"flowrt: error: {model.parent}/g.yaml:3: prompts: {text}")
    for line in (warning, error):
        assert f"'{model}'" in line.partition('python -c "')[2]
    with pytest.raises(flowrt.TokenizerError, match=f"{name} is converted by: pip install"):
        flowrt.open(model).require_tokenizer()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}", "the chat template of {model} failed: "),
        ("{{ messages | nosuchfilter }}", "the chat template of {model} failed: No filter named 'nosuchfilter'"),
        ("{{ messages is nosuchtest }}", "the chat template of {model} failed: No test named 'nosuchtest'"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_a_warning(template: str, text: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(template)
    done = validate(model)
    assert done.returncode == 0
    assert done.stderr.startswith(f"flowrt: warning: {text.format(model=model)}")


def test_nothing_of_a_template_is_run_to_check_it(model: Path) -> None:
    """Compiling computes constants; this one would take all memory."""
    (model / "chat_template.jinja").write_text('{% set x = "a" * 10**12 %}{{ x if y is defined else (x | nosuchfilter) }}')
    done = validate(model)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_of_the_cache_of_the_hub_names_its_snapshot(model: Path) -> None:
    root = model.parent / "models--us--tiny"
    (root / "snapshots").mkdir(parents=True)
    model.rename(root / "snapshots" / "abc")
    (model.parent / "g.yaml").write_text("flowrt: 1\nmodel: {path: models--us--tiny}\n")
    for words in ((root,), (model.parent / "g.yaml",), (model.parent / "g.yaml", "--model", root)):
        assert f"is a folder of the hub's cache; give its snapshot {root}/snapshots/abc\n" in refusal(validate(*words))
    assert validate(root / "snapshots" / "abc").returncode == 0


async def test_a_warning_on_the_model_comes_before_any_process_starts(model: Path) -> None:
    _write_index(model)
    found: list[events.Event] = []
    async with flowrt.open(model, overrides=["deploy.processes=one"], on_event=found.append):
        pass
    first, *others = found
    assert isinstance(first, events.ModelNotice)
    assert not any(isinstance(event, events.ModelNotice) and event.is_warning for event in others)
    assert (events.news(first) or "").startswith(f"warning: {model}/model.safetensors is read")


@pytest.fixture
def user_graph(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a graph with an operator, and the modules of operators."""
    (tmp_path / "validated_ops.py").write_text(OPERATORS)
    (tmp_path / "raising_ops.py").write_text('raise ValueError("two\\nlines")')
    (tmp_path / "exiting_ops.py").write_text("raise SystemExit(0)")

    def write(operator: str) -> Path:
        (tmp_path / "g.yaml").write_text(USER_GRAPH.replace("OPERATOR", operator))
        return tmp_path / "g.yaml"

    return write


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("validated_ops:plain", ""),
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("validated_ops:nothing", "has no function 'nothing'"),
        ("validated_ops:number", "has no function 'number'"),
        ("validated_ops:coroutine", "is a coroutine function (async def)"),
        ("validated_ops:instance", "is a coroutine function (async def)"),
        ("validated_ops:generator", "is a generator"),
        ("validated_ops:Callable", "is a class; an operator is a plain function"),
        ("raising_ops:f", "importing 'raising_ops' failed: ValueError: two lines"),
        ("exiting_ops:f", "importing 'exiting_ops' failed: SystemExit: 0"),
    ],
)
def test_operators_that_cannot_run_are_found(
    operator: str, text: str, user_graph: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; `validate` has a process for that."""
    path = user_graph(operator)
    monkeypatch.syspath_prepend(path.parent)
    graph = load_graph(path)
    error = ""
    try:
        for process in graph.process_names():
            check_process(graph, process)
    except GraphError as found:
        error = str(found)
    finally:
        for name in ("validated_ops", "raising_ops", "exiting_ops"):
            sys.modules.pop(name, None)
    assert text in error
    assert error.startswith(f"{path}:5: nodes.second.operator: " if text else "")
    assert bool(error) == bool(text)
    assert "\n" not in error


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("validated_ops:plain", ""),
        ("validated_ops:coroutine", "is a coroutine function (async def)"),
        ("exiting_ops:f", "importing 'exiting_ops' failed: SystemExit: 0"),
    ],
)
def test_validate_finds_operators_that_cannot_run(
    operator: str, text: str, user_graph: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    graph = user_graph(operator)
    done = validate(graph)
    assert capfd.readouterr() == ("", ""), "what a module prints is not shown"
    if not text:
        assert (done.returncode, done.stdout.startswith(f"{graph}: valid; ")) == (0, True)
        return
    assert text in refusal(done)
    assert done.stderr.startswith(f"flowrt: error: {graph}:5: nodes.second.operator: ")
    assert "validated_ops" not in sys.modules


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_module_that_ends_its_process_does_not_make_the_graph_valid(tmp_path: Path) -> None:
    (tmp_path / "ends_the_process.py").write_text("import os\nos._exit(0)\n")
    graph = tmp_path / "g.yaml"
    nodes = "nodes: {a: {operator: 'ends_the_process:f', process: p}}\n"
    graph.write_text(f"flowrt: 1\n{nodes}edges: {{input.x -> a.x: , a.y -> output.y: }}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        error = refusal(validate(graph))
    assert error == "flowrt: error: the process that imports the operators ended with status 0: no output\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    override = "deploy.experts.device=cuda"
    error = refusal(validate(QUICKSTART, "--set", override))
    assert error.startswith(f"flowrt: error: --set {override}: deploy.experts.device: ")
    assert error.endswith(", or write cpu\n")
    monkeypatch.setattr(Run, "__aenter__", None)  # nothing starts
    for command in ("run", "serve", "up", "chat"):
        assert refusal(flowrt_here(command, QUICKSTART, "--set", override)) == error
    with pytest.raises(GraphError, match=r"deploy\.experts\.device: "):
        flowrt.open(QUICKSTART, overrides=[override])


def test_devices_of_other_hosts_are_not_checked_here(model: Path) -> None:
    graph = flowrt.api.read_graph(model)
    check_start(graph.replace(process_hosts={"experts.1": "host.1"}, devices={"experts.1": "cuda:999"}))


def test_an_error_about_a_transport_names_the_override_that_chose_it(model: Path) -> None:
    text = "flowrt: 1\nmodel: {path: model}\ndeploy:\n  experts: {servers: 2}\n  links:\n    attention-experts: {transport: zmq}\n"
    (model.parent / "g.yaml").write_text(text)
    override = "deploy.links.attention-experts.transport=shm"
    for overrides, place in (((override,), f"--set {override}"), ((), f"{model.parent / 'g.yaml'}:6")):
        graph = flowrt.api.read_graph(model.parent / "g.yaml", overrides)
        with pytest.raises(GraphError) as caught:
            choose_transports(graph, lambda scheme: "no compiler")
        assert str(caught.value).startswith(f"{place}: deploy.links.attention-experts.transport: transport ")


def test_an_error_about_a_transport_names_the_line_of_its_link(tmp_path: Path) -> None:
    links = "links:\n  right-left: {transport: shm}\n"
    (tmp_path / "g.yaml").write_text(USER_GRAPH.replace("OPERATOR", "validated_ops:plain") + links)
    with pytest.raises(GraphError, match=r"g\.yaml:12: links\.right-left\.transport: transport shm cannot be used here"):
        choose_transports(load_graph(tmp_path / "g.yaml"), lambda scheme: "no compiler" if scheme == "shm" else None)


def test_hosts_of_a_ray_cluster_need_ray_before_anything_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "find_spec", lambda name: None)
    graph = model.parent / "hosts.yaml"
    graph.write_text("flowrt: 1\nmodel: {path: model}\nhosts: {engine: ray, count: 2}\n")
    expected = f"{graph}:3: hosts.engine: ray is not installed: pip install -e "
    for command in (("graph", "validate"), ("run",), ("serve",), ("doctor", "--hosts")):
        more = ("--prompt", "x") if command == ("run",) else ()
        assert refusal(flowrt_here(*command, graph, *more)).startswith(f"flowrt: error: {expected}"), command
    with pytest.raises(GraphError, match=r"hosts\.engine: ray is not installed"):
        flowrt.open(graph)
    assert validate(graph, "--set", "hosts.engine=local").returncode == 0
    assert "--set needs --graph FILE or --hosts FILE" in refusal(flowrt_here("doctor", "--set", "hosts.count=3"))
