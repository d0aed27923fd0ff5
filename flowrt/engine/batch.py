"""A batch: the rows of one step of one lane, as plain lists ready to become tensors.

Here: Batch, SampleSpec, build_batch. Not here: which sequences take part (scheduler.py), tensors (flowrt/workers makes them).

Legend: rows = tokens computed in this step over all its sequences; S = sequences in the step; samples = sequences that get a
token from this step (a chunk that does not reach the end of its sequence yields none).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flowrt.engine.sequence import Sequence

Part = tuple[Sequence, int]  # a sequence and how many rows it has in the step


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How one token is drawn. Its noise is a function of (seed, choice, token_index) alone, so a replay draws the same token.

    `token_index` is the place in the request's output, from 0. temperature 0 is greedy; top_k 0 and top_p 1 are off.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    token_index: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one sequence stand together, in order of position; sequences in the order of the [S] lists."""

    token_ids: list[int]  # [rows]
    positions: list[int]  # [rows]
    slots: list[int]  # [rows] where the row's KV goes: page * page_tokens + offset
    query_lengths: list[int]  # [S] rows of each sequence, in total `rows`
    kv_lengths: list[int]  # [S] positions with KV once this step is done, its own rows among them
    page_tables: list[list[int]]  # [S] the pages of positions 0 .. kv_length - 1, in order
    sample_rows: list[int]  # [samples] the last row of each sequence that gets a token
    samples: list[SampleSpec]  # [samples]
    sequence_names: list[str]  # [S] "request/attempt", for traces and error texts

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.query_lengths)

    @property
    def all_greedy(self) -> bool:
        return all(sample.temperature == 0 for sample in self.samples)


def produces_token(sequence: Sequence, num_rows: int) -> bool:
    """Whether computing the next `num_rows` tokens reaches the sequence's end, so that the next token can be drawn."""
    return sequence.num_missing_tokens == num_rows


def build_batch(parts: Iterable[Part], page_tokens: int) -> Batch:
    """The next `num_rows` uncomputed tokens of each sequence. Its pages must already cover them."""
    batch = Batch([], [], [], [], [], [], [], [], [])
    for sequence, num_rows in parts:
        start = sequence.num_computed_tokens
        end = start + num_rows
        if num_rows == 1:  # nearly always
            batch.token_ids.append(sequence.tokens[start])
            batch.positions.append(start)
            batch.slots.append(sequence.pages[start // page_tokens] * page_tokens + start % page_tokens)
        else:
            batch.token_ids.extend(sequence.tokens[start:end])
            batch.positions.extend(range(start, end))
            batch.slots.extend(sequence.pages[at // page_tokens] * page_tokens + at % page_tokens for at in range(start, end))
        batch.query_lengths.append(num_rows)
        batch.kv_lengths.append(end)
        batch.page_tables.append(sequence.pages[: -(-end // page_tokens)])
        batch.sequence_names.append(sequence.name)
        if produces_token(sequence, num_rows):
            sampling = sequence.request.sampling
            batch.sample_rows.append(len(batch.token_ids) - 1)
            batch.samples.append(
                SampleSpec(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sequence.num_output_tokens)
            )
    return batch
