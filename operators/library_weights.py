"""Loads weights into a module of transformers: only those that it has, each read when the library asks for it.

The library knows how a checkpoint of each architecture becomes the weights of its module (renamed, stacked, joined). It takes tensors that
are read late, so the memory is that of what is held and of the tensors that become one weight. It also takes shapes in place of tensors,
which shows what a checkpoint lacks before any weight is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from flowrt.operators.library_config import library_config, model_class, num_experts_of, parts_of
from flowrt.operators.library_interfaces import library_alone
from flowrt.operators.library_scaled_experts import route_scaled_experts
from flowrt.operators.model_config import KEPT_ROWS, ModelConfig, ModelError
from flowrt.operators.weights import Checkpoint, torch_dtype

# The library would read tensors in threads of its own. A Checkpoint has one buffer for all, and what is read ahead takes memory.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
_TEXT_PART = re.compile(r"^(?:language_model\.(model\.|lm_head\.)|(model\.)language_model\.)")  # of models that have others, too
_FILLING = ("_move_missing_keys_from_meta_to_device", "_initialize_missing_keys")  # fill in what a checkpoint lacks, which takes memory
_EXPERT = re.compile(r"\bexperts?\.(\d+)\.")  # in the name of a tensor of one expert


class _LateTensor:
    """A tensor of a checkpoint that is read when it is indexed."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]


