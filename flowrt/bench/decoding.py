"""One batch decoded greedily, by whoever: the prompts, what a run is, how fast it was, and whether two runs gave the same tokens. Pure.

Here: `prompts_of`, Run, Speed, `compare`. Not here: who decodes (graph_side.py, peer_process.py), the turns (decode.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Prompts = list[list[int]]


@dataclass(frozen=True)
class Run:
    """Prefill: from the submission of all prompts to the last first token. Decode: from there to the last token, in which
    `decode_tokens` came. `margins`: by sequence and place, by how much the likeliest token's logit was above the second; or none."""

    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int
    tokens: list[list[int]]
    margins: list[list[float]] | None = None


@dataclass
class Comparison:
    """Sequences compared, those that differ, and of each of these the top-two margin at its first difference, where it is known."""

    num_compared: int = 0
    num_different: int = 0
    margins: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.num_different:
            return f"all {self.num_compared} sequences equal"
        text = f"{self.num_different} of {self.num_compared} sequences differ"
        if self.margins:
            ordered = sorted(self.margins)
            middle = ordered[len(ordered) // 2]
            text += f", at top-two margins of logits up to {ordered[-1]:.2g} (median {middle:.2g})"
        return text


def prompts_of(batch: int, prompt_tokens: int, vocab_size: int) -> Prompts:
    """The prompts of every run of this shape, all different and of no repeated text."""
    if vocab_size < 14:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is too small")
    return [[(7 * i + 13 * j) % (vocab_size - 10) + 3 for j in range(prompt_tokens)] for i in range(batch)]


def prefill_speed(run: Run, num_prompt_tokens: int) -> float:
    """Prompt tokens per second."""
    return num_prompt_tokens / run.prefill_seconds


def decode_speed(run: Run) -> float:
    """New tokens per second, without each sequence's first."""
    return run.decode_tokens / run.decode_seconds


def compare(ours: Run, theirs: Run, into: Comparison) -> None:
    """Count the sequences whose tokens differ; what follows a first difference is not compared."""
    if len(ours.tokens) != len(theirs.tokens):
        raise ValueError(f"{len(ours.tokens)} sequences cannot be compared with {len(theirs.tokens)}")
    for number, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        into.num_compared += 1
        place = first_difference(one, other)
        if place is None:
            continue
        into.num_different += 1
        margins = theirs.margins or ours.margins
        if margins is not None and place < len(margins[number]):
            into.margins.append(margins[number][place])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where they differ, or where the shorter ends; None for equal ones."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def run_of(prefill_seconds: float, times: Sequence[Sequence[float]], tokens: list[list[int]]) -> Run:
    """A run from the times at which each sequence's tokens came, in seconds since the submission.

    Sequences that were ahead have given some tokens before the last first one: these count neither as prefill nor as decode.
    """
    last = max(each[-1] for each in times)
    decode_tokens = sum(1 for each in times for seconds in each if seconds > prefill_seconds)
    return Run(prefill_seconds, last - prefill_seconds, decode_tokens, tokens)
