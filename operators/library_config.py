"""Reads the config of a model that transformers computes, and finds out what flowrt must know of its module.

The module is built without memory for its weights, and runs once on two tokens of no content: which experts it calls, and what it caches of
a token, is then seen in place of being derived from the keys of each architecture's config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from flowrt.operators.families.registry import known_families
from flowrt.operators.library_interfaces import (
    IndexedKeys,
    Indexer,
    Mask,
    Mixer,
    PassHooks,
    SequenceStates,
    library_alone,
    new_cache,
    use_hooks,
)
from flowrt.operators.library_scaled_experts import route_scaled_experts
from flowrt.operators.model_config import LibraryConfig, ModelConfig, ModelError
from flowrt.operators.weights import TORCH_DTYPES

_LAYER = re.compile(r"\.(\d+)\.")
MAX_LAYERS = 1000
_PROBE_TOKENS = 2
_LENGTH_DEPENDENT = ("longrope",)  # kinds of rotary scaling that follow the longest context of a batch


@dataclass(frozen=True)
class ModuleParts:
    """The parts of a module that a pass needs. `experts`: the module with the routed experts of each layer that has any."""

    body: nn.Module
    layers: nn.ModuleList
    experts: Mapping[int, nn.Module]


def library_config(path: Path, values: Mapping[str, Any]) -> PreTrainedConfig:
    """The library's own config of the language model in the config.json at `path`. Weights are restored as they are read, so that it names
    no quantization. Raises ModelError."""
    kept = {key: _decoded(value) for key, value in values.items() if key not in ("quantization_config", "compression_config", "auto_map")}
    model_type = kept.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        known = f"known are: {', '.join(known_families())}, and the architectures of transformers {transformers.__version__}"
        raise ModelError(f"{path}: model_type: model family {model_type!r} is not known; {known}")
    try:
        given: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(kept)
        text = given.get_text_config(decoder=True)
        if not isinstance(text, PreTrainedConfig):
            raise TypeError(f"text_config of a {model_type} config, which has none")
        return text
    except Exception as error:  # of the library: any of its validators may refuse a value in its own way
        raise ModelError(f"{path}: {' '.join(str(error).split())[:200]}") from error


def _decoded(value: Any) -> Any:
    """Numbers that JSON does not have, in the form in which the library writes them."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and value.keys() == {"__float__"} else value


def model_class(config: PreTrainedConfig) -> Any:
    """The class with a head for text. Raises ModelError where the library has none for this config."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        found = AutoModelForCausalLM._model_mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for name, each in vars(module).items():
        if name.endswith("ForCausalLM") and getattr(each, "config_class", None) is type(config):
            return each
    raise ModelError("the library has no class of it that generates text alone")


def new_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The module of a config in bfloat16, without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)._from_config(deepcopy(config), attn_implementation="eager", dtype=torch.bfloat16)
        model.eval()
    route_scaled_experts(model)
    return model


def body_name(model: PreTrainedModel) -> str:
    """The attribute with the layers of a model. That of Llama 4 has another name than the library gives for it."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


def parts_of(model: PreTrainedModel) -> ModuleParts:
    """Raises ModelError for a module that cannot be cut at its experts."""
    body: Any = getattr(model, body_name(model))
    body = getattr(body, "language_model", body)
    found: dict[int, nn.Module] = {}
    place = ""
    for name, module in body.named_modules():
        if not hasattr(module, "_is_expert_parallel"):
            continue
        match = _LAYER.search(f".{name}.")
        if match is None or (layer := int(match[1])) in found:
            raise ModelError("a layer calls several sets of experts")
        found[layer], place = module, f".{name}."[1 : match.start()]
    if not found:
        raise ModelError("no layer calls experts through the interface of transformers")
    layers = body.get_submodule(place)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError("its layers are not a list of modules")
    return ModuleParts(body, layers, dict(sorted(found.items())))


