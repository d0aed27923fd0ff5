"""flowrt's entries in the registries of transformers: what a module of the library calls in place of its own attention, masks and experts.

A module is bound to a PassHooks, which gets each call. The registries are the library's documented points of extension
(https://huggingface.co/docs/transformers/attention_interface), and 64 of its modules with experts use all three.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

NAME = "flowrt"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library from logging: what a user must know is an error of flowrt."""
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


class PassHooks(Protocol):
    def cache(self, layer: int, first: Tensor, second: Tensor) -> None:
        """Keep what a layer caches of the rows of the pass: [1, heads, rows, width] each."""
        ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, options: Mapping[str, Any]) -> Tensor:
        """Attention of the rows, [1, rows, heads, value width], over all that is cached; key and value are those of the rows alone."""
        ...

    def experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """What the experts of a layer add up to for each row."""
        ...


_HOOKS: WeakKeyDictionary[nn.Module, PassHooks] = WeakKeyDictionary()  # by every module of a model


class HookedCache(Cache):
    """Gives what layers cache to the hooks. To the module each step looks like the first one, whose rows have positions of their own."""

    def __init__(self, hooks: PassHooks) -> None:
        super().__init__(layers=[])
        self._hooks = hooks

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._hooks.cache(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def cache_of(hooks: PassHooks) -> HookedCache:
    return HookedCache(hooks)


def use_hooks(model: PreTrainedModel, hooks: PassHooks) -> None:
    """Let the module call the hooks."""
    for module in model.modules():
        _HOOKS[module] = hooks
    model.set_attn_implementation(NAME)
    model.set_experts_implementation(NAME)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | None, **options: Any
) -> tuple[Tensor, None]:
    return _HOOKS[module].attend(module, query, key, value, attention_mask, options), None


def _mask(mask_function: Callable[[Any, Any, Any, Any], Any], **_: Any) -> Mask:
    return Mask(mask_function)


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _HOOKS[module].experts(module, hidden_states, top_k_index, top_k_weights)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
