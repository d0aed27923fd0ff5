"""The small model in ``examples/tiny-moe`` answers held-out questions right, and its folder has what its README lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from examples.training.questions import KINDS, held_out

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
NUM_MEASURED = 200
LOWEST_SHARE = 0.95


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL, padding_side="left")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.eval()
    return model


def _answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """What the model writes after each prompt, greedily, up to its end token."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.inference_mode():
        output_ids = model.generate(**inputs, do_sample=False, max_new_tokens=100)  # type: ignore[operator]
    return tokenizer.batch_decode(output_ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_questions_are_answered_right(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    questions = held_out(kind, NUM_MEASURED)
    answers = _answers(model, tokenizer, [question.prompt for question in questions])
    wrong = [(q.prompt, q.answer, answer) for q, answer in zip(questions, answers, strict=True) if answer != q.answer]
    assert len(wrong) <= (1 - LOWEST_SHARE) * NUM_MEASURED, wrong


def test_prompt_file_is_answered_right(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The eight prompts a newcomer sees first."""
    prompts = [json.loads(line)["prompt"] for line in (MODEL.parent / "prompts.jsonl").read_text().splitlines()]
    answers = dict(zip(prompts, _answers(model, tokenizer, prompts), strict=True))
    for prompt, answer in answers.items():
        words = prompt.rstrip("?.").split()
        if words[0] == "What":
            left, operator, right = int(words[2]), words[3], int(words[4])
            assert answer == f" {left + right if operator == '+' else left - right}"
        elif words[0] == "Sort":
            assert answer == "".join(f" {number}" for number in sorted(map(int, words[1:])))
        elif words[:2] == ["Count", "from"]:
            assert answer == "".join(f" {number}" for number in range(int(words[2]), int(words[4]) + 1))
        else:
            assert len(answer.split()) > 10


def test_one_prompt_alone_is_answered_without_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert _answers(model, tokenizer, ["What is 347 + 285?"]) == [" 632"]


def test_folder_is_small_and_complete() -> None:
    sizes = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sizes.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert sum(sizes.values()) <= 8 * 1024 * 1024


def test_configuration_is_what_the_quickstart_needs() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_experts"] >= 8
    assert config["num_experts_per_tok"] == 2
    assert config["norm_topk_prob"] is True


def test_chat_template_is_the_bare_question(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2? "}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "What is 2 + 2?"


def test_every_expert_is_used(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """No expert server would idle: on mixed questions each expert of each layer gets at least a tenth of an even share."""
    text = [question.prompt + question.answer for kind in KINDS for question in held_out(kind, 20)]
    inputs = tokenizer(text, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.inference_mode():
        router_logits = model(**inputs, output_router_logits=True).router_logits
    real = inputs["attention_mask"].reshape(-1).bool()
    for logits in router_logits:
        chosen = logits[real].topk(2, -1).indices.reshape(-1).bincount(minlength=model.config.num_experts)
        assert chosen.min() >= 0.1 * chosen.sum() / model.config.num_experts
