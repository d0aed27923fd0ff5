"""Keys of config.json that are null, absent or contradict each other: what transformers makes of them, or one line that refuses them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_truth, make_checkpoint, random_prompts, truth_logits
from fast_model import FastModel

from flowrt.operators.families.config_file import ConfigFile
from flowrt.operators.families.registry import find_family, read_model_config
from flowrt.operators.model_config import ModelConfig, ModelError

FAMILIES = ("qwen3_moe", "qwen3_next", "mixtral", "deepseek_v3", "deepseek_v2", "dbrx")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.1,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
}
PROMPT = random_prompts([40], seed=9)[0]
# Keys of transformers' classes that change no token of an inference, or that are computed from others.
NO_TOKENS = {"attention_dropout", "attn_pdrop", "base_config_key", "emb_pdrop", "initializer_range", "moe_jitter_eps", "moe_loss_weight"}
NO_TOKENS |= {"num_mtp_layers", "output_router_logits", "pad_token_id", "pretraining_tp", "resid_pdrop", "router_aux_loss_coef"}
NO_TOKENS |= {"router_jitter_noise", "use_cache", "rope_parameters", "ffn_config.hidden_size"}
LATENT = {"num_key_value_heads", "head_dim"}  # of the latent families: not used


OTHER_VARIANT: dict[str, dict[str, Any]] = {  # in which more keys are read
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 16, "mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0], "layer_types": None},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A small checkpoint of each family, with the keys of YaRN where it has them."""
    root, found = tmp_path_factory.mktemp("keys"), {}
    for family in FAMILIES:
        scaled = {} if family == "dbrx" else {"rope_parameters": dict(YARN)}
        found[family] = make_checkpoint(root / family, architecture=family, layers=2, seed=5, max_positions=64, config=scaled)
    return found


