"""Reading checkpoints: exact bytes, one-line errors that name broken files, and no more memory than is kept."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fuse_experts, loading_growth, make_large_checkpoint
from fast_model import FastModel
from safetensors.torch import load_file, save_file

from flowrt.operators import weights
from flowrt.operators.checkpoint_files import INDEX_NAME, check_files
from flowrt.operators.experts import Experts
from flowrt.operators.families.family import Family, Piece, part_shapes, parts_to_read
from flowrt.operators.families.registry import family_named, read_model_config
from flowrt.operators.head import Head
from flowrt.operators.model_config import ModelConfig, ModelError
from flowrt.operators.products import Plain
from flowrt.operators.weights import Checkpoint


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, as the safetensors package reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("name", ["plain", "wide"])  # one file; several files with an index
def test_every_part_equals_what_safetensors_reads(models: Any, name: str) -> None:
    directory = models[name]
    assert (directory / INDEX_NAME).exists() == (name == "wide")
    config, checkpoint, truth = read_model_config(directory), Checkpoint(directory), stored(directory)
    hidden = config.hidden_size
    assert torch.equal(checkpoint.read_part(config, "embedding", (512, hidden)), truth["model.embed_tokens.weight"])
    attention = "model.layers.1.self_attn."
    qkv = torch.cat([truth[f"{attention}{kind}_proj.weight"] for kind in "qkv"])
    assert torch.equal(checkpoint.read_part(config, "qkv", tuple(qkv.shape), layer=1), qkv)
    expert = "model.layers.2.mlp.experts.5."
    gate_up = torch.cat((truth[expert + "gate_proj.weight"], truth[expert + "up_proj.weight"]))
    assert torch.equal(checkpoint.read_part(config, "expert_gate_up", tuple(gate_up.shape), layer=2, expert=5), gate_up)


def test_conversion_in_pieces_equals_conversion_at_once(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, checkpoint = read_model_config(models["plain"]), Checkpoint(models["plain"])
    whole = checkpoint.read_part(config, "head", (512, 64))
    monkeypatch.setattr(weights, "SCRATCH_BYTES", 7 * 64 * 4 + 1)
    for dtype in ("bfloat16", "float16", "float64"):
        assert torch.equal(checkpoint.read_part(config.with_dtype(dtype), "head", (512, 64)), whole.to(getattr(torch, dtype)))


def test_fused_rows_and_transposed_tensors(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ways in which families store experts: all in one tensor, by index or as equal shares of the rows, transposed."""
    config, truth = read_model_config(models["plain"]), stored(models["plain"])
    prefix = "model.layers.0.mlp.experts."
    down = torch.stack([truth[f"{prefix}{expert}.down_proj.weight"] for expert in range(8)])  # [E, H, F]
    save_file({"by_index": down.contiguous(), "by_rows": down.transpose(1, 2).reshape(-1, 64).contiguous()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for piece in (Piece("by_index", expert="index"), Piece("by_rows", expert="rows", transpose=True)):
        family = Family("qwen3_moe", lambda _: config, {"expert_down": ((piece,),)})
        monkeypatch.setattr(weights, "family_named", lambda _, family=family: family)
        for expert in (0, 5, 7):
            assert torch.equal(checkpoint.read_part(config, "expert_down", (64, 48), expert=expert), down[expert])
    with pytest.raises(ModelError, match=r"by_rows .* is not that of 7 experts"):
        checkpoint.read_part(replace(config, num_experts=7), "expert_down", (64, 48))


def test_servers_hold_the_requested_experts(models: Any, tmp_path: Path) -> None:
    config = read_model_config(models["plain"])
    for directory in (models["plain"], fuse_experts(models["plain"], tmp_path / "fused")):
        experts = Experts(config, Checkpoint(directory), {0: (6, 1), 2: (3,)})
        for layer, expert in ((0, 6), (0, 1), (2, 3)):
            pair = torch.zeros(1, dtype=torch.int64), torch.tensor([expert])
            assert experts.forward_pairs(layer, torch.ones(1, 64), *pair).shape == (1, 64)
        with pytest.raises(ValueError, match=r"experts \[2\] were requested but are not held here; held are \[1, 6\]"):
            experts.forward_pairs(0, torch.ones(1, 64), torch.zeros(1, dtype=torch.int64), torch.tensor([2]))
    for held in ({0: (8,)}, {0: (1, 1)}, {3: (0,)}):
        with pytest.raises(ValueError, match="cannot be held"):
            Experts(config, Checkpoint(models["plain"]), held)


def test_tied_weights_are_shared(models: Any) -> None:
    from flowrt.operators.embedding import Embedding

    config, checkpoint = read_model_config(models["mixed"]), Checkpoint(models["mixed"])
    embedding = Embedding(config, checkpoint)
    shared = Head(config, checkpoint, embedding=embedding).product
    assert isinstance(shared, Plain)
    assert shared.weight_NK is embedding.weight_VH
    x_TH = torch.randn(3, config.hidden_size)
    torch.testing.assert_close(Head(config, checkpoint).product(x_TH), shared(x_TH))


def refusal(config: ModelConfig, directory: Path, part: str, *shape: int) -> str:
    with pytest.raises(ModelError) as error:
        Checkpoint(directory).read_part(config, part, shape)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "name",
    ["plain", "mixed", "mixtral", "deepseek_v3", "deepseek_v3 yarn", "deepseek_v3 other", "deepseek_v2", "deepseek_v2 limited", "dbrx"],
)
def test_the_check_of_files_names_the_parts_that_operators_read(models: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read, shapes = dict[str, set[int]](), dict[str, tuple[int, ...]]()
    read_part = Checkpoint.read_part

    def record(
        checkpoint: Checkpoint, config: ModelConfig, part: str, shape: tuple[int, ...], *, layer: int = 0, **place: Any
    ) -> torch.Tensor:
        read.setdefault(part, set()).add(layer)
        shapes[part] = tuple(shape)
        return read_part(checkpoint, config, part, shape, layer=layer, **place)

    monkeypatch.setattr(Checkpoint, "read_part", record)
    config = FastModel(models[name]).config
    assert read == {part: set(layers) for part, layers in parts_to_read(config).items()}
    assert shapes == {part: part_shapes(config)[part] for part in shapes}
    assert check_files(models[name]) == ()


def test_missing_and_ill_fitting_tensors_are_named(models: Any, tmp_path: Path) -> None:
    config = read_model_config(models["plain"])
    assert "no *.safetensors file" in refusal(config, tmp_path, "head", 512, 64)
    file = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.zeros(511, 64), "model.norm.weight": torch.zeros(64, dtype=torch.int8)}, file)
    assert refusal(config, tmp_path, "embedding", 512, 64) == (
        f"tensor model.embed_tokens.weight (embedding) is missing from {file}; copy the model's files again, or correct config.json"
    )
    assert refusal(config, tmp_path, "head", 512, 64) == f"lm_head.weight in {tmp_path} have 511 rows; config.json requires 512"
    assert f"lm_head.weight in {file} has shape [511, 64], which does not fit the [500, 64]" in refusal(config, tmp_path, "head", 500, 64)
    assert f"lm_head.weight in {file} has shape [511, 64], which does not fit" in refusal(config, tmp_path, "head", 511, 32)
    assert "model.norm.weight in" in refusal(config, tmp_path, "final_norm", 64)
    assert "is stored as I8, and has no scales (model.norm.weight_scale); copy" in refusal(config, tmp_path, "final_norm", 64)
    assert "does not define the tensors of part 'eyes'" in refusal(config, tmp_path, "eyes", 1)
    file.rename(tmp_path / "some.safetensors")
    save_file({"lm_head.weight": torch.zeros(512, 64)}, tmp_path / "more.safetensors")
    assert "tensor lm_head.weight is in more.safetensors and some.safetensors" in refusal(config, tmp_path, "head", 512, 64)


