"""flowrt's entries in the registries of transformers: what a module of the library calls in place of its own attention, masks and experts.

A module is bound to a PassHooks, which gets each call. The registries are the library's documented points of extension
(https://huggingface.co/docs/transformers/attention_interface), and 64 of its modules with experts use all three.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

NAME = "flowrt"
Mixer = Callable[[Tensor, "SequenceStates"], Any]  # what a recurrent module gives for rows [1, rows, H] of one sequence, and its states
# What an indexer chooses for Q rows of each of S sequences, positions [S, Q, top-k]. It is given how to take these rows of a tensor of the
# pass [1, rows, ...], an additive mask [S, Q, L], and the keys of their contexts.
Indexer = Callable[[Callable[[Tensor], Tensor], Tensor, "IndexedKeys"], Tensor]


_ALONE = RLock()


@contextmanager
def library_alone() -> Iterator[None]:
    """Call the library from this thread alone, and keep it from logging: what a user must know is an error of flowrt.

    While it makes a model it replaces functions of its own, such as the one that ties the output matrix to the embedding. Two threads at
    once, as workers in one process are, would leave them replaced: later models would have a matrix without weights.
    """
    with _ALONE, _silence():
        yield


@contextmanager
def _silence() -> Iterator[None]:
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees: `function(batch, head, query position, key position)`, for tensors of positions."""

    function: Callable[[Any, Any, Any, Any], Any]

    def __getitem__(self, index: Any) -> Mask:
        """A module drops the dimension of heads for its indexer."""
        return self


class PassHooks(Protocol):
    def cache(self, layer: int, first: Tensor, second: Tensor) -> None:
        """Keep what a layer caches of the rows of the pass: [1, heads, rows, width] each."""
        ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, options: Mapping[str, Any]) -> Tensor:
        """Attention of the rows, [1, rows, heads, value width], over all that is cached; key and value are those of the rows alone."""
        ...

    def recur(self, layer: int, mix: Mixer, hidden: Tensor) -> Any:
        """What a recurrent layer gives for the rows [1, rows, H]: `mix` of the rows of each sequence, with its states."""
        ...

    def choose(self, layer: int, index: Indexer, mask: Mask | None) -> Any:
        """The tokens that the indexer of a layer chooses for the rows of the pass: the option `indices` of `attend`, in any form."""
        ...

    def experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the experts of a layer add up to for each row."""
        ...


_HOOKS = "_flowrt_hooks"  # the attribute of every module of a model


class HookedCache(Cache):
    """Gives what layers cache to the hooks. To the module each step looks like the first one, whose rows have positions of their own.

    `positions_T`: those of the rows of the pass.
    """

    def __init__(self, hooks: PassHooks, positions_T: Tensor) -> None:
        super().__init__(layers=[])
        self._hooks, self._positions_T = hooks, positions_T

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._hooks.cache(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """0 for the module. A layer adds it to 0, 1, 2, ... to get positions (Llama 4), so it is a number for each row of the pass."""
        return 0 if layer_idx is None else self._positions_T - torch.arange(len(self._positions_T), device=self._positions_T.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False


class SequenceStates(Cache):
    """The states of one sequence in one layer, in the library's own form. `tensors`: of the tokens before; None: there are none."""

    def __init__(self, layer: int, tensors: Sequence[Tensor] | None = None) -> None:
        super().__init__(layers=[])
        self._layer = held = LinearAttentionLayer()
        self.layers: Any = {layer: held}  # the library reads it by the number of the layer
        if tensors is None:
            return
        held.conv_states[0], held.conv_kernel_size[0] = tensors[0][None].clone(), tensors[0].shape[-1]
        held.is_conv_states_initialized[0] = held.has_previous_state[0] = True
        if len(tensors) > 1:
            held.recurrent_states[0], held.is_recurrent_states_initialized[0] = tensors[1][None].clone(), True

    def tensors(self) -> tuple[Tensor, ...]:
        """Those behind the last token."""
        found = (self._layer.conv_states[0], self._layer.recurrent_states[0])
        return tuple(each[0] for each in found if each is not None)


class IndexedKeys(Cache):
    """Takes the keys of an indexer for rows [S, Q, width], and gives those of their contexts, [S, L, width]."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers=[])
        self._keep = keep

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        return self._keep(indexer_key_states)


def _wrap_indexer(module: Any) -> None:
    """Let an indexer see sequences apart, which are packed in the rows of a pass."""
    original, layer = module.forward, module.layer_idx

    def forward(*args: Any, **kwargs: Any) -> Any:
        def index(take: Callable[[Tensor], Tensor], mask_SQL: Tensor, keys: IndexedKeys) -> Tensor:
            def own(value: Any) -> Any:
                if isinstance(value, Tensor):
                    return take(value)
                if isinstance(value, tuple):
                    return tuple(map(own, value))
                return mask_SQL if isinstance(value, Mask) else keys if isinstance(value, Cache) else value

            positions: Tensor = original(*map(own, args), **{key: own(value) for key, value in kwargs.items()})
            return positions

        mask = next((each for each in (*args, *kwargs.values()) if isinstance(each, Mask)), None)
        return hooks_of(module).choose(layer, index, mask)

    module.forward = forward


def _wrap_mixer(module: Any) -> None:
    """Let a module that keeps a recurrent state see one sequence at a time."""
    original, layer = module.forward, module.layer_idx

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        def mix(rows: Tensor, states: SequenceStates) -> Any:
            own = [states if isinstance(each, Cache) else each for each in args]
            given = {key: states if isinstance(each, Cache) else None if isinstance(each, Mask) else each for key, each in kwargs.items()}
            return original(rows, *own, **given)

        return hooks_of(module).recur(layer, mix, hidden_states)

    module.forward = forward


_WRAPPED = {"update_conv_state": _wrap_mixer, "update_indexer": _wrap_indexer}  # by the method of a cache that their classes call


def _wrap(module: nn.Module) -> None:
    """Let a module whose cache is not that of attention see sequences apart."""
    functions = [inspect.unwrap(each) for cls in type(module).__mro__ for each in vars(cls).values() if inspect.isfunction(each)]
    for method, wrap in _WRAPPED.items():
        if hasattr(module, "layer_idx") and any(method in each.__code__.co_names for each in functions):
            wrap(module)


def new_cache(hooks: PassHooks, positions_T: Tensor) -> HookedCache:
    return HookedCache(hooks, positions_T)


def use_hooks(model: PreTrainedModel, hooks: PassHooks) -> None:
    """Let the module call the hooks."""
    for module in model.modules():
        if not hasattr(module, _HOOKS):
            _wrap(module)
        setattr(module, _HOOKS, hooks)
    model.set_attn_implementation(NAME)
    model.set_experts_implementation(NAME)


def hooks_of(module: nn.Module) -> PassHooks:
    hooks: PassHooks = getattr(module, _HOOKS)
    return hooks


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | None, **options: Any
) -> tuple[Tensor, None]:
    return hooks_of(module).attend(module, query, key, value, attention_mask, options), None


def _mask(mask_function: Callable[[Any, Any, Any, Any], Any], **_: Any) -> Mask:
    return Mask(mask_function)


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return hooks_of(module).experts(module, hidden_states, top_k_index, top_k_weights)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
