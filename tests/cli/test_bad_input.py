"""Bad input: one line on standard error, exit code 2, nothing started, no traceback. The command is called in this process."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from cli.conftest import ROOT, flowrt_here, refusal
from rich.console import Console

from flowrt.cli.app import app


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("flowrt.launcher.launcher.Launcher.__aenter__", refuse)


def adapter_folder(directory: Path) -> Path:
    """A folder as PEFT writes it."""
    folder = directory / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_bad_input_is_one_line_and_exit_code_2(model: Path, graph_file: Path, tmp_path: Path) -> None:
    (tmp_path / "graph.yaml").touch()
    empty = tmp_path / "empty.yaml"
    empty.write_text(graph_file.read_text().replace("prompts:", "#").replace("path: ", f"path: {graph_file.parent}/"))
    own = tmp_path / "own.yaml"
    own.write_text(
        "flowrt: 1\nnodes:\n  double: {operator: my_ops:double, process: p, inputs: {x: 'float32[4]'}, outputs: {y: 'float32[4]'}}\n"
        "edges:\n  input.x -> double.x:\n  double.y -> output.y:\n"
    )
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": "a"}\n{"prompt": }\n')
    without_tokenizer = shutil.copytree(model, tmp_path / "texts", ignore=shutil.ignore_patterns("tokenizer*"))
    adapter = adapter_folder(tmp_path)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt_token_ids": [1]}\n{"prompt": "a"}\n')
    for words, text in (
        ((without_tokenizer, "--prompt", "a"), "texts has no tokenizer.json, which texts need; add the file, or give token ids"),
        ((graph_file, "--prompt", "a", "--chat"), "has no chat template"),
        ((graph_file, "--prompt", "a", "--chat-template-kwargs", "{}"), "--chat-template-kwargs needs --chat"),
        (
            (graph_file, "--prompt", "a", "--chat", "--chat-template-kwargs", "[1]"),
            "--chat-template-kwargs is '[1]', it must be a JSON object",
        ),
        ((graph_file, "--prompt", "a", "--chat", "--chat-template-kwargs", '{"tools": []}'), "chat_template_kwargs.tools is not a name of"),
        ((without_tokenizer, "--prompts", lines), "texts has no tokenizer.json"),
        ((tmp_path, "--prompt", "a"), "did you mean"),
        ((graph_file, "--set", "limits.kv_pages=200000000"), "write 16777216 or less"),
        ((), "a graph file or model directory is missing; give its path, or"),
        ((graph_file, graph_file), "unexpected"),
        ((graph_file, "--bogus"), "Unknown option: --bogus"),
        ((graph_file, "--max-num-seqs", "8"), "no option --max-num-seqs; this is a key of the graph: --set limits.max_num_seqs=VALUE"),
        (
            (graph_file, "--tensor-parallel-size", "2"),
            "no option --tensor-parallel-size: tensor parallelism is not built yet; leave it out",
        ),
        ((graph_file, "--tensor_parallel_size=2"), "no option --tensor_parallel_size: tensor parallelism is not built yet; leave it out"),
        ((graph_file, "-tp", "2"), "no option -tp: tensor parallelism is not built yet; leave it out"),
        ((graph_file, "--speculative-config", "{}"), "speculative decoding is not built yet; leave it out"),
        ((graph_file, "--set", "speculative.method=ngram"), "speculative decoding is not built yet; leave speculative out"),
        ((graph_file, "--set", "model.quantization=fp8"), "weights in 8 bits are model.weights and model.expert_weights, int8 or fp8"),
        (("--model", "x"), "give its path without --model, or"),
        ((graph_file, "--prompt"), "requires an argument"),
        ((graph_file, "--max-tokens", "many"), "--max-tokens"),
        ((graph_file, "--max-tokens", "0"), "--max-tokens is 0, it must be"),
        ((graph_file, "--top-p", "1.5"), "--top-p is 1.5, it must be"),
        ((graph_file, "--log-level", "loud"), "--log-level"),
        ((graph_file, "--seed", "1", "--seed", "2"), "--seed"),
        ((graph_file, "--prompts", wrong), f"{wrong}:2: is not JSON"),
        ((graph_file, "--prompts", tmp_path / "none"), "none: no such file"),
        ((graph_file, "--chaos", "kill"), "--chaos kill: not of the form KIND:PROCESS@TIME"),
        ((graph_file, "--chaos", "kill:experts.0@1s"), "workers share processes"),
        ((graph_file, "--json", "--chat"), "--json is followed by --chat"),
        ((graph_file, "--json", tmp_path), "is a folder"),
        ((graph_file, "--json", tmp_path / "no" / "x.json"), "there is no folder"),
        ((graph_file, "--json", tmp_path / ("x" * 5000)), "File name too long"),
        ((graph_file, "--json", tmp_path / ("x" * 250)), "File name too long"),
        ((graph_file, "--model", "x" * 5000), "File name too long"),
        ((graph_file, "--set", f"model.path={'x' * 5000}"), "model.path"),
        ((graph_file, "--set", "model.path=~nosuchuser/x"), "model.path: '~nosuchuser/x': Could not determine home directory"),
        ((graph_file, "--set", "prompts=~nosuchuser/x"), "prompts: '~nosuchuser/x'"),
        ((graph_file, "--set", "prompts=/proc/self/mem"), "prompts: /proc/self/mem cannot be read"),
        ((graph_file, "--set", "deploy.attention.groups=0"), "--set deploy.attention.groups=0: deploy.attention.groups"),
        ((graph_file, "--set", "deploy.experts.replicas=9"), "deploy.experts.replicas"),
        ((graph_file, "--model", tmp_path), f"--model {tmp_path}"),
        ((adapter,), "holds an adapter (adapter_config.json), not a model; merge it"),
        ((graph_file, "--model", adapter), "holds an adapter (adapter_config.json), not a model; merge it"),
        ((tmp_path / "none.yaml",), "none.yaml: no such file"),
        ((empty,), "there is no prompt; give --prompt"),
        ((own,), "serves no model"),
    ):
        assert text in refusal(flowrt_here("run", *words)), words
    refusal(flowrt_here("walk"))
    assert "\x1b" not in refusal(flowrt_here("run", "\x1b[2J\nx.yaml"))


def test_what_cannot_be_measured_is_refused_before_it_is(graph_file: Path, tmp_path: Path) -> None:
    adapter = adapter_folder(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    for line, text in (
        ("bench hop --pairs 0", "--pairs"),
        ("bench hop --pairs x", "--pairs"),
        (f"bench hop --json {tmp_path}/no/x.json", "there is no folder"),
        ("bench transports --plot x.txt", "--plot x.txt: unknown format"),
        (f"bench transports --plot {tmp_path}/no/x.svg", "there is no folder"),
        ("bench m2n --bytes -1", "--bytes"),
        ("bench links --dilation 0", "--dilation"),
        ("bench sweep", "name a sweep file"),
        ("bench sweep no.yaml", "no.yaml: no such file"),
        ("bench links --rounds 0", "--rounds"),
        (f"bench start {graph_file} --runs 0", "--runs"),
        (f"bench start {graph_file} --model /nope", "/nope does not exist"),
        ("bench detector --workers 0", "--workers"),
        ("bench detector --seconds -1", "--seconds"),
        (f"bench decode /nope --graph {graph_file}", "/nope does not exist"),
        (f"bench decode {empty} --graph {graph_file}", "model_type: is None"),
        (f"bench decode {empty} --graph {graph_file} --batch 1 0", "--batch"),
        (f"bench decode {empty} --graph {graph_file} --new-tokens 0", "--new-tokens"),
        ("bench operators /nope", "/nope does not exist"),
        ("bench operators --rows 4 0", "--rows"),
        ("bench operators --layers 0", "--layers"),
        ("bench operators --threads -1", "--threads"),
        ("bench operators --top-k 99", "--top-k is 99, more than --experts"),
        (f"bench strict {empty}", "model_type: is None"),
        ("bench nosuch", "flowrt bench --help lists the commands"),
        ("bench machine /nope", "unknown device '/nope'"),
        ("bench machine h20", "give a card of flowrt profile"),
        ("bench machine h20 --shapes 31", "--shapes"),
        (f"profile --out {tmp_path}/no/x.yaml", "--out"),
        ("profile --threads 0", "--threads"),
        (f"profile --threads 100000 --out {tmp_path}/x.yaml", "cores that flowrt may use; give"),
        ("profile --dtype float8", "--dtype"),
        (f"profile --hosts /nope.yaml --out {tmp_path}/x.yaml", "/nope.yaml"),
        ("doctor --model /nope", "--model /nope: "),
        (f"doctor --model {empty}", "model_type: is None"),
        (f"models {adapter}", "holds an adapter (adapter_config.json), not a model; merge it"),
        (f"doctor --model {adapter}", "holds an adapter (adapter_config.json), not a model; merge it"),
        ("doctor x", "unexpected 'x'; see --help"),
        ("doctor --dtype float32", "--dtype needs --model DIR"),
        ("doctor --graph /nope.yaml", "/nope.yaml: no such file"),
        ("graph show", "a graph file or model directory is missing"),
        (f"graph show {graph_file} --svg {tmp_path}/no/x.svg", "--svg"),
        ("graph nosuch", "nosuch"),
    ):
        assert text in refusal(flowrt_here(*line.split())), line


def test_the_error_of_decode_without_transformers_names_the_remedy(monkeypatch: pytest.MonkeyPatch, graph_file: Path, model: Path) -> None:
    monkeypatch.setattr("flowrt.cli.bench.find_spec", lambda name: None)
    assert "pip install transformers" in refusal(flowrt_here("bench", "decode", model, "--graph", graph_file))


def test_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch, graph_file: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working directory has been deleted" in refusal(flowrt_here("run", graph_file, "--set", "prompts=none.txt"))
    assert flowrt_here("graph", "validate", graph_file).returncode == 0
    refusal(flowrt_here("run", graph_file, "--json", "x.json"))


def test_version_and_help() -> None:
    assert flowrt_here("--version").stdout == "flowrt 0.1.0\n"
    out = flowrt_here("run", "--help").stdout
    for option in (
        *("--prompt", "--prompts", "--max-tokens", "--temperature", "--top-p", "--top-k", "--seed", "--chat"),
        *("--model", "--set", "--json", "--log-level"),
    ):
        assert f"{option} " in out


@pytest.mark.parametrize(
    "words",
    ["run", "demo", "chaos", "simulate", "doctor", "graph show", "graph validate", "check transport", "bench decode", "bench operators"],
)
def test_help_breaks_no_line_early_and_shows_defaults_as_they_are_typed(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_console", Console(width=60))
    done = flowrt_here(*words.split(), "--help")
    out = done.stdout
    assert done.returncode == 0
    assert max(map(len, out.splitlines())) <= 60
    assert not re.search(r"default:\s+(\(|False)", re.sub(r"[│\s]+", " ", out))
    text = out[: out.index("╭")].rstrip().splitlines()
    for line, after in pairwise(text):
        assert not line or not after or len(f"{line.rstrip()} {after.split()[0]}") > 59, (line, after)


def test_a_chaos_run_that_cannot_be_measured_is_refused_before_it_starts(graph_file: Path, tmp_path: Path) -> None:
    quickstart = ROOT / "examples" / "quickstart.yaml"
    plan = tmp_path / "plan.yaml"
    plan.write_text("scenario: 1\nfaults:\n  - {fault: crash, process: experts.9}\n")
    for words, text in (
        ((quickstart,), "either --plan FILE or --kills N is needed"),
        ((quickstart, "--kills", "1", "--plan", plan), "either --plan FILE or --kills N is needed"),
        ((quickstart, "--kills", "-1"), 'Invalid value "-1" for --kills. Must be >= 0'),
        ((quickstart, "--kills", "100001"), 'Invalid value "100001" for --kills. Must be <= 100000'),
        ((quickstart, "--kills", "1", "--roles", "servers"), "--roles servers: unknown here; one of: all, attention, experts, monitor"),
        ((quickstart, "--kills", "1", "--fault", "murder"), "--fault murder: unknown here; one of: all, kill, pause, stall, hang"),
        ((quickstart, "--kills", "1", "--phase", "noon"), "--phase noon: unknown here; one of: all, start, prefill"),
        ((quickstart, "--kills", "1", "--pairs", "0"), 'Invalid value "0" for --pairs'),
        ((quickstart, "--kills", "1", "--seconds", "inf"), 'Invalid value "inf" for --seconds'),
        ((quickstart, "--kills", "1", "--requests", "0"), 'Invalid value "0" for --requests'),
        ((quickstart, "--kills", "1", "--new-tokens", "1000"), "a sequence has room for 512"),
        (
            (quickstart, "--kills", "1", "--new-tokens", "100", "--set", "limits.max_tokens=20"),
            "limits.max_tokens is 20 and each answer is to have 100 tokens",
        ),
        ((quickstart, "--kills", "1", "--set", "reliability.recovery=off"), "none to kill"),
        ((quickstart, "--plan", plan), f"{plan}:3: faults.0: no process is called 'experts.9'"),
        ((quickstart, "--plan", tmp_path / "none.yaml"), "no such file"),
        ((quickstart, "--kills", "1", "--json", "no/such.json"), "there is no folder"),
        ((graph_file, "--kills", "1"), "workers share processes"),
    ):
        assert text in refusal(flowrt_here("chaos", *words)), words
