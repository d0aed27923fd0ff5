"""Computes routed experts as a pure function of layer, rows and (row, expert, weight) pairs.

Expert servers call it; with `servers: 0` the attention process does. Only experts that have rows are computed (EaaS, section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from flowrt.operators.dense import gated_silu
from flowrt.operators.expert_products import (
    NEVER_DENSE,
    DeviceExperts,
    GroupedExperts,
    LayerExperts,
    PanelExperts,
    Profile,
    StackedExperts,
    has_grouped_product,
    one_by_one,
    profile_size,
    take_profile,
)
from flowrt.operators.kernels.choice import kernels_for
from flowrt.operators.model_config import EXPERT_PARTS, ModelConfig, ModelError
from flowrt.operators.products import COPIED, Copied, Form, Product, can_share, form_for, lay_out
from flowrt.operators.quantized_products import panels_of, quantize, quantized_panels
from flowrt.operators.restored_weights import QuantizedMatrix
from flowrt.operators.row_blocks import ALIGNMENT_BYTES, PROOF_ROWS, WHOLE, RowBlocks
from flowrt.operators.weights import Checkpoint, Hold, allocate, torch_dtype

ACTIVATION = "activation of experts"  # name of the function in strict blocks


@dataclass(frozen=True)
class _Held:
    """The held experts of one layer; `place_E` is the place of an expert among them plus 1, or 0 when it is not held."""

    expert_ids: tuple[int, ...]
    place_E: Tensor
    experts: LayerExperts
    num_pairs_E: PairCounts


class Experts:
    """Some experts of some layers, with their weights. Holds no state between calls, so any replica gives the same response."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        held: Mapping[int, Sequence[int]],
        device: torch.device | str = "cpu",
        blocks: RowBlocks = WHOLE,
        now: Callable[[], float] | None = None,
    ) -> None:
        """`held` maps a layer to the ids of the experts to read, in any order.

        With `now`, a clock in seconds, the kind of product is chosen by measurement. Without it, or with strict blocks, the kind follows
        from the machine alone.
        """
        self.config = config
        self._blocks, self._device = blocks, device
        self._kernels = kernels_for(torch_dtype(config), device)
        self._now = None if blocks.strict else now
        self._how: Form | Profile | None = None  # how experts are held: None before the first layer is read
        self._models: dict[int, Copied[Any]] = {}  # one product in the form of each part: `over` makes others from it
        self._layers = {layer: self._read_layer(checkpoint, layer, tuple(experts)) for layer, experts in held.items()}

    def forward(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor, weight_P: Tensor) -> Tensor:
        """y_RH: for each row the weighted sum over its pairs, added in pair order. A row without pairs is zero.

        row_P (into x) and expert_P are int64. Raises ValueError when a pair names an expert that is not held.
        """
        y_PH, place_P = self._run(layer, x_RH, row_P, expert_P)
        weight_P = weight_P.to(x_RH.dtype)
        return self._kernels.weighted_sum(y_PH, place_P, row_P, weight_P, len(x_RH))

    def forward_pairs(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor) -> Tensor:
        """y_PH: for each pair, the expert applied to its row, without weights."""
        y_PH, place_P = self._run(layer, x_RH, row_P, expert_P)
        return y_PH.index_select(0, place_P)

    def num_pairs(self) -> dict[int, dict[int, int]]:
        """layer -> expert -> the pairs that were computed since the start."""
        return {
            layer: dict(zip(held.expert_ids, held.num_pairs_E.read(), strict=True))
            for layer, held in self._layers.items()
            if held.expert_ids
        }

    def _run(self, layer: int, x_RH: Tensor, row_P: Tensor, expert_P: Tensor) -> tuple[Tensor, Tensor]:
        """Results sorted by expert [P, H], and the index of each pair among them [P]."""
        held = self._layers[layer]
        found = self._kernels.sort_by_expert(x_RH, row_P, expert_P, held.place_E, len(held.expert_ids))
        if found is None:
            absent = sorted(set(expert_P.tolist()) - set(held.expert_ids))
            raise ValueError(f"layer {layer}: experts {absent} were requested but are not held here; held are {sorted(held.expert_ids)}")
        sorted_PH, place_P, counts_E = found
        held.num_pairs_E.add(counts_E)
        y_PH = self._run_in_blocks(held, sorted_PH, counts_E) if self._blocks.strict else held.experts.run(sorted_PH, counts_E)
        return y_PH, place_P

    def _run_in_blocks(self, held: _Held, sorted_PH: Tensor, counts_E: Tensor) -> Tensor:
        if isinstance(held.experts, PanelExperts):  # whose products take any rows together
            return held.experts.run_counted(sorted_PH, counts_E.tolist(), self._activate)
        pieces = [
            self._blocks.run("experts", held.experts.expert(place), sorted_PH[end - count : end])
            for place, (count, end) in enumerate(zip(counts_E.tolist(), counts_E.cumsum(0).tolist(), strict=True))
            if count
        ]
        return torch.cat(pieces) if pieces else torch.empty_like(sorted_PH)

    def _activate(self, gate_up: Tensor) -> Tensor:
        return self._blocks.run(ACTIVATION, gated_silu, gate_up)

    def prove(self) -> None:
        """Makes the proofs of strict blocks with random weights, so that they are the same in processes that hold different experts."""
        config, dtype = self.config, torch_dtype(self.config)
        generator = torch.Generator().manual_seed(config.hidden_size)
        shapes = self._shapes
        gate_up, down, x_RH = (
            torch.randn(shape, generator=generator).to(self._device, dtype) for shape in (*shapes, (PROOF_ROWS, config.hidden_size))
        )
        gate_up.div_(config.hidden_size**0.5)
        kept = config.expert_weights
        if kept == "dtype":
            form = form_for(dtype, gate_up.device.type, *shapes)
            pair = lay_out(gate_up, form), lay_out(down, form)
        else:
            pair = quantized_panels(gate_up, kept, config.activations), quantized_panels(down, kept, config.activations)
        self._blocks.run("experts", GroupedExperts([pair]).expert(0), x_RH)
        if isinstance(together := one_by_one(*([each] for each in pair)), PanelExperts):
            together.run_counted(x_RH, [PROOF_ROWS], self._activate)

    @property
    def _shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the two matrices of an expert: gate over up, and down."""
        config = self.config
        return (2 * config.expert_width, config.hidden_size), (config.hidden_size, config.expert_width)

    def _read_layer(self, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...]) -> _Held:
        config = self.config
        wrong = [expert for expert in expert_ids if not 0 <= expert < config.num_experts]
        if layer not in config.moe_layers or wrong or len(set(expert_ids)) != len(expert_ids):
            exist = f"layers {list(config.moe_layers)} have experts 0 to {config.num_experts - 1}, each held once at most"
            raise ValueError(f"layer {layer}, experts {list(expert_ids)} cannot be held: {exist}")
        place = torch.zeros(config.num_experts, dtype=torch.int64)
        place[list(expert_ids)] = torch.arange(1, len(expert_ids) + 1)
        return _Held(expert_ids, place.to(self._device), self._read_experts(checkpoint, layer, expert_ids), PairCounts(len(expert_ids)))

    def _read_experts(self, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...]) -> LayerExperts:
        """Reads each expert straight into its stack, or, for forms that copy the matrix, into a buffer that all experts share."""
        if expert_ids and self.config.expert_weights != "dtype":
            return one_by_one(*(self._quantize_each(checkpoint, layer, expert_ids, part) for part in range(2)))
        if self._how is None and expert_ids:
            self._how = self._choose_form(checkpoint, layer, expert_ids)
        if expert_ids and isinstance(self._how, str) and self._how in COPIED:
            return one_by_one(*(self._lay_out_each(self._how, checkpoint, layer, expert_ids, part) for part in range(2)))
        stacks = self._read_stacks(checkpoint.hold, checkpoint, layer, expert_ids)
        if has_grouped_product(torch_dtype(self.config), torch.device(self._device).type, *self._shapes[1]):
            return DeviceExperts(*stacks)
        return StackedExperts(*stacks, self._how if isinstance(self._how, Profile) else NEVER_DENSE)

    def _choose_form(self, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...]) -> Form | Profile:
        """How experts are held. The first layer read decides for all layers, and the first of the processes that share weights for all."""
        dtype, device_type, now = torch_dtype(self.config), torch.device(self._device).type, self._now
        if now is None or device_type != "cpu":
            return form_for(dtype, device_type, *self._shapes)

        def measure() -> Form | dict[str, Any]:
            how = take_profile(*self._read_stacks(allocate, checkpoint, layer, expert_ids[: profile_size(self._shapes, dtype)]), now)
            return asdict(how) if isinstance(how, Profile) else how

        how: Form | dict[str, Any] = checkpoint.note(f"form {self._shapes}", measure)
        return Profile(**{key: tuple(values) for key, values in how.items()}) if isinstance(how, dict) else how

    def _lay_out_each(self, form: Form, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...], part: int) -> list[Product]:
        """One matrix of each expert in a form that copies it, in shared memory if possible."""
        buffer = torch.empty(self._shapes[part], dtype=torch_dtype(self.config), device=self._device)

        def read(expert: int) -> Tensor:
            return checkpoint.read_part(self.config, EXPERT_PARTS[part], self._shapes[part], layer=layer, expert=expert, out=buffer)

        if not can_share(form):
            return [lay_out(read(expert), form) for expert in expert_ids]
        if part not in self._models:
            self._models[part] = cast("Copied[Any]", lay_out(buffer.zero_(), form))
        return self._fill(form, checkpoint, layer, expert_ids, part, read)

    def _quantize_each(self, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...], part: int) -> list[Product]:
        """One matrix of each expert in 8 bits: the stored codes, if they are those, else the nearest ones. All layers have equally many
        scales, also those that are stored in another form."""
        config, shape = self.config, self._shapes[part]
        group = config.scale_group(EXPERT_PARTS[part], shape[1])
        buffer = torch.empty(shape, dtype=torch.float32)

        def read(expert: int) -> QuantizedMatrix:
            stored = checkpoint.read_codes(config, EXPERT_PARTS[part], shape, layer=layer, expert=expert)
            if stored is None or not stored.has_groups(group):
                weight = checkpoint.read_part(config, EXPERT_PARTS[part], shape, layer=layer, expert=expert, out=buffer)
                stored = quantize(weight, config.expert_weights)
            return stored.in_groups(group)

        if part not in self._models:
            self._models[part] = panels_of(config.expert_weights, config.activations).zeros(shape, config.expert_weights, group)
        return self._fill(f"{config.expert_weights} {config.activations}", checkpoint, layer, expert_ids, part, read)

    def _fill(
        self, form: str, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...], part: int, read: Callable[[int], Any]
    ) -> list[Product]:
        """The matrices that `read` finds, in the form of the part's model."""
        model = self._models[part]

        def fill(out: Tensor) -> None:
            for memory, expert in zip(out, expert_ids, strict=True):
                try:
                    model.write(read(expert), memory[: model.num_bytes])
                except ModelError as error:
                    raise ModelError(f"{EXPERT_PARTS[part]} of expert {expert} in layer {layer}: {error}") from error

        name, size = f"{EXPERT_PARTS[part]} {form} {layer} {expert_ids}", _aligned(len(expert_ids), model.num_bytes)
        held = checkpoint.hold(name, size, torch.uint8, fill)
        return [model.over(memory[: model.num_bytes]) for memory in held]

    def _read_stacks(self, hold: Hold, checkpoint: Checkpoint, layer: int, expert_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The matrices of these experts [count, *shape], in memory of `hold`. Each matrix is aligned as a separate allocation, so that its
        place in the stack does not change any bits."""
        dtype, count = torch_dtype(self.config), len(expert_ids)

        def stack(part: str, shape: tuple[int, int]) -> Tensor:
            def unpadded(padded: Tensor) -> Tensor:
                return padded[:, : shape[0] * shape[1]].view(count, *shape)

            def fill(out: Tensor) -> None:
                for expert, matrix in zip(expert_ids, unpadded(out), strict=True):
                    checkpoint.read_part(self.config, part, shape, layer=layer, expert=expert, out=matrix)

            rows, row_bytes = _aligned(count, shape[0] * shape[1] * dtype.itemsize)
            return unpadded(hold(f"{part} {layer} {expert_ids}", (rows, row_bytes // dtype.itemsize), dtype, fill, self._device))

        gate_up, down = map(stack, EXPERT_PARTS, self._shapes)
        return gate_up, down


def _aligned(count: int, num_bytes: int) -> tuple[int, int]:
    """The shape in bytes of `count` rows of at least `num_bytes`, each aligned."""
    return count, -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


KEPT_CALLS = 256


class PairCounts:
    """`add` is for the compute thread; any thread may `read`."""

    def __init__(self, num_experts: int) -> None:
        self._sums: tuple[Tensor, list[Tensor]] = torch.zeros(num_experts, dtype=torch.int64), []

    def add(self, counts_E: Tensor) -> None:
        """Keeps the tensor, which must not change any more."""
        total_E, kept = self._sums
        kept.append(counts_E)
        if len(kept) == KEPT_CALLS:
            self._sums = _sum(total_E, kept), []  # at once, so that a reader sees both or neither

    def read(self) -> list[int]:
        total_E, kept = self._sums
        return list(_sum(total_E, list(kept)).tolist())


def _sum(total_E: Tensor, kept: list[Tensor]) -> Tensor:
    return total_E + torch.stack(kept).sum(0).to(total_E) if kept else total_E
