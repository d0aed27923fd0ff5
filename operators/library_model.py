"""Runs the module of transformers as a pass that stops at the experts of each layer.

A pass is a greenlet: the module calls its experts, flowrt's entry in the registry switches out of it with the rows and what the router
chose, and the pass goes on when these have come back. So several passes are in flight in one thread, a firing takes a pass from one layer
to the next, and a rollback drops it. A layer without experts stops at its end, so that each layer is a firing.

Rows of several sequences are packed into one pass of batch size 1. Each attends to its own sequence, whose keys are in pages
(library_attention.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from flowrt.operators.kv_pages import KvPages
from flowrt.operators.library_attention import attend_packed, choose_keys
from flowrt.operators.library_config import body_name, parts_of
from flowrt.operators.library_interfaces import Indexer, Mask, Mixer, SequenceStates, new_cache, use_hooks
from flowrt.operators.library_linears import lay_out_linears
from flowrt.operators.library_weights import load_body
from flowrt.operators.model_config import ModelConfig, ModelError
from flowrt.operators.state_slots import NO_STATE
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint

_CHECKED_TOKENS = 8


@dataclass(frozen=True)
class PassStop:
    """Where a pass has stopped in a layer. With experts: the rows for them, and the ids and weights that the router chose, [T, A] each;
    `hidden_TH` of another layer is what it ends with."""

    hidden_TH: Tensor
    ids_TA: Tensor | None = None
    weights_TA: Tensor | None = None


class LibraryModel:
    """All of a model but its routed experts. Runs in one thread."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.model: Any = load_body(config, checkpoint).to(device)  # type: ignore[arg-type]
        lay_out_linears(self.model)
        self.parts = parts_of(self.model)
        self._passes: dict[Hashable, tuple[Hashable, _Pass]] = {}  # by key: the step, and its pass
        self._layer_of = {id(module): layer for layer, module in self.parts.experts.items()}
        if config.recurrent_layers:
            self._check_recurrence(config)
        use_hooks(self.model, self)
        for layer, module in enumerate(self.parts.layers):
            if layer not in self.parts.experts:
                module.register_forward_hook(self._end_layer)

    def _check_recurrence(self, config: ModelConfig) -> None:
        """Raises ModelError when the library's recurrent layers give other results for a prompt in two parts than for the whole one."""
        check = _RecurrenceCheck()
        use_hooks(self.model, check)
        with torch.inference_mode():
            tokens_T = torch.arange(_CHECKED_TOKENS, device=self.model.device)
            x = self.embed(tokens_T % config.vocab_size)[None]
            self.parts.body(inputs_embeds=x, position_ids=tokens_T[None], past_key_values=new_cache(check, tokens_T))

    def embed(self, tokens_T: Tensor) -> Tensor:
        x_TH: Tensor = self.model.get_input_embeddings()(tokens_T)
        return x_TH

    def begin(self, key: Hashable, step: Hashable, x_TH: Tensor, layout: StepLayout, pages: KvPages) -> PassStop:
        """Begin the pass of a step, up to its first stop. It replaces a pass of the same key that was not finished."""
        begun = _Pass(self, layout, pages)
        self._passes[key] = step, begun
        return begun.advance(x_TH)

    def resume(self, key: Hashable, step: Hashable, x_TH: Tensor) -> PassStop:
        """Go on with what a layer, or its experts, gave for each row, up to the next stop. Raises RuntimeError for a step whose pass was
        replaced."""
        running, begun = self._passes[key]
        if running != step:
            raise RuntimeError(f"the pass of step {step} was replaced by that of {running}")
        return begun.advance(x_TH)

    def end(self, key: Hashable, step: Hashable, x_TH: Tensor) -> Tensor:
        """Go on to the end: what the head reads, [T, H]."""
        ended = self.resume(key, step, x_TH)
        del self._passes[key]
        return ended.hidden_TH

    def logits(self, x_TH: Tensor, rows_S: Tensor) -> Tensor:
        """Logits [S, V] of some rows, as the library computes them from what its last layer gives, float32 at least."""
        name = body_name(self.model)
        body = self.model._modules[name]
        self.model._modules[name] = _GivenBody(x_TH.index_select(0, rows_S)[None])
        try:
            found: Tensor = type(self.model).forward(self.model, input_ids=rows_S[None]).logits[0]
        finally:
            self.model._modules[name] = body
        return found.to(torch.promote_types(found.dtype, torch.float32))

    # what the module calls during a pass

    def cache(self, layer: int, first: Tensor, second: Tensor) -> None:
        running = _running()
        packed_TD = torch.cat([each[0].transpose(0, 1).flatten(1) for each in (first, second)], dim=1)
        running.cached_shapes[layer] = tuple(first.shape[1::2]), tuple(second.shape[1::2])
        running.pages.write(layer, running.layout.slots_T, packed_TD[:, None])

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, options: Mapping[str, Any]) -> Tensor:
        running = _running()
        layer: int = module.layer_idx  # type: ignore[assignment]
        return attend_packed(module, query, key, value, mask, options, running.layout, running.pages, layer, running.cached_shapes[layer])

    def choose(self, layer: int, index: Indexer, mask: Mask | None) -> Any:
        running = _running()
        return choose_keys(index, mask, running.layout, running.pages, layer)

    def recur(self, layer: int, mix: Mixer, hidden: Tensor) -> Any:
        running, found = _running(), list[Any]()
        states = running.pages.states
        if states is None or running.layout.states_2S is None:
            raise RuntimeError("a step of a model with recurrent layers needs slots of states")
        pieces = hidden.split(running.layout.query_lengths, dim=1)
        for rows, source, target in zip(pieces, *running.layout.states_2S.tolist(), strict=True):
            own = SequenceStates(layer, None if source == NO_STATE else states.read(layer, source))
            found.append(mix(rows, own))
            for place, tensor in zip(states.read(layer, target), own.tensors(), strict=True):
                place.copy_(tensor)
        if isinstance(found[0], tuple):
            return (torch.cat([each[0] for each in found], dim=1), *found[-1][1:])
        return torch.cat(found, dim=1)

    def experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        ids_TA, weights_TA = index.reshape(len(rows_TH), -1), weights.reshape(len(rows_TH), -1)
        summed_TH = self._stop(PassStop(rows_TH, ids_TA, weights_TA))
        return summed_TH.view(hidden.shape).to(hidden.dtype)

    def _end_layer(self, module: nn.Module, given: Any, found: Any) -> Any:
        hidden = found[0] if isinstance(found, tuple) else found
        passed = self._stop(PassStop(hidden[0])).to(hidden.dtype)[None]
        return (passed, *found[1:]) if isinstance(found, tuple) else passed

    def _stop(self, stop: PassStop) -> Tensor:
        """Leave the pass until `advance` is called with what comes back."""
        back: Tensor = _running().leave(stop)
        return back