@pytest.mark.parametrize("name", ["plain", "wide"])
def test_weights_that_are_not_finite_are_named(models: Any, tmp_path: Path, name: str) -> None:
    """Those of experts are found when they are used, and a row of a token that does not exist may hold anything."""
    config = FastModel(models[name]).config
    found = family_named(config.family)
    for part, layers in parts_to_read(config).items():
        tensors, layer = stored(models[name]), max(layers, default=0)
        piece = found.find_layout(part, layer, 0, tensors, "")[0].tensor(layer, 0)
        tensors[piece].view(-1)[-1] = torch.inf if part == "gate" else torch.nan
        save_file(tensors, tmp_path / "model.safetensors")
        checkpoint, shape = Checkpoint(tmp_path), part_shapes(config)[part]
        if part in weights.UNCHECKED_PARTS:
            checkpoint.read_part(config, part, shape, layer=layer)
            continue
        with pytest.raises(ModelError, match=f"model.safetensors: .*{piece}.* has values that are not finite in") as raised:
            checkpoint.read_part(config, part, shape, layer=layer)
        assert "\n" not in str(raised.value)


def test_weights_that_are_too_large_for_the_dtype_are_named(models: Any, tmp_path: Path) -> None:
    config = read_model_config(models["plain"], "float16")
    tensors = stored(models["plain"])
    tensors["model.norm.weight"] = torch.full((64,), 1e6)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.norm.weight has values that are not finite in float16; .* or take a wider model.dtype"):
        Checkpoint(tmp_path).read_part(config, "final_norm", (64,))


