"""Wrong results of the operators of simulated workers: a glitch occurs once; a poison, whenever its token is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from flowrt.graph.model import Node
from flowrt.simulation.case import Glitch, Poison


class WrongResults:
    """Makes the wrong results of one run. `on_glitch` is called when the glitch occurs."""

    def __init__(self, poison: Poison | None, glitch: Glitch | None, on_glitch: Callable[[], None]) -> None:
        self._poison, self._glitch, self._on_glitch = poison, glitch, on_glitch
        self._num_left = 0 if glitch is None else glitch.number
        self._rows: set[tuple[Any, ...]] = set()  # (source, epoch, micro-batch, step, row) of the poison
        self._pairs: set[tuple[bytes, int]] = set()  # (row, expert) that end a server
        self._parts: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}  # (source, epoch) -> (micro-batch, row, expert) of them

    @property
    def hangs(self) -> bool:
        return self._poison is not None and self._poison.effect in ("hang", "hung_part")

    @property
    def num_parts(self) -> int:
        """Equal choices of a request are different parts where they are in different steps at a time."""
        return max(len(self._pairs), *map(len, self._parts.values()), 0)

    def wrap(self, node: Node, function: Any, end_process: Callable[[], None]) -> Any:
        """The function of a node, with its wrong results. `end_process` ends the process, or its compute thread."""
        poison, kind = self._poison, node.kind
        if poison is not None and kind.compute is not None and "tokens" in kind.inputs:  # it makes rows of tokens
            function = self._poisoned(function, poison, end_process)
        if (
            poison is not None
            and poison.effect in ("part", "hung_part")
            and ((is_first := kind.dispatches and not kind.forwards) or kind.holds_experts)
        ):
            function = self._marking(function) if is_first else self._ending(function, end_process)
        if self._glitch is not None and node.operator == self._glitch.operator:
            function = self._glitched(function, self._glitch)
        return function

    def _poisoned(self, function: Any, poison: Poison, end_process: Callable[[], None]) -> Any:
        def run(firings: Any) -> Any:
            hit = [(firing, firing.inputs["tokens"].tensors[0] == poison.token_id) for firing in firings]
            if not any(bool(is_poison_T.any()) for _, is_poison_T in hit):
                return function(firings)
            if poison.effect in ("crash", "hang"):
                end_process()
                raise RuntimeError("the poison was computed")
            if poison.effect == "raise":
                raise RuntimeError("the poison was computed")
            found = function(firings)
            for (firing, is_poison_T), outputs in zip(hit, found, strict=True):
                tag = firing.tag
                for row in is_poison_T.nonzero().flatten().tolist():
                    self._rows.add((tag.source, tag.epoch, tag.micro_batch, tag.step, row))
                    if poison.effect == "nan":
                        outputs["x"].tensors[0][row] = float("nan")
            return found

        return run

    def _marking(self, function: Any) -> Any:
        """Dispatch: remember the rows of the poison, and the first expert of each."""

        def run(firings: Any) -> Any:
            for firing in firings:
                tag, (x_TH,), (ids_TA, _) = firing.tag, firing.inputs["x"].tensors, firing.inputs["routing"].tensors
                for row in range(len(x_TH)):
                    if (tag.source, tag.epoch, tag.micro_batch, tag.step, row) in self._rows:
                        pair = x_TH[row].numpy().tobytes(), int(ids_TA[row, 0])
                        self._pairs.add(pair)
                        self._parts.setdefault((tag.source, tag.epoch), set()).add((tag.micro_batch, *pair))
            return function(firings)

        return run

    def _ending(self, function: Any, end_process: Callable[[], None]) -> Any:
        """Experts: a part with such a pair ends the server."""

        def run(firings: Any) -> Any:
            for firing in firings:
                x_RH, row_P, expert_P, _ = firing.inputs["rows"].tensors
                pairs = zip(row_P.tolist(), expert_P.tolist(), strict=True)
                if self._pairs and any((x_RH[row].numpy().tobytes(), expert) in self._pairs for row, expert in pairs):
                    end_process()
                    raise RuntimeError("the poison was computed")
            return function(firings)

        return run

    def _glitched(self, function: Any, glitch: Glitch) -> Any:
        def run(firings: Any) -> Any:
            self._num_left -= len(firings)
            if self._num_left > 0 or self._num_left + len(firings) <= 0:
                return function(firings)
            self._on_glitch()
            if glitch.effect == "raise":
                raise RuntimeError("a glitch")
            found = list(function(firings))
            found[0] = _spoilt(found[0])
            return found

        return run


def _spoilt(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs with NaN in the first row of each floating tensor; tokens without finite logits."""

    def spoil(port: str, tensor: Any) -> Any:
        if not len(tensor) or not (tensor.is_floating_point() or port == "tokens"):
            return tensor
        tensor = tensor.clone()
        tensor[0] = float("nan") if tensor.is_floating_point() else -1
        return tensor

    found = {}
    for port, payload in outputs.items():
        found[port] = msgspec.structs.replace(payload, tensors=tuple(spoil(port, each) for each in payload.tensors))
    return found