class _Pass(greenlet):
    """`cached_shapes`: heads and width of the two tensors that a layer caches."""

    def __init__(self, model: LibraryModel, layout: StepLayout, pages: KvPages) -> None:
        super().__init__(self._run)
        self.layout, self.pages, self._model = layout, pages, model
        self.cached_shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def advance(self, x_TH: Tensor) -> PassStop:
        """Go on, or begin, with these rows, up to the next stop."""
        stop: PassStop = self.switch(x_TH)
        return stop

    def leave(self, stop: PassStop) -> Tensor:
        """Return to the caller of `advance`. The result is what it is called with next."""
        if self.parent is None:
            raise RuntimeError("a pass needs a caller")
        back: Tensor = self.parent.switch(stop)
        return back

    def _run(self, x_TH: Tensor) -> PassStop:
        positions_T = self.layout.positions_T
        cache = new_cache(self._model, positions_T)
        found = self._model.parts.body(
            inputs_embeds=x_TH[None], position_ids=positions_T[None], past_key_values=cache, use_cache=True, return_dict=True
        )
        return PassStop(found.last_hidden_state[0])


def _running() -> _Pass:
    current = getcurrent()
    if not isinstance(current, _Pass):
        raise RuntimeError("the module of transformers was called outside of a pass")
    return current


class _RecurrenceCheck:
    """Hooks of a pass in which only recurrent layers compute."""

    def cache(self, layer: int, first: Tensor, second: Tensor) -> None: ...

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, options: Mapping[str, Any]) -> Tensor:
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    def choose(self, layer: int, index: Indexer, mask: Mask | None) -> Any:
        return ()

    def experts(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(hidden)

    def recur(self, layer: int, mix: Mixer, hidden: Tensor) -> Any:
        whole, states = mix(hidden, SequenceStates(layer)), SequenceStates(layer)
        before, after = hidden.split(hidden.shape[1] // 2, dim=1)
        first = mix(before, states)
        parts = first, mix(after, SequenceStates(layer, states.tensors()))
        wanted, found = _rows_of(whole), torch.cat([_rows_of(part) for part in parts], dim=1)
        if not torch.allclose(found, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max())):
            raise ModelError("the recurrent layers of its module in transformers cannot go on with a prompt that was begun before")
        return whole


def _rows_of(found: Any) -> Tensor:
    rows: Tensor = found[0] if isinstance(found, tuple) else found
    return rows


class _GivenBody(nn.Module):
    """Stands for the layers of a model whose result is known."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return _GivenOutput(last_hidden_state=self._hidden)


class _GivenOutput(MoeModelOutputWithPast):
    """Has every other field that some architecture reads, as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
