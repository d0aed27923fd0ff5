"""The fast operators put together in one process, as the workers put them together in many. Used by tests of operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flowrt.operators.attention import attention_for
from flowrt.operators.combine import combine
from flowrt.operators.dense import DenseMlp, SharedExperts
from flowrt.operators.dispatch import partition
from flowrt.operators.embedding import Embedding
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.gate import Gate
from flowrt.operators.head import Head
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.model_config import KeptWeights
from flowrt.operators.replica_table import ReplicaTable
from flowrt.operators.state_slots import NO_STATE
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint

PAGE_TOKENS = 4


class FastModel:
    """The role modules in one process, with several expert servers, each expert on one or two of them."""

    def __init__(
        self,
        directory: Path,
        dtype: str | None = None,
        num_servers: int = 3,
        num_pages: int = 512,
        device: str = "cpu",
        kept: KeptWeights = "dtype",
    ) -> None:
        config = self.config = read_model_config(directory, dtype, weights=kept, expert_weights=kept)
        checkpoint = Checkpoint(directory)
        self.device = device
        self.embedding = Embedding(config, checkpoint, device)
        self.attention = attention_for(config, checkpoint, range(config.num_layers), device)
        self.gate = Gate(config, checkpoint, config.moe_layers, device)
        self.dense = DenseMlp(config, checkpoint, config.dense_layers, device)
        self.shared = SharedExperts(config, checkpoint, config.moe_layers, device) if config.shared_expert_width else None
        replicas = [sorted({expert % num_servers, (expert // 2) % num_servers}) for expert in range(config.num_experts)]
        self.replicas = ReplicaTable.from_lists(replicas, num_servers, device)
        held = [[expert for expert, servers in enumerate(replicas) if server in servers] for server in range(num_servers)]
        self.servers = [Experts(config, checkpoint, dict.fromkeys(config.moe_layers, experts), device) for experts in held]
        self.head = Head(config, checkpoint, device, self.embedding)
        self.pages = KvPages.for_model(config, num_pages, PAGE_TOKENS, device, num_slots=64)
        self._slots: dict[int, tuple[int, int]] = {}  # by the first page of a sequence: where its state is, and where the next one goes
        self._free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()

    def new_sequence(self, num_tokens: int) -> list[int]:
        """A page table for a sequence of up to `num_tokens`, its pages in no order."""
        return [self._free.pop() for _ in range(-(-num_tokens // PAGE_TOKENS))]

    def _next_slots(self, sequence: int) -> tuple[int, int]:
        """The slots of a step, which commits at once."""
        source, target = self._slots.get(sequence, (NO_STATE, 2 * len(self._slots)))
        self._slots[sequence] = target, target ^ 1
        return source, target

    @torch.inference_mode()
    def step(self, rows: Sequence[Sequence[int]], kv_lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits of all rows of a step, [T, V]."""
        states = [self._next_slots(table[0]) for table in tables] if self.config.recurrent_layers else []
        made = StepLayout.from_lists([len(row) for row in rows], kv_lengths, tables, PAGE_TOKENS, states=states)
        layout = StepLayout.from_tensors([tensor.to(self.device) for tensor in made.to_tensors()])
        x = self.embedding.forward(torch.tensor([token for row in rows for token in row], device=self.device))
        for layer in range(self.config.num_layers):
            residual, normed = self.attention.forward(layer, x, layout, self.pages)
            if layer in self.config.moe_layers:
                parts = partition(*self.gate.forward(layer, normed), self.replicas)
                answers = [
                    (
                        part.rows_R,
                        self.servers[part.server].forward(layer, normed[part.rows_R], part.row_P, part.expert_P, part.weight_P),
                    )
                    for part in parts
                ]
                x = combine(residual if self.shared is None else self.shared.forward(layer, normed, residual), answers)
            else:
                x = self.dense.forward(layer, normed, residual)
        return self.head.forward(x, torch.arange(layout.num_rows, device=self.device))

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, chunk_tokens: int = 16) -> list[list[int]]:
        """Greedy continuations of several prompts at once: prompts are read in chunks beside others' decode rows."""
        texts = [list(prompt) for prompt in prompts]
        read = [0] * len(texts)
        tables = [self.new_sequence(len(prompt) + num_tokens) for prompt in prompts]
        ends = [len(prompt) + num_tokens for prompt in prompts]
        while active := [index for index in range(len(texts)) if len(texts[index]) < ends[index]]:
            rows = [texts[index][read[index] : read[index] + chunk_tokens] for index in active]
            for index, row in zip(active, rows, strict=True):
                read[index] += len(row)
            logits = self.step(rows, [read[index] for index in active], [tables[index] for index in active])
            last = -1
            for index, row in zip(active, rows, strict=True):
                last += len(row)
                if read[index] == len(texts[index]):
                    texts[index].append(int(logits[last].argmax()))
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