class _ShapeAlone(Tensor):
    """A tensor without memory that stays so when the library wants it on a device."""

    def to(self, *args: Any, device: Any = None, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return self if dtype is None else super().to(dtype)


class _LateTensors(Mapping[str, _LateTensor]):
    """The tensors of a checkpoint, or their `shapes_alone`. With `held`, of an expert's tensors those of these experts of a layer."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, held: Mapping[int, Sequence[int]] | None, shapes_alone: bool = False
    ) -> None:
        self._checkpoint, self._num_experts, self._dtype, self._held = checkpoint, config.num_experts, torch_dtype(config), held
        self._shapes_alone = shapes_alone
        self._names = {
            _TEXT_PART.sub(lambda match: match[1] or match[2], name): name for name in checkpoint.tensor_names() if self._is_held(name)
        }

    def _is_held(self, name: str) -> bool:
        layer, expert = _layer_of(name), _EXPERT.search(name)
        if self._held is None or expert is None:
            return self._held is None or layer in self._held
        return layer is not None and int(expert[1]) in self._held.get(layer, ())

    def __getitem__(self, given: str) -> _LateTensor:
        name, rows = self._names[given], None
        if self._held is not None and _EXPERT.search(name) is None and self._checkpoint.stored(name).shape[:1] == (self._num_experts,):
            rows = self._held[_layer_of(name)]  # type: ignore[index]
        return _LateTensor(partial(self._read, name, rows))

    def missing_experts(self) -> list[str]:
        """The tensors of single experts that others have of the same matrix."""
        found: dict[str, set[int]] = {}
        for name in self._names.values():
            if match := _EXPERT.search(name):
                found.setdefault(f"{name[: match.start(1)]}{{}}{name[match.end(1) :]}", set()).add(int(match[1]))
        experts = range(self._num_experts) if self._held is None else ()
        return [name.format(expert) for name, those in found.items() for expert in experts if expert not in those]

    def _read(self, name: str, rows: Sequence[int] | None) -> Tensor:
        if not self._shapes_alone:
            return self._checkpoint.read_tensor(name, rows, self._dtype)
        shape, dtype = self._checkpoint.tensor_form(name, rows, self._dtype)
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(_ShapeAlone)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _layer_of(name: str) -> int | None:
    match = re.search(r"\.(\d+)\.", name)
    return None if match is None else int(match[1])


def check_weights(config: ModelConfig, directory: Path) -> None:
    """Raises ModelError, naming the tensor, for weight files that do not hold what the module needs, and for experts that cannot be kept in
    8 bits as the config says. Reads headers alone."""
    model = _load(config, Checkpoint(directory), lambda model: None, None, shapes_alone=True)
    for module in parts_of(model).experts.values() if config.expert_weights != "dtype" else ():
        matrices = expert_matrices(module)
        if not matrices or any(matrix.shape[1] % KEPT_ROWS for matrix in matrices.values()):
            needed = f"two matrices of a multiple of {KEPT_ROWS} rows each are needed for model.expert_weights; write dtype"
            raise ModelError(f"{directory}: an expert is a {type(module).__name__}; {needed}")


def expert_matrices(module: Any) -> dict[str, Tensor]:
    """The two matrices of all experts of a module, [E, outputs, inputs], by the names of its weights; empty where it does not say that it
    has two, with a gate or an activation between them (the library's `use_experts_implementation`)."""
    names = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    weights = [getattr(module, name, None) for name in names]
    if not hasattr(module, "is_transposed") or not all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights):
        return {}
    return {
        name: weight.transpose(1, 2) if module.is_transposed else weight
        for name, weight in zip(names, weights, strict=True)
        if weight is not None
    }


def load_body(config: ModelConfig, checkpoint: Checkpoint) -> PreTrainedModel:
    """The whole module without the weights of its routed experts. Raises ModelError."""

    def without_experts(model: PreTrainedModel) -> None:
        for module in parts_of(model).experts.values():
            _strip(module)

    return _load(config, checkpoint, without_experts, None)


def load_experts(config: ModelConfig, checkpoint: Checkpoint, held: Mapping[int, Sequence[int]]) -> dict[int, nn.Module]:
    """The modules of experts of some layers, with the weights of the experts `held` there, in ascending order. Raises ModelError."""
    held = {layer: sorted(experts) for layer, experts in held.items()}

    def only_held(model: PreTrainedModel) -> None:
        experts = parts_of(model).experts
        kept = {id(part) for layer in held for part in experts[layer].modules()}
        for module in model.modules():
            if id(module) not in kept:
                _strip(module, deep=False)
        for layer, ids in held.items():
            module = experts[layer]
            size = num_experts_of(module)
            for owner in module.modules():
                for name, parameter in owner._parameters.items():
                    if parameter is not None and parameter.shape[:1] == (size,):
                        owner._parameters[name] = nn.Parameter(parameter.new_empty(len(ids), *parameter.shape[1:]), requires_grad=False)
            module.num_experts = len(ids)  # type: ignore[assignment]

    experts = parts_of(_load(config, checkpoint, only_held, held)).experts
    return {layer: experts[layer] for layer in held}


def _strip(module: nn.Module, deep: bool = True) -> None:
    """Remove the weights of a module, and what the library would fill in for them."""
    for part in module.modules() if deep else (module,):
        part._parameters.clear()
        part._buffers.clear()
        part._is_hf_initialized = True  # type: ignore[assignment]


def _load(
    config: ModelConfig, checkpoint: Checkpoint, cut: Any, held: Mapping[int, Sequence[int]] | None, shapes_alone: bool = False
) -> PreTrainedModel:
    path = checkpoint.directory / "config.json"
    with library_alone():
        library = library_config(path, checkpoint.config_values())
    library._attn_implementation = "eager"
    if held is not None:
        library.tie_word_embeddings = False  # neither matrix is there
    base = model_class(library)

    def init(self: PreTrainedModel, given: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, given, *args, **kwargs)
        route_scaled_experts(self)
        cut(self)

    filled = dict.fromkeys(_FILLING, lambda *args, **kwargs: None) if shapes_alone else {}
    cls: Any = type(base.__name__, (base,), {"__init__": init, "__module__": base.__module__} | filled)
    tensors = _LateTensors(checkpoint, config, held, shapes_alone)
    try:
        with library_alone():  # it would list all weights that were cut off
            model, found = cls.from_pretrained(
                None,
                config=library,
                state_dict=tensors,
                dtype=torch_dtype(config),
                output_loading_info=True,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,
            )
    except ModelError:
        raise
    except Exception as error:  # of the library's loader
        if missing := tensors.missing_experts():
            raise _missing(checkpoint, missing) from error
        raise ModelError(f"{checkpoint.directory}: transformers cannot load its weights: {' '.join(str(error).split())[:200]}") from error
    if missing := sorted(found["missing_keys"]):
        raise _missing(checkpoint, missing)
    if wrong := sorted(found["mismatched_keys"]):
        name, stored, needed = wrong[0]
        raise ModelError(f"{checkpoint.directory}: tensor {name} has shape {list(stored)}, and config.json requires {list(needed)}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _missing(checkpoint: Checkpoint, names: Sequence[str]) -> ModelError:
    text = f"tensor {names[0]} is missing from the weights ({len(names)} are); copy the model's files again"
    return ModelError(f"{checkpoint.directory}: {text}")
