"""Generates the training questions and the held-out questions of the small model.

There are five kinds of question, each with exactly one right answer, drawn from a random generator. The module also splits them into
training and held-out questions, and gives the text for building the tokenizer. It uses the standard library only.

A prompt is plain text without a template. Its answer begins with one space, so that prompt + answer is one readable line.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from examples.training.stories import NUM_STORIES, random_story

HELD_OUT_SHARE = 10
"""One question in this many is held out: never trained on, only measured."""

LARGEST_OPERAND = 999
LARGEST_COUNT = 20
MOST_SORTED = 6

_THINGS = (
    "apples",
    "birds",
    "boats",
    "books",
    "cups",
    "doors",
    "eggs",
    "hats",
    "keys",
    "lamps",
    "shoes",
    "stars",
    "steps",
    "stones",
    "trees",
)
_COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "silver", "white", "yellow")
_SIZES = ("big", "little", "long", "new", "old", "round")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as a user types it, and its only right answer, which starts with a space and ends where generation stops."""

    kind: str
    prompt: str
    answer: str


def _operand(rng: random.Random) -> int:
    """A number from 0 to 999. Small numbers are drawn more often than others, so that the model learns short numbers too."""
    return rng.randint(0, rng.choice((9, 99, LARGEST_OPERAND, LARGEST_OPERAND, LARGEST_OPERAND)))


def _sum(rng: random.Random) -> Question:
    left, right = _operand(rng), _operand(rng)
    return Question("sum", f"What is {left} + {right}?", f" {left + right}")


def _difference(rng: random.Random) -> Question:
    left, right = _operand(rng), _operand(rng)
    return Question("difference", f"What is {left} - {right}?", f" {left - right}")


def _sort(rng: random.Random) -> Question:
    num_numbers = rng.randint(2, MOST_SORTED)
    if rng.random() < 0.5:
        numbers = rng.sample(range(rng.choice((20, 100, 1000, 1000))), num_numbers)
    else:  # of mixed lengths, as people write them
        numbers = []
        while len(numbers) < num_numbers:
            number = rng.randrange(rng.choice((10, 100, 1000)))
            numbers += [number] if number not in numbers else []
    return Question("sort", "Sort " + " ".join(map(str, numbers)), "".join(f" {number}" for number in sorted(numbers)))


def _count(rng: random.Random) -> Question:
    first, last = rng.sample(range(LARGEST_COUNT + 1), 2)
    step = 1 if first < last else -1
    numbers = "".join(f" {number}" for number in range(first, last + step, step))
    if rng.random() < 0.3:
        return Question("count", f"Count from {first} to {last}", numbers)
    things = f"{rng.choice(_SIZES)} {rng.choice(_COLOURS)} {rng.choice(_THINGS)}"
    return Question("count", f"Count the {things} from {first} to {last}", f"{numbers} {things}")


def _story(rng: random.Random) -> Question:
    return Question("story", *random_story(rng))


_MAKERS: dict[str, Callable[[random.Random], Question]] = {
    "sum": _sum,
    "difference": _difference,
    "sort": _sort,
    "count": _count,
    "story": _story,
}

KINDS: tuple[str, ...] = tuple(_MAKERS)


def _num_sorts() -> int:
    """The number of ordered selections of 2 to 6 different numbers below 1000."""
    total, choices = 0, 1000
    for length in range(2, MOST_SORTED + 1):
        choices *= 1000 - length + 1
        total += choices
    return total


_NUM_COUNTS = (LARGEST_COUNT + 1) * LARGEST_COUNT

NUM_DISTINCT: dict[str, int] = {
    "sum": (LARGEST_OPERAND + 1) ** 2,
    "difference": (LARGEST_OPERAND + 1) ** 2,
    "sort": _num_sorts(),
    "count": _NUM_COUNTS * (1 + len(_SIZES) * len(_COLOURS) * len(_THINGS)),
    "story": NUM_STORIES,
}
"""How many different prompts each kind has. Every kind alone has more than 100 000."""


def generate(kind: str, rng: random.Random) -> Question:
    """Draw a question of a kind (a name in :data:`KINDS`), held out or not. ``KeyError`` for an unknown kind."""
    return _MAKERS[kind](rng)


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out tenth. It depends on the text only, so it is the same on every machine and in every run."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def questions(kind: str, rng: random.Random, *, held_out: bool) -> Iterator[Question]:
    """Yield questions of one kind from one side of the split without end; they may repeat."""
    while True:
        question = generate(kind, rng)
        if is_held_out(question.prompt) == held_out:
            yield question


def held_out(kind: str, count: int, seed: int = 0) -> list[Question]:
    """``count`` different held-out questions of a kind, the same for the same seed."""
    found: dict[str, Question] = {}
    for question in questions(kind, random.Random(f"held-out {kind} {seed}"), held_out=True):
        found.setdefault(question.prompt, question)
        if len(found) == count:
            break
    return list(found.values())


def corpus(count: int, seed: int = 0) -> Iterator[str]:
    """``count`` questions with their answers per kind, for building the tokenizer. It contains no held-out questions."""
    for kind in KINDS:
        source = questions(kind, random.Random(f"corpus {kind} {seed}"), held_out=False)
        for _ in range(count):
            question = next(source)
            yield question.prompt + question.answer