@dataclass
class _ProbeHooks(PassHooks):
    """What the module does in a pass of two tokens."""

    layer_of: dict[int, int]
    widths: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_active: set[int] = field(default_factory=set)
    called: list[int] = field(default_factory=list)
    states: dict[int, tuple[tuple[tuple[int, ...], bool], ...]] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)
    index_widths: dict[int, int] = field(default_factory=dict)

    def cache(self, layer: int, first: Tensor, second: Tensor) -> None:
        self.widths[layer] = (prod(first.shape[1::2]), prod(second.shape[1::2]))

    def recur(self, layer: int, mix: Mixer, hidden: Tensor) -> Any:
        states = SequenceStates(layer)
        mixed = mix(hidden, states)
        self.states[layer] = tuple((tuple(each.shape), each.dtype == torch.float32) for each in states.tensors())
        return mixed

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        widths = prod(key.shape[1::2]), prod(value.shape[1::2])
        if not hasattr(module, "expand_kv") and self.widths.get(layer) != widths:
            raise ModelError("its attention reads other keys or values than it caches")
        if layer in self.index_widths and options.get("indices") is not self.index_widths:
            raise ModelError("its attention does not take what its indexer chooses")
        self.attended.add(layer)
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def choose(self, layer: int, index: Indexer, mask: Mask | None) -> Any:
        def keep(keys_SLW: Tensor) -> Tensor:
            self.index_widths[layer] = keys_SLW.shape[-1]
            return keys_SLW

        index(lambda rows: rows, torch.zeros(1, _PROBE_TOKENS, _PROBE_TOKENS), IndexedKeys(keep))
        return self.index_widths

    def experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.num_active.add(index.shape[-1])
        self.called.append(self.layer_of[id(module)])
        return torch.empty_like(hidden)


def read_library_config(path: Path, values: Mapping[str, Any]) -> ModelConfig:
    """Raises ModelError: transformers does not know the architecture, or flowrt cannot run its module, with the reason."""
    with library_alone():
        return _read(path, library_config(path, values))


