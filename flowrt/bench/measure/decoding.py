"""Greedy decoding of one batch: the prompts, what a run is, how fast it was, and whether two runs gave the same tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Prompts = list[list[int]]


@dataclass(frozen=True)
class DecodeRun:
    """Prefill: from the submission of all prompts to the last first token. Decode: from there to the last token, with `decode_tokens`.

    `margins`: by sequence and position, the logit of the likeliest token less that of the second; None when unknown.
    """

    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int
    tokens: list[list[int]]
    margins: list[list[float]] | None = None

    @classmethod
    def of(cls, prefill_seconds: float, times: Sequence[Sequence[float]], tokens: list[list[int]]) -> DecodeRun:
        """Computes the speeds from the times of each sequence's tokens, in seconds since the submission.

        Tokens of fast sequences before the last first token count neither as prefill nor as decode.
        """
        last = max(each[-1] for each in times)
        decode_tokens = sum(1 for each in times for seconds in each if seconds > prefill_seconds)
        return cls(prefill_seconds, last - prefill_seconds, decode_tokens, tokens)

    def speed(self, phase: str, num_prompt_tokens: int) -> float:
        """Tokens per second. "prefill": of the prompts; "decode": new ones without each sequence's first; "throughput": all new ones, from
        the submission of the prompts on."""
        if phase == "throughput":
            return sum(map(len, self.tokens)) / (self.prefill_seconds + self.decode_seconds)
        return num_prompt_tokens / self.prefill_seconds if phase == "prefill" else self.decode_tokens / self.decode_seconds


@dataclass
class TokenAgreement:
    """Sequences compared, those that differ, and the top-two margin at the first difference of each, where it is known."""

    num_compared: int = 0
    num_different: int = 0
    margins: list[float] = field(default_factory=list)

    def compare(self, ours: DecodeRun, theirs: DecodeRun) -> None:
        """Counts the sequences whose tokens differ; tokens after a first difference are not compared."""
        if len(ours.tokens) != len(theirs.tokens):
            raise ValueError(f"{len(ours.tokens)} sequences cannot be compared with {len(theirs.tokens)}")
        for number, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
            self.num_compared += 1
            place = first_difference(one, other)
            if place is None:
                continue
            self.num_different += 1
            margins = theirs.margins or ours.margins
            if margins is not None and place < len(margins[number]):
                self.margins.append(margins[number][place])

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
    """The prompts of every run of this shape, all different, without repeated text."""
    if vocab_size < 14:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is too small")
    return [[(7 * i + 13 * j) % (vocab_size - 10) + 3 for j in range(prompt_tokens)] for i in range(batch)]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where they differ, or where the shorter ends; None for equal ones."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))