def test_broken_files_are_named(models: Any, tmp_path: Path) -> None:
    config, file = read_model_config(models["plain"]), tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.zeros(512, 64)}, file)
    good = file.read_bytes()
    for bytes_left, sentence in ((4, "was cut off"), (30, "was cut off"), (len(good) - 1, "do not fit its shape or the file")):
        file.write_bytes(good[:bytes_left])
        message = refusal(config, tmp_path, "head", 512, 64)
        assert str(file) in message
        assert sentence in message
    file.write_bytes((10).to_bytes(8, "little") + b"not json!!" + good)
    assert "its header is not a JSON object" in refusal(config, tmp_path, "head", 512, 64)
    outside = {"dtype": "F32", "shape": [512, 64], "data_offsets": [-4, 131068]}
    for entry in (outside, {"dtype": "F32"}, outside | {"data_offsets": [0, 8]}, outside | {"shape": 512}):
        header = json.dumps({"lm_head.weight": entry}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(131072))
        assert "tensor lm_head.weight" in refusal(config, tmp_path, "head", 512, 64)
    file = file.rename(tmp_path / "part.safetensors")
    file.write_bytes(good)
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    assert "the name of a file beside the index is needed" in refusal(config, tmp_path, "head", 512, 64)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
    assert "names gone.safetensors, which is not there; copy" in refusal(config, tmp_path, "head", 512, 64)
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "part.safetensors"}}))
    assert "model.embed_tokens.weight is missing from" in refusal(config, tmp_path, "embedding", 512, 64)
    index.write_text("{}")
    assert "weight_map: is missing or empty" in refusal(config, tmp_path, "head", 512, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_memory_than_is_held(large: Path, dtype: str) -> None:
    """An expert server with two thirds of 302 MB of experts: its memory, at the end and at its peak, grows by 1.2x that at most."""
    held = 4 * 11 * 3 * 768 * 512 * (4 if dtype == "float32" else 2)  # 4 layers, 11 of 16 experts
    assert all(0.95 * held < growth < 1.2 * held for growth in loading_growth(str(large), dtype, most=1.2 * held))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_large_checkpoint(tmp_path_factory.mktemp("large"))
    assert sum(path.stat().st_size for path in directory.glob("model-layer-*.safetensors")) > 300e6
    return directory


def _raw(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize("file_name", ["model.safetensors", INDEX_NAME, "config.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["fifo", "device", "deep"])
def test_files_that_would_block_or_never_end_are_refused(models: Any, tmp_path: Path, file_name: str, kind: str) -> None:
    """Neither a pipe, nor a device, nor JSON that is nested without end: one line, at once."""
    for path in models["plain"].iterdir():
        if path.name != file_name:
            (tmp_path / path.name).symlink_to(path)
    bad = tmp_path / file_name
    if kind == "fifo":
        os.mkfifo(bad)
    elif kind == "device":
        bad.symlink_to("/dev/zero")
    else:
        deep = "[" * 100_000
        bad.write_bytes(_raw(f'{{"one": {deep}') if file_name == "model.safetensors" else deep.encode())
    text = "is nested too deeply" if kind == "deep" else "is not a regular file"
    reader = read_model_config if "config" in file_name else Checkpoint
    with pytest.raises(ModelError, match=f"{file_name}.*{text}") as caught:
        reader(tmp_path)
    assert "\n" not in str(caught.value)


def test_json_beyond_the_bound_is_not_read(models: Any, tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ModelError, match="at most 67108864 are supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("shape", [[1] * 9, [0, (1 << 40) + 1], [0, 10**4000], [1.0], [True], [-1], "1", {}])
def test_stored_shapes_are_bounded_before_sizes_are_multiplied(tmp_path: Path, shape: object) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    (tmp_path / "model.safetensors").write_bytes(_raw(json.dumps({"one": entry})))
    with pytest.raises(ModelError, match="tensor one: its shape and data_offsets must be lists of at most 8 dimensions, and whole numbers"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("entry", ['{"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}', '{"dtype": "F32", "shape": [1]}'])
def test_a_wrong_header_entry_is_named(tmp_path: Path, entry: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(_raw(f'{{"one": {entry}}}'))
    with pytest.raises(ModelError, match="tensor one: "):
        Checkpoint(tmp_path)