def _read(path: Path, config: PreTrainedConfig) -> ModelConfig:
    where = f"{path}: model_type: {config.model_type!r} does not run through transformers here:"
    if problem := _problem(config):
        raise ModelError(f"{where} {problem}")
    try:
        model = new_model(config)
        parts = parts_of(model)
        seen = _ProbeHooks({id(module): layer for layer, module in parts.experts.items()})
        use_hooks(model, seen)
        with torch.device("meta"), torch.inference_mode():
            embedding: Any = model.get_input_embeddings()
            x = torch.empty(1, _PROBE_TOKENS, embedding.weight.shape[1], dtype=torch.bfloat16)
            positions_T = torch.arange(_PROBE_TOKENS)
            parts.body(inputs_embeds=x, position_ids=positions_T[None], past_key_values=new_cache(seen, positions_T), use_cache=True)
    except ModelError as error:
        raise ModelError(f"{where} {error}") from error
    except Exception as error:  # of the module: it needs something that a pass does not give it
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise ModelError(f"{where} its module needs more than a pass has ({what})") from error
    num_layers = len(parts.layers)
    if seen.called != list(parts.experts) or len(seen.num_active) != 1:
        raise ModelError(f"{where} its layers do not call their experts once each, in order")
    if not seen.widths or seen.attended != seen.widths.keys() or not seen.attended.isdisjoint(seen.states):
        raise ModelError(f"{where} a layer has attention without a cache of its own, or beside a recurrent state, or none has any")
    if (num_chosen := getattr(config, "index_topk", None)) and not seen.index_widths:
        raise ModelError(f"{where} its attention has an indexer (index_topk) whose keys it does not cache")
    if len({*seen.states.values()}) > 1:
        raise ModelError(f"{where} its layers have recurrent states of different shapes")
    counts = {num_experts_of(module) for module in parts.experts.values()}
    if len(counts) != 1:
        raise ModelError(f"{where} its layers have different numbers of experts")
    num_experts = counts.pop()
    of_experts = sum(parameter.numel() for module in parts.experts.values() for parameter in module.parameters())
    return ModelConfig(
        family="transformers",
        dtype=_dtype(path, config),
        vocab_size=config.vocab_size,
        hidden_size=x.shape[-1],
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=1,
        head_dim=sum(kv_widths := _page_widths(seen)),
        num_experts=num_experts,
        num_experts_per_token=seen.num_active.pop(),
        expert_width=max(1, of_experts // (len(parts.experts) * num_experts * 3 * x.shape[-1])),
        dense_width=0,
        moe_layers=tuple(parts.experts),
        norm_epsilon=0.0,
        max_position_embeddings=_max_positions(config),
        library=LibraryConfig(
            kv_widths=kv_widths,
            body_elements=sum(parameter.numel() for parameter in model.parameters()) - of_experts,
            expert_elements=of_experts // (len(parts.experts) * num_experts),
            recurrent_layers=tuple(sorted(seen.states)),
            states=next(iter(seen.states.values()), ()),
            index_tokens=num_chosen if seen.index_widths else None,
        ),
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
        eos_token_ids=_token_ids(config.eos_token_id),
    )


def _page_widths(seen: _ProbeHooks) -> tuple[int, int]:
    """Of the two parts of pages that hold what any layer caches. The keys of an indexer are the end of the second one."""
    if not seen.index_widths and len({*map(sum, seen.widths.values())}) == 1:
        return max(seen.widths.values(), key=sum)
    second = max(second + seen.index_widths.get(layer, 0) for layer, (_, second) in seen.widths.items())
    return max(first for first, _ in seen.widths.values()), second


def _problem(config: PreTrainedConfig) -> str:
    """Why no module of this config can run, as far as the config says."""
    if not 0 < getattr(config, "num_hidden_layers", 1) <= MAX_LAYERS:
        return f"num_hidden_layers is {config.num_hidden_layers}; 1 to {MAX_LAYERS} are supported"
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        return f"max_position_embeddings is {longest}; at least 1 is needed"
    if not getattr(config, "is_causal", True):
        return "it is not causal (is_causal: false)"
    if any(each.get("rope_type") == "dynamic" for each in _rotary_sets(config)):
        return "its rotary positions depend on the longest context of a batch (rope_type: dynamic)"
    return ""


def num_experts_of(module: nn.Module) -> int:
    """The size of the first dimension, which all its weights share."""
    sizes = [parameter.shape[0] for parameter in module.parameters() if parameter.dim() > 1]
    if not sizes or len(set(sizes)) > 1:
        raise ModelError("the weights of its experts are not stacked")
    return sizes[0]


def _max_positions(config: PreTrainedConfig) -> int:
    """Where the scaling of rotary positions depends on the longest context of a batch, contexts of the original length alone have tokens
    that do not depend on other requests."""
    longest = getattr(config, "max_position_embeddings", None) or 1 << 20
    for each in _rotary_sets(config):
        if each.get("rope_type") in _LENGTH_DEPENDENT:
            original = each.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, original or longest)
    return int(longest)


def _rotary_sets(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """The parameters of rotary positions, of all layers or by the kind of layer."""
    scaling = getattr(config, "rope_parameters", None) or {}
    return [each for each in (scaling, *scaling.values()) if isinstance(each, Mapping)]


def _dtype(path: Path, config: PreTrainedConfig) -> str:
    name = str(config.dtype or "float32").removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise ModelError(f"{path}: dtype: is {name!r}; use one of {', '.join(TORCH_DTYPES)}")
    return name


def _token_ids(value: Any) -> tuple[int, ...]:
    found = value if isinstance(value, list) else [value]
    return tuple(each for each in found if isinstance(each, int))
