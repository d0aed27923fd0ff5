"""The operators of a model as things to time: what is called, and the bytes and multiplications that it needs at least."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from flowrt.costs.work import FiringLoad, Work
from flowrt.graph.kinds import kind_of
from flowrt.kinds.attention import block_work
from flowrt.operators.attention import attention_for
from flowrt.operators.combine import combine
from flowrt.operators.dense import DenseMlp, SharedExperts
from flowrt.operators.dispatch import partition
from flowrt.operators.embedding import Embedding
from flowrt.operators.experts import Experts
from flowrt.operators.gate import Gate
from flowrt.operators.head import Head
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import ModelConfig
from flowrt.operators.normalization import RowNorm
from flowrt.operators.replica_table import ReplicaTable
from flowrt.operators.row_blocks import RowBlocks
from flowrt.operators.sampling import sample
from flowrt.operators.sampling_inputs import Draw, SamplingInputs
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint, torch_dtype

PAGE_SIZE = 16
NUM_SERVERS = 2  # of dispatch and combine
INSIDE = ("attention in", "attention out")  # functions that an attention block runs through its blocks


@dataclass(frozen=True)
class OperatorCase:
    """One operator at one load. `calls`: one per layer, each with weights of its own. `work`: of one call. `inside`: the parts whose
    seconds `parts` has. `modelled`: the operator's name in a graph file, and its load, where emulation charges for it."""

    name: str
    rows: int
    work: Work
    calls: Sequence[Callable[[], Any]]
    parts: dict[str, float] | None = None  # seconds by name, which the calls add up
    inside: Sequence[CasePart] = ()
    modelled: tuple[str, FiringLoad] | None = None


@dataclass(frozen=True)
class CasePart:
    """A part of a case: the seconds under `key`, or with None the rest of the other parts."""

    name: str
    key: str | None
    work: Work