def changed(folder: Path, directory: Path, values: Mapping[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name != "config.json" and not (directory / path.name).exists():
            (directory / path.name).symlink_to(path)
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def truth_config(directory: Path) -> dict[str, Any] | None:
    """What transformers reads; None: it refuses."""
    import transformers

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = transformers.AutoConfig.from_pretrained(directory).to_dict()
    except Exception:  # its errors have no common class
        return None
    return {key: value for key, value in read.items() if key != "dtype"}  # the truth is loaded in float32


def truth(directory: Path) -> torch.Tensor | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return truth_logits(load_truth(directory), PROMPT)
    except Exception:
        return None


_known_logits: dict[tuple[Path, ModelConfig], torch.Tensor] = {}


def own_logits(base: Path, directory: Path, config: ModelConfig) -> torch.Tensor:
    """Of the folder `directory`, which has the weights of `base`. Most changes leave what flowrt reads from the file as it was."""
    if (base, config) not in _known_logits:
        model = FastModel(directory, "float32")
        _known_logits[base, config] = model.step([PROMPT], [len(PROMPT)], [model.new_sequence(len(PROMPT))])
    return _known_logits[base, config]


def check(base: Path, directory: Path) -> str:
    """Compare flowrt with transformers for a changed folder: "equal" logits, "refused" by flowrt, or only accepted by flowrt ("more")."""
    try:
        config = read_model_config(directory, "float32")
        if config == read_model_config(base, "float32") and truth_config(directory) == truth_config(base):
            return "equal"
        found = own_logits(base, directory, config)
    except ModelError as error:
        return "refused" if "\n" not in str(error) else str(error)
    if (expected := truth(directory)) is None:
        return "more"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    return "equal"


def keys_of(values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The path of each key, also of those in mappings."""
    for key, value in values.items():
        yield (key,)
        if isinstance(value, Mapping):
            yield from ((key, inner) for inner in value)


def with_change(values: Mapping[str, Any], path: tuple[str, ...], kind: str) -> dict[str, Any]:
    """`values` where the key is null, or absent."""
    copy: dict[str, Any] = json.loads(json.dumps(values))
    place = copy if len(path) == 1 else copy[path[0]]
    if kind == "null":
        place[path[-1]] = None
    else:
        del place[path[-1]]
    return copy


@pytest.mark.parametrize("kind", ["null", "absent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_that_is_null_or_absent(folders: Mapping[str, Path], tmp_path: Path, family: str, kind: str) -> None:
    base = folders[family]
    values, found, wrong = json.loads((base / "config.json").read_text()), set(), []
    for path in keys_of(values):
        directory = changed(base, tmp_path / "changed", with_change(values, path, kind))
        try:
            found.add(check(base, directory))
        except AssertionError as error:
            wrong.append(f"{'.'.join(path)}: {' '.join(str(error).split())[:150]}")
    assert wrong == []
    assert found <= {"equal", "refused", "more"}
    assert {"equal", "refused"} <= found


class Recorded(dict[str, Any]):
    """A mapping that notes which keys are looked up."""

    def __init__(self, values: Mapping[str, Any], prefix: str, seen: set[str]) -> None:
        super().__init__(values)
        self._prefix, self._seen = prefix, seen

    def get(self, key: str, default: Any = None) -> Any:
        self._seen.add(self._prefix + key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._seen.add(self._prefix + key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._seen.add(f"{self._prefix}{key}")
        return super().__contains__(key)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_of_transformers_is_read_or_changes_no_token(folders: Mapping[str, Path], family: str) -> None:
    import transformers

    path, seen = folders[family] / "config.json", set[str]()

    class RecordingFile(ConfigFile):
        def mapping(self, key: str) -> Mapping[str, Any]:
            return Recorded(ConfigFile.mapping(self, key), f"{key}.", seen)

    values = json.loads(path.read_text())
    for more in ({}, OTHER_VARIANT.get(family, {})):
        file = RecordingFile(path, Recorded(values | more, "", seen))
        find_family(file).read_config(file)
    read = type(transformers.AutoConfig.for_model(family))
    common = {each.name for each in fields(transformers.PreTrainedConfig)}
    names = {each.name for each in fields(read)} - common
    for key, kind in read.sub_configs.items():
        names |= {f"{key}.{each.name}" for each in fields(kind) if each.name not in common}
    latent = LATENT | ({"norm_topk_prob"} if family == "deepseek_v2" else set()) if family.startswith("deepseek") else set()
    assert {name for name in names - seen - latent if not {name, name.rpartition(".")[2]} & NO_TOKENS} == set()


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}, "equal"),
    ("qwen3_moe", {"use_sliding_window": True}, "equal"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": None}, "equal"),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 16}, "equal"),
    ("qwen3_moe", {"rope_theta": 77.0}, "equal"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, "equal"),
    ("qwen3_moe", {"tie_word_embeddings": True}, "equal"),
    ("mixtral", {"sliding_window": 16}, "equal"),
    ("mixtral", {"head_dim": 16, "hidden_act": "gelu"}, "refused"),
    ("deepseek_v3", {"sliding_window": 16}, "refused"),
    ("deepseek_v2", {"sliding_window": 16}, "refused"),
    ("dbrx", {"sliding_window": 16}, "refused"),
    ("deepseek_v3", {"head_dim": 99}, "more"),
    ("deepseek_v3", {"norm_topk_prob": None, "rope_interleave": None}, "equal"),
    ("deepseek_v2", {"norm_topk_prob": True}, "equal"),
]


@pytest.mark.parametrize(("family", "change", "outcome"), CONTRADICTIONS, ids=[f"{each[0]} {each[1]}" for each in CONTRADICTIONS])
def test_keys_that_contradict_each_other(
    folders: Mapping[str, Path], tmp_path: Path, family: str, change: dict[str, Any], outcome: str
) -> None:
    values = json.loads((folders[family] / "config.json").read_text())
    values = {key: value for key, value in values.items() if key not in ("sliding_window", "use_sliding_window")} | change
    assert check(folders[family], changed(folders[family], tmp_path / "changed", values)) == outcome


@pytest.mark.parametrize(
    ("positions", "change", "longest"),
    [
        (64, {}, 64),
        (64, {"factor": 8.0}, 128),
        (128, {"factor": 8.0, "original_max_position_embeddings": None}, None),
        (4096, {}, 4096),
        (100, {"factor": None}, 100),
    ],
)
def test_the_longest_context_of_yarn(
    folders: Mapping[str, Path], tmp_path: Path, positions: int, change: dict[str, Any], longest: int | None
) -> None:
    values = json.loads((folders["qwen3_moe"] / "config.json").read_text())
    rope = {key: value for key, value in (YARN | change).items() if value is not None or key == "factor"}
    directory = changed(
        folders["qwen3_moe"], tmp_path / "changed", values | {"max_position_embeddings": positions, "rope_parameters": rope}
    )
    assert read_model_config(directory).max_position_embeddings == (8 * positions if longest is None else longest)
