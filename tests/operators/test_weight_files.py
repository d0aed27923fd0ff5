"""The check of a model's weight files before anything starts: which files are read, and one line on each that cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_truth, make_checkpoint
from safetensors.torch import load_file, save_file

from flowrt.operators.checkpoint_files import INDEX_NAME, WHOLE_NAME, check_files
from flowrt.operators.families.quantization import SCHEMES
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelError
from flowrt.operators.weights import Checkpoint


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as error:
        check_files(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def embedding(directory: Path) -> torch.Tensor:
    config = read_model_config(directory)
    return Checkpoint(directory).read_part(config, "embedding", (config.vocab_size, config.hidden_size), dtype=torch.float32)


@pytest.fixture
def two(models: Any, tmp_path: Path) -> Path:
    """A folder with the index and shards of one model, and model.safetensors of another one of the same shapes."""
    directory = tmp_path / "two"
    shutil.copytree(models["wide"], directory)
    load_truth(directory).save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / WHOLE_NAME)
    tensors["model.embed_tokens.weight"] += 1
    save_file(tensors, directory / WHOLE_NAME, metadata={"format": "pt"})
    return directory


def test_a_whole_file_is_read_in_place_of_an_index_as_in_transformers(two: Path) -> None:
    assert torch.equal(embedding(two), load_truth(two).get_input_embeddings().weight)
    (note,) = check_files(two)
    assert note == f"{two / WHOLE_NAME} is read, and the files that {INDEX_NAME} names are not: remove those of the other model"
    for shard in two.glob("model-*.safetensors"):  # what save_pretrained leaves of a model that had shards
        shard.unlink()
    assert torch.equal(embedding(two), load_truth(two).get_input_embeddings().weight)
    assert check_files(two) == (note,)


def test_an_index_that_names_the_whole_file_is_read(models: Any, tmp_path: Path) -> None:
    directory = tmp_path / "both"
    shutil.copytree(models["plain"], directory)
    tensors = load_file(directory / WHOLE_NAME)
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, directory / "head.safetensors")
    save_file(tensors, directory / WHOLE_NAME)
    index = dict.fromkeys(tensors, WHOLE_NAME) | {"lm_head.weight": "head.safetensors"}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    assert check_files(directory) == ()
    (directory / WHOLE_NAME).unlink()
    assert refusal(directory) == (
        f"{directory / INDEX_NAME} names model.safetensors, which is not there (1 of 2 files are missing); copy the model's files again"
    )


def test_files_beside_a_whole_one_are_not_read(models: Any, tmp_path: Path) -> None:
    directory = tmp_path / "beside"
    shutil.copytree(models["plain"], directory)
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, directory / "consolidated.safetensors")
    assert check_files(directory) == ()


KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "another float": (lambda weight: weight.to(torch.float8_e4m3fn), "is stored as F8_E4M3, and has no scales"),
    "whole numbers": (lambda weight: weight.to(torch.int8), "is stored as I8, and has no scales"),
    "fewer rows": (lambda weight: weight[:-1].contiguous(), "rows; config.json requires"),
    "fewer columns": (lambda weight: weight[..., :-1].contiguous(), "does not fit the"),
    "a dimension more": (lambda weight: weight[None].contiguous(), "does not fit the"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tensor", ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight", "model.layers.2.mlp.experts.7.down_proj.weight"]
)
def test_a_tensor_of_another_dtype_or_shape_is_found_in_the_header(models: Any, tmp_path: Path, tensor: str, kind: str) -> None:
    shutil.copy(models["plain"] / "config.json", tmp_path)
    tensors = load_file(models["plain"] / WHOLE_NAME)
    change, text = KINDS[kind]
    save_file(tensors | {tensor: change(tensors[tensor])}, tmp_path / WHOLE_NAME)
    assert text in (found := refusal(tmp_path))
    assert tensor in found


def test_tensors_that_nothing_reads_are_noted(tmp_path: Path) -> None:
    """Those of layers beyond the config, and a bias that it does not have; not what follows from it, and no further predictions."""
    file = make_checkpoint(tmp_path, layers=2) / "model.safetensors"
    assert not any("has no use for" in note for note in check_files(tmp_path))
    known = load_file(file)
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.mlp.weight", "model.layers.0.self_attn.q_proj.input_scale"):
        save_file(known | {name: torch.ones(1)}, file)
        assert not any("has no use for" in note for note in check_files(tmp_path))
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.gate.weight"):
        save_file(known | {name: torch.ones(1)}, file)
        assert check_files(tmp_path)[-1] == f"{tmp_path}: 1 tensors that config.json has no use for are not read, such as {name}"


def test_a_pointer_of_git_lfs_is_named(models: Any, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
    for name in (WHOLE_NAME, "config.json"):
        shutil.copytree(models["plain"], tmp_path / name)
        (tmp_path / name / name).write_bytes(pointer)
        expected = f"{tmp_path / name / name} is a Git LFS pointer, not the file itself; run git lfs pull in its folder"
        assert refusal(tmp_path / name) == expected


def scheme_names(directory: Path, tensors: dict[str, torch.Tensor], suffixes: dict[str, torch.Tensor], keeps: bool = True) -> None:
    """Write the tensors with `suffixes` in place of (or beside, `keeps`) the weight of each projection."""
    found = dict[str, torch.Tensor]()
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            found |= {name.removesuffix(".weight") + suffix: value.clone() for suffix, value in suffixes.items()}
            found |= {name: weight.to(torch.float8_e4m3fn)} if keeps else {}
        else:
            found[name] = weight
    save_file(found, directory / WHOLE_NAME)


WHOLE, ONE = torch.zeros(2, 2, dtype=torch.int32), torch.ones(1)
TENSORS: dict[str, tuple[dict[str, torch.Tensor], bool]] = {
    "GPTQ": ({".qweight": WHOLE, ".qzeros": WHOLE, ".scales": ONE}, False),
    "ModelOpt": ({".weight_scale": ONE, ".weight_scale_2": ONE, ".input_scale": ONE}, True),
    "bitsandbytes": ({".weight.absmax": ONE, ".weight.quant_state.bitsandbytes__nf4": ONE}, True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_scheme_is_known_by_its_tensors_alone(models: Any, tmp_path: Path, name: str) -> None:
    shutil.copy(models["plain"] / "config.json", tmp_path)
    scheme_names(tmp_path, load_file(models["plain"] / WHOLE_NAME), *TENSORS[name])
    assert f": the weights are {name}, which flowrt does not load; give the folder of the model in bfloat16" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", [method for scheme in SCHEMES for method in scheme.methods] + ["quip", None])
def test_a_scheme_is_known_by_its_method(models: Any, tmp_path: Path, method: str | None, key: str) -> None:
    shutil.copytree(models["plain"], tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: {"quant_method": method, "bits": 4}}))
    name = next((scheme.name for scheme in SCHEMES if method in scheme.methods), f"quantized (quant_method {str(method)!r})")
    assert refusal(tmp_path).startswith(f"{config}: {key}: the weights are {name}, which flowrt does not load; give the folder")


@pytest.mark.parametrize("name", [scheme.file for scheme in SCHEMES if scheme.file])
def test_a_scheme_is_known_by_its_file(models: Any, tmp_path: Path, name: str) -> None:
    shutil.copytree(models["plain"], tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("{}")
    assert refusal(tmp_path).startswith(f"{tmp_path / name}: the weights are ")