class TimedBlocks(RowBlocks):
    """Runs all rows at once, as in fast numerics, and adds up the seconds of each function."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    def run(self, name: str, function: Callable[..., Any], *rows: Tensor) -> Any:
        start = self._clock()
        result = function(*rows)
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start
        return result


@dataclass
class ModelOperators:
    """The operators of some layers of a model, with their weights."""

    config: ModelConfig
    checkpoint: Checkpoint
    layers: Sequence[int]  # layers with experts
    blocks: TimedBlocks = field(default_factory=TimedBlocks)

    def __post_init__(self) -> None:
        config, checkpoint, layers = self.config, self.checkpoint, self.layers
        everything = tuple(range(config.num_experts))
        self.embedding = Embedding(config, checkpoint)
        self.attention = attention_for(config, checkpoint, layers, "cpu", self.blocks)
        self.gate = Gate(config, checkpoint, layers)
        self.dense = DenseMlp(config, checkpoint, config.dense_layers[: len(layers)])
        self.shared = SharedExperts(config, checkpoint, layers) if config.shared_expert_width else None
        self.experts = Experts(config, checkpoint, dict.fromkeys(layers, everything))
        self.head = Head(config, checkpoint, "cpu", self.embedding)
        self.itemsize = torch_dtype(config).itemsize

    @cached_property
    def replicas(self) -> ReplicaTable:
        """Servers that hold equal shares."""
        return ReplicaTable.from_lists([[expert % NUM_SERVERS] for expert in range(self.config.num_experts)], NUM_SERVERS)

    def dispatch(self, x_TH: Tensor, expert_ids_TA: Tensor, weights_TA: Tensor) -> list[Tensor]:
        """The rows of each part."""
        return [x_TH.index_select(0, part.rows_R) for part in partition(expert_ids_TA, weights_TA, self.replicas)]

    def modelled(self, operator: str, name: str, rows: int, load: FiringLoad, calls: Sequence[Callable[[], Any]]) -> OperatorCase:
        return OperatorCase(name, rows, self.work(operator, load), calls, modelled=(operator, load))

    def work(self, operator: str, load: FiringLoad) -> Work:
        """That of an operator of graph files, by its kind."""
        work = kind_of(operator).work
        assert work is not None, operator
        return work(self.config, load)


def cases_of(model: ModelOperators, rows: int, contexts: Sequence[int], modelled_only: bool = False) -> Iterator[OperatorCase]:
    """Every operator at `rows` rows, each the newest token of a sequence; and, from 64 rows on, one prompt of that length. Attention has a
    case for each length of the sequences in `contexts`. `modelled_only`: those that a device card predicts, each with its load."""
    config, row_bytes, load = model.config, rows * model.config.hidden_size * model.itemsize, FiringLoad(rows)
    hidden, vocabulary, num_active = config.hidden_size, config.vocab_size, config.num_experts_per_token
    generator = torch.Generator().manual_seed(rows)
    x_TH = torch.randn((rows, hidden), generator=generator).to(torch_dtype(config))
    tokens_T = torch.randint(vocabulary, (rows,), generator=generator)
    yield model.modelled("embed", "embedding", rows, load, [partial(model.embedding.forward, tokens_T)])
    norm, weight_H = RowNorm(config), torch.ones(hidden, dtype=x_TH.dtype)
    norm_work = Work(2 * row_bytes + hidden * model.itemsize, 4 * rows * hidden)
    if not modelled_only:
        yield OperatorCase("norm", rows, norm_work, [partial(norm, x_TH, weight_H)])
    for context in contexts:
        name = "attention" if context == contexts[0] else f"attention, context {context}"
        yield _attention(model, name, [1] * rows, [context] * rows, x_TH)
    if rows >= 64:
        yield _attention(model, "prompt", [rows], [rows], x_TH, is_modelled=modelled_only)
    yield model.modelled("gate", "gate", rows, load, _each(model.gate.forward, model.layers, x_TH))
    expert_ids_TA = torch.rand((rows, config.num_experts), generator=generator).topk(num_active).indices
    weights_TA = torch.full((rows, num_active), 1 / num_active, dtype=x_TH.dtype)
    if not modelled_only:
        yield from _exchange(model, x_TH, expert_ids_TA, weights_TA)
        yield from _routing(model, x_TH)
    yield _experts(model, x_TH, expert_ids_TA, weights_TA)
    for name, operator, mlp, layers in (
        ("shared", "shared", model.shared, model.layers),
        ("dense", "mlp", model.dense, config.dense_layers[: len(model.layers)]),
    ):
        if mlp is not None and layers:
            yield model.modelled(operator, name, rows, load, _each(mlp.forward, layers, x_TH, x_TH))
    yield model.modelled("head", "head", rows, load, [partial(model.head.forward, x_TH, torch.arange(rows))])
    if modelled_only:
        return
    logits_SV = torch.randn((rows, vocabulary), generator=generator)
    for name, temperature in (("greedy", 0.0), ("drawing", 1.0)):
        inputs = SamplingInputs.from_draws([Draw(row, temperature, seed=row) for row in range(rows)])
        yield OperatorCase(name, rows, Work(logits_SV.nbytes), [partial(sample, logits_SV, inputs)])


def _attention(
    model: ModelOperators, name: str, query_lengths: list[int], kv_lengths: list[int], x_TH: Tensor, is_modelled: bool = True
) -> OperatorCase:
    """The block and its parts: before attention (norm, projections, positions), attention, after it."""
    config, rows = model.config, x_TH.shape[0]
    num_pages = [-(-length // PAGE_SIZE) for length in kv_lengths]
    ids = iter(torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(rows)).tolist())
    tables = [[next(ids) for _ in range(count)] for count in num_pages]
    pages = KvPages.for_model(config, sum(num_pages), PAGE_SIZE)
    for layer in model.layers:
        for block in pages.blocks(layer):
            block.normal_()  # memory that was never written is one page of zeros
    layout = StepLayout.from_lists(query_lengths, kv_lengths, tables, PAGE_SIZE)
    scores = sum(query * context - query * (query - 1) // 2 for query, context in zip(query_lengths, kv_lengths, strict=True))
    load = FiringLoad(rows, 0, sum(kv_lengths), scores)
    calls = [partial(model.attention.forward, layer, x_TH, layout, pages) for layer in model.layers]
    case = model.modelled("attention", name, rows, load, calls)
    works = block_work(config, load)
    names = (f"{name}: in", INSIDE[0]), (f"{name}: attend", None), (f"{name}: out", INSIDE[1])
    inside = tuple(CasePart(*each, work) for each, work in zip(names, works, strict=True))
    return replace(case, parts=model.blocks.seconds, inside=inside, modelled=case.modelled if is_modelled else None)


def _exchange(model: ModelOperators, x_TH: Tensor, expert_ids_TA: Tensor, weights_TA: Tensor) -> Iterator[OperatorCase]:
    """Dispatch, with the rows that are sent, and combine, over servers that hold equal shares."""
    rows, num_active = expert_ids_TA.shape
    row_bytes = model.config.hidden_size * model.itemsize
    parts = partition(expert_ids_TA, weights_TA, model.replicas)
    sent = sum(len(part.rows_R) for part in parts)
    pair_bytes = rows * num_active * (8 + model.itemsize)
    yield OperatorCase(
        "dispatch", rows, Work(2 * sent * row_bytes + 4 * pair_bytes), [partial(model.dispatch, x_TH, expert_ids_TA, weights_TA)]
    )
    outputs = [(part.rows_R, x_TH.index_select(0, part.rows_R)) for part in parts]
    work = Work((sent + 2 * rows) * row_bytes, sent * x_TH.shape[1])
    yield OperatorCase("combine", rows, work, [partial(combine, x_TH, outputs)])


def _routing(model: ModelOperators, x_TH: Tensor) -> Iterator[OperatorCase]:
    """From normed rows to the parts that are sent: as the operators do it, and as one textbook call of torch per step, to compare
    (MegaScale-Infer, section 6: gate, top-k, counts, weights and scatter in one kernel)."""
    num_active = model.config.num_experts_per_token

    def together(layer: int) -> list[Tensor]:
        return model.dispatch(x_TH, *model.gate.forward(layer, x_TH))

    def apart(weight_EH: Tensor) -> list[Tensor]:
        scores_TE = torch.softmax(x_TH @ weight_EH.T, dim=-1, dtype=torch.float32)
        best_TA, expert_ids_TA = scores_TE.topk(num_active, dim=-1)
        weight_P = (best_TA / best_TA.sum(dim=-1, keepdim=True)).to(x_TH.dtype).flatten()
        expert_P = expert_ids_TA.flatten()
        server_P = model.replicas.servers_EB[expert_P, 0]
        order_P = server_P.argsort(stable=True)
        parts = []
        for pair_P in order_P.split(server_P.bincount(minlength=NUM_SERVERS).tolist()):
            rows_R, row_P = torch.unique_consecutive(pair_P // num_active, return_inverse=True)
            parts += [x_TH[rows_R], row_P, expert_P[pair_P], weight_P[pair_P]]
        return parts

    work = model.work("gate", FiringLoad(len(x_TH)))
    yield OperatorCase("routing", len(x_TH), work, [partial(together, layer) for layer in model.layers])
    weights = [torch.randn((model.config.num_experts, model.config.hidden_size)).to(x_TH.dtype) for _ in model.layers]
    yield OperatorCase("routing: separate", len(x_TH), work, [partial(apart, weight_EH) for weight_EH in weights])


def _experts(model: ModelOperators, x_TH: Tensor, expert_ids_TA: Tensor, weights_TA: Tensor) -> OperatorCase:
    rows, num_active = expert_ids_TA.shape
    row_P = torch.arange(rows).repeat_interleave(num_active)
    expert_P, weight_P = expert_ids_TA.flatten(), weights_TA.flatten()
    calls = _each(model.experts.forward, model.layers, x_TH, row_P, expert_P, weight_P)
    return model.modelled("experts", "experts", rows, FiringLoad(expert_P.numel(), expert_P.unique().numel()), calls)


def _each(forward: Callable[..., Any], layers: Sequence[int], *inputs: Tensor) -> list[Callable[[], Any]]:
    return [partial(forward, layer, *inputs) for layer in layers]
