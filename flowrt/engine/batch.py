"""A batch: the rows of one step of one micro-batch, as plain lists that a worker turns into tensors.

Legend: rows = tokens computed in this step over all its sequences; S = sequences in the step; samples = tokens that the step draws: one of
each sequence (a chunk that does not reach its end yields none), in a prefill worker one of each choice.

With strict numerics output is computed in decode rows, also when it is replayed: then several rows of one sequence count as that many
sequences with the same pages. A layer stores the keys and values of all rows before any row reads them, so each row has the bits that it
had in a step of its own. A recurrent layer computes them one after the other: each begins with the state that the one before has written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flowrt.engine.constraint import Constraint
from flowrt.engine.sequence import Sequence
from flowrt.engine.state_memory import StepSlots
from flowrt.sampling_params import SamplingParams

Part = tuple[Sequence, int]  # a sequence and how many rows it has in the step


class ScoreSpec(NamedTuple):
    """A token of a prompt whose logprob is wanted, and those of `num_logprobs` likeliest: `row` has the logits for its place."""

    row: int
    token_id: int
    num_logprobs: int


class SampleSpec(NamedTuple):
    """How one token is drawn. Its noise is a function of (seed, choice, token_index) alone, so a replay draws the same token.

    `token_index` is the position in the choice's output, from 0. `output_counts`: with penalties, each token of prompt and output and
    how often it is in the output. The collections and the `constraint` belong to the sequence: read them before the step ends, and never
    write to them.
    """

    params: SamplingParams
    seed: int
    token_index: int
    choice: int = 0
    output_counts: Mapping[int, int] | None = None
    forbidden_token_ids: Collection[int] = ()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a sequence are contiguous, in order of position; sequences are in the order of the [S] lists."""

    token_ids: list[int]  # [rows]
    query_lengths: list[int]  # [S] rows of each sequence, in total `rows`
    kv_lengths: list[int]  # [S] positions with KV once this step is done, its own rows among them
    page_tables: list[list[int]]  # [S] the pages of positions 0 .. kv_length - 1, in order
    sample_rows: list[int]  # [samples] the last row of each sequence that gets a token, once for each of its choices
    samples: list[SampleSpec]  # [samples]
    scores: list[ScoreSpec]  # in the order of the sequences
    sampled_requests: list[tuple[str, int]]  # [samples] request and attempt
    sequence_names: list[str]  # [S] "request/attempt" or "request/attempt/choice", for traces and error texts
    slots: list[StepSlots] = field(default_factory=list)  # [S] of the states of recurrent layers; empty: the model has none

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.query_lengths)


def produces_token(sequence: Sequence, num_rows: int) -> bool:
    """Whether computing the next `num_rows` tokens reaches the sequence's end, so that the next token can be drawn."""
    return sequence.num_missing_tokens == num_rows


def num_scores(sequence: Sequence, num_rows: int) -> int:
    """How many of the next rows have the logits for a token of the prompt whose logprob is wanted."""
    num_left = sequence.num_prompt_tokens - 1 - sequence.num_computed_tokens
    return min(num_rows, num_left) if sequence.scores_prompt else 0


def build_batch(parts: Iterable[Part], page_size: int, *, is_strict: bool = False) -> Batch:
    """The next `num_rows` uncomputed tokens of each sequence. Its memory must already cover them."""
    batch = Batch([], [], [], [], [], [], [], [], [])
    for sequence, num_rows in parts:
        start = sequence.num_computed_tokens
        end = start + num_rows
        for at in range(num_scores(sequence, num_rows)):
            following = sequence.tokens[start + at + 1]
            batch.scores.append(ScoreSpec(len(batch.token_ids) + at, following, sequence.request.params.prompt_logprobs or 0))
        batch.token_ids.extend(sequence.tokens[start:end])
        query_length = 1 if is_strict and start >= sequence.num_prompt_tokens else num_rows
        for kv_length in range(start + query_length, end + 1, query_length):
            batch.query_lengths.append(query_length)
            batch.kv_lengths.append(kv_length)
            batch.page_tables.append(sequence.holding.pages[: -(-kv_length // page_size)])
            if (slots := sequence.holding.step_slots) is not None:
                batch.slots.append(slots if kv_length == start + query_length else StepSlots(slots.target, slots.target))
            batch.sequence_names.append(sequence.name)
        for choice in sequence.choices if end == len(sequence.tokens) else ():
            batch.sample_rows.append(len(batch.token_ids) - 1)
            batch.sampled_requests.append((sequence.request.id, sequence.request.attempt))
            batch.samples.append(
                SampleSpec(
                    sequence.request.params,
                    sequence.request.seed,
                    sequence.num_output_tokens,
                    choice,
                    sequence.output_counts,
                    sequence.forbidden_token_ids,
                    sequence.constraint,
                )
            )
    return batch
