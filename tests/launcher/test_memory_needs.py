"""The memory that a graph needs, computed before a start: equal to what its files hold, and refused where it cannot fit."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from quantized_checkpoints import SCHEMES, quantize

from flowrt.api.opening import read_graph
from flowrt.errors import GraphError
from flowrt.graph.written import to_yaml
from flowrt.launcher import start_checks
from flowrt.launcher.start_checks import MemoryNeed, find_shortage, memory_needs, needs_text, total_weight_bytes
from flowrt.operators import checkpoint_files
from flowrt.operators.checkpoint_files import read_header
from flowrt.operators.families.registry import read_model_config

TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"
MIB = 1 << 20


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "dbrx"])
def test_the_weights_of_all_processes_are_those_of_the_files(tmp_path: Path, family: str) -> None:
    directory = make_checkpoint(tmp_path / "model", architecture=family, layers=2)
    stored = sum(4 * prod(tensor.shape) for path in directory.glob("*.safetensors") for tensor in read_header(path).values())
    needs = memory_needs(read_graph(directory, ["deploy.experts.servers=3"]))
    assert list(needs) == ["attention.0", "experts.0", "experts.1", "experts.2"]
    assert sum(need.weight_bytes for need in needs.values()) == stored


def test_roles_dtypes_and_pages() -> None:
    settings = ("deploy.attention.groups=2", "deploy.experts.replicas=2", "deploy.experts.servers=2", "limits.kv_pages=10")
    needs = memory_needs(read_graph(TINY, settings))
    half = memory_needs(read_graph(TINY, (*settings, "model.dtype=bfloat16")))
    whole = memory_needs(read_graph(TINY, (*settings, "model.dtype=float32")))
    for process in needs:
        assert (2 * half[process].weight_bytes, 2 * half[process].kv_bytes) == (whole[process].weight_bytes, whole[process].kv_bytes)
    assert needs["experts.0"].shares == needs["experts.1"].shares, "both hold all experts"
    assert total_weight_bytes(needs.values()) == 2 * needs["attention.0"].weight_bytes + needs["experts.0"].weight_bytes
    assert needs["attention.0"].shared_bytes == 0, "groups read their own weights"
    alone = memory_needs(read_graph(TINY, (*settings, "reliability.share_weights=false")))
    assert total_weight_bytes(alone.values()) == sum(need.weight_bytes for need in alone.values())
    assert needs["experts.0"].kv_bytes == 0 < needs["attention.0"].kv_bytes
    assert needs_text(needs).startswith("attention 2 x (")
    assert ", experts 2 x (" in needs_text(needs)


def test_what_cannot_fit_is_one_line_with_a_remedy() -> None:
    graph = read_graph(TINY, ["deploy.attention.groups=2", "limits.kv_pages=100"])
    needs = {f"attention.{number}": MemoryNeed(10 * MIB, 50 * MIB, 10 * MIB, "same") for number in range(2)}
    assert find_shortage(graph, needs, 110 * MIB) is None, "the processes share their weights"
    assert find_shortage(graph, needs, 109 * MIB) == (
        "the graph needs weights of 10.0 MiB and KV pages of 100.0 MiB, and this machine has 109.0 MiB; write limits.kv_pages of at most 99"
    )
    assert find_shortage(graph, needs, 9 * MIB) == (
        "the graph needs weights of 10.0 MiB and KV pages of 100.0 MiB, and this machine has 9.0 MiB; choose a smaller model or dtype, "
        "or place some of its processes on other hosts (docs/hosts.md)"
    )


def test_the_check_before_a_start_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = read_graph(TINY)
    assert start_checks.check_model(graph) == ()
    monkeypatch.setattr(start_checks, "memory_limit_bytes", lambda: MIB)
    with pytest.raises(GraphError, match=r"model\.path: the graph needs weights of .* and this machine has 1\.0 MiB; choose a smaller"):
        start_checks.check_model(graph)


def test_experts_in_8_bits_need_a_quarter_of_float32() -> None:
    settings = ("deploy.experts.servers=2", "model.dtype=float32")
    wide, narrow = (memory_needs(read_graph(TINY, (*settings, f"model.expert_weights={kept}"))) for kept in ("dtype", "int8"))
    config = read_model_config(TINY)
    scales = 4 * (2 * config.expert_width + config.hidden_size) * len(config.moe_layers) * config.num_experts // 2
    assert wide["experts.0"].weight_bytes == 4 * (narrow["experts.0"].weight_bytes - scales)
    assert wide["attention.0"] == narrow["attention.0"]
    least = memory_needs(read_graph(TINY, (*settings, "model.weights=int8")))
    assert least["experts.0"] == wide["experts.0"]
    assert least["attention.0"].weight_bytes < wide["attention.0"].weight_bytes / 2  # the embedding stays


@pytest.mark.parametrize(("scheme", "kept"), [("FP8 by blocks", "fp8"), ("INT8 by rows", "int8"), ("INT4 by groups", "dtype")])
def test_what_is_stored_is_read_with_the_graph(tmp_path: Path, scheme: str, kept: str) -> None:
    plain = quantize(make_checkpoint(tmp_path / "model", layers=2), tmp_path, *SCHEMES[scheme])
    graph = read_graph(tmp_path / "quantized", ["model.expert_weights=as_stored"])
    assert graph.model is not None
    assert graph.model.expert_weights == kept
    assert (f"expert_weights: {kept}" in to_yaml(graph)) == (kept != "dtype")
    plain_graph = read_graph(plain, ["model.expert_weights=as_stored"])
    assert plain_graph.model is not None
    assert plain_graph.model.expert_weights == "dtype"


def test_files_of_weights_are_opened_only_where_their_form_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[Path]()
    monkeypatch.setattr(checkpoint_files, "read_header", lambda path: opened.append(path) or read_header(path))
    read_graph(TINY, ["model.expert_weights=int8"])
    assert not opened
    read_graph(TINY, ["model.expert_weights=as_stored"])
    assert opened


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["model.dtype=float64"], "are computed in float32, not in float64; write dtype"),
        (["deploy.experts.servers=1", "deploy.experts.device=cuda:0"], "processes on cuda:0 keep weights in their dtype; write dtype"),
    ],
)
def test_weights_in_8_bits_that_are_not_possible_are_refused(tmp_path: Path, settings: list[str], text: str) -> None:
    directory = make_checkpoint(tmp_path, layers=2)
    with pytest.raises(GraphError, match=rf"model\.expert_weights.*{text}"):
        start_checks.check_model(read_graph(directory, [*settings, "model.expert_weights=int8"]))


def test_kv_in_8_bits_needs_a_scale_for_each_head(tmp_path: Path) -> None:
    """Two tensors of 2 heads of 16 numbers: 16 bytes and a scale for each, in place of 32 or 64; of transformers it is refused."""
    directory = make_checkpoint(tmp_path, layers=2)
    config, settings = read_model_config(directory), ["deploy.attention.groups=1"]
    wide, narrow = (memory_needs(read_graph(directory, [*settings, f"model.kv_cache={kept}"])) for kept in ("dtype", "int8"))
    per_head = config.head_dim * config.item_bytes, config.head_dim + 4
    assert narrow["attention.0"].kv_bytes * per_head[0] == wide["attention.0"].kv_bytes * per_head[1] > 0
    assert narrow["attention.0"].weight_bytes == wide["attention.0"].weight_bytes


@pytest.mark.parametrize("key", ["kv_cache", "weights"])
def test_models_in_transformers_keep_their_experts_alone_in_8_bits(tmp_path: Path, key: str) -> None:
    directory, settings = make_checkpoint(tmp_path, layers=2), ["model.implementation=transformers", "model.expert_weights=int8"]
    wide, narrow = (memory_needs(read_graph(directory, each)) for each in (settings[:1], settings))
    start_checks.check_model(read_graph(directory, settings))
    assert narrow["experts.0"].weight_bytes < 0.6 * wide["experts.0"].weight_bytes
    with pytest.raises(GraphError, match=rf"model\.{key}.*a model in transformers keeps its .* in the dtype; leave the key out"):
        start_checks.check_model(read_graph(directory, [*settings, f"model.{key}=int8"]))


def test_groups_in_8_bits_may_have_experts_on_another_device(tmp_path: Path) -> None:
    settings = ["deploy.experts.servers=1", "deploy.experts.device=cuda:0", "model.weights=int8"]
    start_checks.check_model(read_graph(make_checkpoint(tmp_path, layers=2), settings))


@pytest.mark.parametrize("kept", ["dtype", "fp8"])
def test_rows_become_integers_for_weights_that_are(tmp_path: Path, kept: str) -> None:
    directory, settings = make_checkpoint(tmp_path, layers=2), ["model.activations=int8"]
    with pytest.raises(GraphError, match=r"model\.activations.*rows become INT8 where weights are INT8, and none are; set"):
        start_checks.check_model(read_graph(directory, [*settings, f"model.expert_weights={kept}"]))
    for key in ("expert_weights", "weights"):
        graph = read_graph(directory, [*settings, f"model.{key}=int8"])
        start_checks.check_model(graph)
        assert "activations: int8" in to_yaml(graph)


def test_rows_that_become_integers_need_whole_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, settings = make_checkpoint(tmp_path, layers=2), ["model.expert_weights=int8", "model.activations=int8"]
    start_checks.check_model(read_graph(directory, settings))
    monkeypatch.setattr(start_checks, "KEPT_COLUMNS", 7)
    with pytest.raises(
        GraphError, match=r"model\.activations.*columns, or so many of one scale, and a multiple of 7 is needed; write dtype"
    ):
        start_checks.check_model(read_graph(directory, settings))


def test_matrices_that_fill_no_panel_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, layers=2, width=44)
    with pytest.raises(GraphError, match="the matrices of experts have 88 rows, and 16 of them or a multiple are needed; write dtype"):
        start_checks.check_model(read_graph(directory, ["model.expert_weights=fp8"]))
