"""MixServe's grammar of parallel strategies (section III-B): parsed, written, enumerated. Pure.

    strategy -> Decoder | Decoder [PP = degree]        parallel -> TP = degree | DP = degree (attention) | EP = degree (experts)
    Decoder  -> block, block (attention, experts)      block    -> parallel | parallel + parallel (inside nodes + between them)

TP=4 + DP=8, TP=8 + EP=4: four devices share each attention group, eight each expert, on 32 devices. A single block stands for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flowrt.errors import UserError, shown
from flowrt.operators.model_config import ModelConfig

_PARALLEL = re.compile(r"(TP|DP|EP)\s*=\s*([1-9][0-9]{0,5})")
_PIPELINE = re.compile(r"\[\s*PP\s*=\s*([1-9][0-9]{0,5})\s*\]\s*$")
_EXAMPLE = "write it as 'TP=4 + DP=8, TP=8 + EP=4' or 'TP=8 [PP=4]'"
MAX_PIPELINE = 8  # stages that are tried: each adds its own wait to every token


@dataclass(frozen=True, order=True)
class Strategy:
    """Degrees of parallelism of one instance. The devices of a stage: `attention_tp` x `data` = `expert_tp` x `expert`."""

    attention_tp: int
    data: int
    expert_tp: int
    expert: int
    pipeline: int = 1

    @property
    def num_devices(self) -> int:
        return self.attention_tp * self.data * self.pipeline

    def __str__(self) -> str:
        attention = _block(("TP", self.attention_tp), ("DP", self.data))
        experts = _block(("TP", self.expert_tp), ("EP", self.expert))
        whole = attention if attention == experts and "TP" in attention else f"{attention}, {experts}"
        return whole + (f" [PP={self.pipeline}]" if self.pipeline > 1 else "")


def _block(*parallels: tuple[str, int]) -> str:
    return " + ".join(f"{name}={degree}" for name, degree in parallels if degree > 1) or f"{parallels[1][0]}=1"


def parse_strategy(text: str) -> Strategy:
    """The strategy that a text of the grammar names. Raises UserError for another text, and for blocks of different sizes."""
    rest, pipeline = text.strip(), 1
    if (found := _PIPELINE.search(rest)) is not None:
        rest, pipeline = rest[: found.start()], int(found[1])
    blocks = rest.split(",")
    if len(blocks) > 2:
        raise UserError(f"strategy {shown(text)}: has {len(blocks)} blocks, attention and experts are two; {_EXAMPLE}")
    attention = _degrees(text, blocks[0], "DP")
    if len(blocks) == 1 and attention["DP"] > 1:
        raise UserError(f"strategy {shown(text)}: the block of the experts is missing; {_EXAMPLE}")
    experts = _degrees(text, blocks[-1], "EP")
    strategy = Strategy(attention["TP"], attention["DP"], experts["TP"], experts["EP"], pipeline)
    if (sizes := (strategy.attention_tp * strategy.data, strategy.expert_tp * strategy.expert)) and sizes[0] != sizes[1]:
        raise UserError(f"strategy {shown(text)}: attention takes {sizes[0]} devices, experts take {sizes[1]}; make both equal")
    return strategy


def _degrees(text: str, block: str, spread: str) -> dict[str, int]:
    """TP, and DP or EP, of one block."""
    found = {"TP": 1, spread: 1}
    parts = [part.strip() for part in block.split("+")]
    for part in parts:
        match = _PARALLEL.fullmatch(part)
        if match is None or match[1] not in found or len(parts) > 2:
            raise UserError(f"strategy {shown(text)}: {shown(block.strip())} is not a block of TP and {spread}; {_EXAMPLE}")
        found[match[1]] *= int(match[2])
    return found


def strategies(model: ModelConfig, num_devices: int, per_node: int) -> Iterator[Strategy]:
    """All strategies of so many devices, `per_node` of them in a node: TP and PP are powers of two (rule 9), and DP and EP take the rest,
    so that 288 devices have strategies, too. TP over nodes is tried where a whole stage is one TP group only: it is slow anywhere else."""
    for pipeline in _powers(min(MAX_PIPELINE, num_devices, model.num_layers)):
        if num_devices % pipeline:
            continue
        ranks = num_devices // pipeline
        degrees = [degree for degree in _powers(ranks) if ranks % degree == 0 and (degree <= per_node or degree == ranks)]
        for attention_tp in (degree for degree in degrees if shards(model, degree)):
            for expert_tp in (degree for degree in degrees if shards(model, degree)):
                if ranks // expert_tp <= model.num_experts * 2:  # beyond, a rank would hold no expert of its own
                    yield Strategy(attention_tp, ranks // attention_tp, expert_tp, ranks // expert_tp, pipeline)


def shards(model: ModelConfig, degree: int) -> bool:
    """Whether so many ranks can share attention and the dense parts."""
    return not (model.num_heads % degree or model.vocab_size % degree or model.expert_width % degree)


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]
