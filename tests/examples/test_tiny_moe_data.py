"""The generator of the small model's questions, its split, and the tokenizer in ``examples/tiny-moe``."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from examples.training.questions import KINDS, NUM_DISTINCT, corpus, generate, held_out, is_held_out, questions

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "tiny-moe"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_answers_are_right() -> None:
    rng = random.Random(1)
    for _ in range(300):
        prompt, answer = (question := generate("sum", rng)).prompt, question.answer
        left, right = prompt.removeprefix("What is ").removesuffix("?").split(" + ")
        assert int(answer) == int(left) + int(right)
        prompt, answer = (question := generate("difference", rng)).prompt, question.answer
        left, right = prompt.removeprefix("What is ").removesuffix("?").split(" - ")
        assert int(answer) == int(left) - int(right)
        prompt, answer = (question := generate("sort", rng)).prompt, question.answer
        numbers = [int(number) for number in prompt.removeprefix("Sort ").split()]
        assert 2 <= len(numbers) <= 6
        assert [int(number) for number in answer.split()] == sorted(numbers)
        prompt, answer = (question := generate("count", rng)).prompt, question.answer
        first, last = (int(number) for number in prompt.split(" from ")[1].split(" to "))
        counted = [int(word) for word in answer.split() if word.isdigit()]
        assert (counted[0], counted[-1], len(counted)) == (first, last, abs(last - first) + 1)
        assert max(counted) <= 20


def test_a_prompt_has_one_answer() -> None:
    for kind in KINDS:
        rng = random.Random(f"one answer {kind}")
        answers: dict[str, str] = {}
        for _ in range(5000):
            question = generate(kind, rng)
            assert answers.setdefault(question.prompt, question.answer) == question.answer
            assert question.answer.startswith(" ")
            assert not question.answer.endswith(" ")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_hundred_thousand_questions(kind: str) -> None:
    assert NUM_DISTINCT[kind] >= 100_000


def test_distinct_questions_are_really_made() -> None:
    """Seen, not only computed: the generator yields more than 100 000 different prompts."""
    rng = random.Random(2)
    assert len({generate(kind, rng).prompt for _ in range(50_000) for kind in ("sum", "difference", "sort")}) > 100_000


def test_story_count_is_exact() -> None:
    """All stories are enumerable: as many appear as are claimed, and no more."""
    rng = random.Random(3)
    shorts = {prompt for _ in range(40_000) if " near " not in (prompt := generate("story", rng).prompt)}
    assert len(shorts) == 24 * 24
    assert NUM_DISTINCT["story"] == len(shorts) * (1 + 12 * 16)


def test_split_is_disjoint_and_about_a_tenth() -> None:
    for kind in KINDS:
        rng = random.Random(f"split {kind}")
        prompts = {generate(kind, rng).prompt for _ in range(10_000)}
        share = sum(is_held_out(prompt) for prompt in prompts) / len(prompts)
        assert 0.08 < share < 0.12
        source = questions(kind, random.Random(4), held_out=False)
        trained_on = {next(source).prompt for _ in range(3000)}
        measured = {question.prompt for question in held_out(kind, 200)}
        assert len(measured) == 200
        assert not trained_on & measured


def test_split_is_the_same_in_another_process() -> None:
    """Python's own hash changes from process to process; the split must not."""
    expected = {kind: [question.prompt for question in held_out(kind, 5, seed=7)] for kind in KINDS}
    code = (
        "import json; from examples.training.questions import KINDS, held_out;"
        "print(json.dumps({k: [q.prompt for q in held_out(k, 5, seed=7)] for k in KINDS}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == expected


def test_split_does_not_move() -> None:
    """Pinned: a committed model was trained on this side of the split, so it may not change silently."""
    held = [total for total in range(40) if is_held_out(f"What is {total} + 1?")]
    assert held == HELD_OUT_PLUS_ONE


HELD_OUT_PLUS_ONE = [3, 17, 33, 36]


def test_tokenizer_gives_back_every_text(tokenizer: Tokenizer) -> None:
    for text in corpus(500, seed=5):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("text", ["", " ", "  two  spaces ", "Grüße, 世界!\n\ttabs", "x = 3.14e-10", "\N{SNOWMAN}\x00\x7f", "a" * 3000])
def test_tokenizer_takes_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_prompt_and_answer_meet_at_a_token_border(tokenizer: Tokenizer) -> None:
    """Otherwise the prompt a user types would not be the tokens the model was trained on."""
    for kind in KINDS:
        for question in held_out(kind, 100):
            whole = tokenizer.encode(question.prompt + question.answer).ids
            assert whole == tokenizer.encode(question.prompt).ids + tokenizer.encode(question.answer).ids


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("What is 347 + 285?").tokens == ["What", "Ġis", "Ġ", "3", "4", "7", "Ġ+", "Ġ", "2", "8", "5", "?"]


def test_streamed_prefixes_grow(tokenizer: Tokenizer) -> None:
    """Decoding more and more tokens only ever adds text."""
    for kind in KINDS:
        token_ids = tokenizer.encode(held_out(kind, 1)[0].answer).ids
        texts = [tokenizer.decode(token_ids[:length]) for length in range(len(token_ids) + 1)]
        assert all(later.startswith(earlier) and later != earlier for earlier, later in itertools.pairwise(texts))


def test_prompt_file_holds_held_out_questions_of_every_kind() -> None:
    lines = (REPOSITORY / "examples" / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 8
    assert all(is_held_out(prompt) for prompt in prompts)
    for word in (" + ", " - ", "Sort ", "Count ", "Tell a story "):
        assert any(word in prompt for prompt in prompts)
