"""Trains the small model in ``examples/tiny-moe`` from scratch, measures its accuracy, and writes its checkpoint.

Run it from the repository's root:

    python -m examples.training.train --out examples/tiny-moe

A run is a function of its settings: the batch of a step depends only on the seed and the number of the step. So a run that resumes from
its last saved state gets the same batches as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.training.forward import hidden_states
from examples.training.optimizer import Muon
from examples.training.questions import KINDS, Question, held_out, questions
from examples.training.tokenizer import CONTEXT_TOKENS, EOS_TOKEN_ID, PAD_TOKEN_ID, build_tokenizer, write_tokenizer

ROWS_PER_STEP: dict[str, int] = {"sum": 40, "difference": 52, "sort": 36, "count": 16, "story": 8}
LENGTH_BUCKETS = (13, 14, 15, 16, 17, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, CONTEXT_TOKENS)
"""Rows run together with rows of like length, so that little is padding."""


def model_config(vocab_size: int) -> Qwen3MoeConfig:
    """The model's shape: about two million parameters, a third of them active per token."""
    return Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Questions and their answers as tokens. ``answer_BT`` marks the positions whose next token belongs to the answer."""

    token_ids_BT: Tensor
    answer_BT: Tensor
    real_BT: Tensor


def encode_rows(tokenizer: Tokenizer, batch: Sequence[Question]) -> list[Rows]:
    """Encode questions and group them by length. The end token after an answer counts as part of it."""
    prompts = tokenizer.encode_batch([question.prompt for question in batch])
    answers = tokenizer.encode_batch([question.answer for question in batch])
    buckets: dict[int, list[tuple[list[int], int]]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        token_ids = [*prompt.ids, *answer.ids, EOS_TOKEN_ID]
        bucket = next(limit for limit in LENGTH_BUCKETS if len(token_ids) <= limit)
        buckets.setdefault(bucket, []).append((token_ids, len(prompt.ids)))
    groups = []
    for _, members in sorted(buckets.items()):
        length = max(len(token_ids) for token_ids, _ in members)
        ids = torch.tensor([token_ids + [PAD_TOKEN_ID] * (length - len(token_ids)) for token_ids, _ in members])
        total = torch.tensor([len(token_ids) for token_ids, _ in members])[:, None]
        prompt_length = torch.tensor([num_prompt for _, num_prompt in members])[:, None]
        position = torch.arange(length)[None, :]
        groups.append(Rows(ids, (position >= prompt_length - 1) & (position < total - 1), position < total))
    return groups


def balance_loss(router_logits: Sequence[Tensor], real: Tensor, num_experts: int, top_k: int) -> Tensor:
    """The load-balancing loss of a batch (Fedus et al. 2021, equation 4), mean over layers; 1 when the load is even."""
    losses = []
    for logits in router_logits:
        probability = logits[real].softmax(-1)
        chosen = functional.one_hot(probability.topk(top_k, -1).indices, num_experts).sum(1).float().mean(0) / top_k
        losses.append(num_experts * (chosen * probability.mean(0)).sum())
    return torch.stack(losses).mean()


def backward(model: Qwen3MoeForCausalLM, groups: Sequence[Rows], balance: float) -> float:
    """Add the gradients of a batch to the parameters. Returns the mean loss of an answer token in nats."""
    hidden_NH, router_logits = hidden_states(model, [rows.token_ids_BT for rows in groups])
    answer_N = torch.cat([rows.answer_BT.flatten() for rows in groups])
    real_N = torch.cat([rows.real_BT.flatten() for rows in groups])
    targets_N = torch.cat([rows.token_ids_BT.roll(-1, 1).flatten() for rows in groups])
    loss = functional.cross_entropy(model.lm_head(hidden_NH[answer_N]), targets_N[answer_N])
    (loss + balance * balance_loss(router_logits, real_N, model.config.num_experts, model.config.num_experts_per_tok)).backward()
    return loss.item()


@torch.no_grad()
def num_right(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, batch: Sequence[Question]) -> int:
    """The number of questions that greedy decoding answers right, up to and including the end token.

    One forward pass over prompt and right answer decides it: greedy decoding gives the right answer exactly when, after each prefix
    of the right answer, the most likely token is the right one.
    """
    right = 0
    for rows in encode_rows(tokenizer, batch):
        hidden_NH, _ = hidden_states(model, [rows.token_ids_BT])
        likeliest = model.lm_head(hidden_NH).argmax(-1).view_as(rows.token_ids_BT)
        agrees = (likeliest == rows.token_ids_BT.roll(-1, 1)) | ~rows.answer_BT
        right += int(agrees.all(1).sum())
    return right


def accuracies(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The share of ``count`` held-out questions per kind that are answered right."""
    return {kind: num_right(model, tokenizer, held_out(kind, count)) / count for kind in KINDS}


def export(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint in the Hugging Face layout; ``model`` itself keeps its dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = Qwen3MoeForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(do_sample=False, max_new_tokens=128, eos_token_id=EOS_TOKEN_ID, pad_token_id=PAD_TOKEN_ID)
    copy.to(dtype).save_pretrained(folder)  # type: ignore[arg-type]
    (folder / "model.safetensors").chmod(0o644)
    settings = json.loads((folder / "config.json").read_text())
    # Published checkpoints of this family use this name; transformers reads both names and writes the other.
    settings["num_experts"] = settings.pop("num_local_experts", model.config.num_experts)
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    write_tokenizer(tokenizer, folder)


def train(arguments: argparse.Namespace) -> None:
    """Train to the last step, and save and measure at intervals."""
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = Qwen3MoeForCausalLM(model_config(tokenizer.get_vocab_size()))
    matrices = [p for name, p in model.named_parameters() if "proj" in name]
    others = [p for name, p in model.named_parameters() if "proj" not in name]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if arguments.matrix_lr > 0:
        optimizers.append(Muon(matrices, lr=arguments.matrix_lr, weight_decay=arguments.weight_decay))
    else:
        optimizers.append(torch.optim.AdamW(matrices, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.01))
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first_step, seconds = 0, 0.0
    if arguments.state is not None and arguments.state.exists():
        state = torch.load(arguments.state)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first_step, seconds = state["step"], state["seconds"]
    started = time.monotonic() - seconds
    for step in range(first_step, arguments.steps):
        rng = random.Random(f"{arguments.seed} {step}")
        batch = []
        for kind, count in arguments.rows.items():
            source = questions(kind, rng, held_out=False)
            batch += [next(source) for _ in range(count)]
        factor = min(1.0, (step + 1) / 100, (arguments.steps - step) / (arguments.steps * arguments.decay))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        loss = backward(model, encode_rows(tokenizer, batch), arguments.balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done = step + 1
        if done % arguments.measure_every == 0 or done == arguments.steps:
            seconds = time.monotonic() - started
            shares = {kind: round(share, 3) for kind, share in accuracies(model, tokenizer, 100).items()}
            print(json.dumps({"step": done, "seconds": round(seconds), "loss": round(loss, 4), "right": shares}), flush=True)
            if arguments.state is not None:
                state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": done, "seconds": seconds}
                arguments.state.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, arguments.state.with_suffix(".new"))
                arguments.state.with_suffix(".new").replace(arguments.state)
        if math.isnan(loss):
            raise SystemExit(f"training: the loss is not a number at step {step}; a smaller --lr or --matrix-lr would be right")
    export(model, tokenizer, arguments.out, torch.bfloat16)


def _rows_per_step(text: str) -> dict[str, int]:
    """``sort=72,sum=30`` as the usual mixture with these kinds changed."""
    changed = {kind: int(count) for kind, _, count in (part.partition("=") for part in text.split(","))}
    if not changed.keys() <= ROWS_PER_STEP.keys():
        raise argparse.ArgumentTypeError(f"unknown kind in {text!r}; the kinds are {', '.join(KINDS)}")
    return ROWS_PER_STEP | changed


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the small model from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="folder the finished checkpoint is written to")
    parser.add_argument("--state", type=Path, help="file a broken-off run goes on from; written at every measurement")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW, for embeddings, norms and gates")
    parser.add_argument("--matrix-lr", type=float, default=2e-2, help="Muon, for projections; 0 trains them with AdamW too")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--decay", type=float, default=0.5, help="share of the steps over which the learning rate falls to zero")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the loss that keeps experts evenly used")
    parser.add_argument("--rows", type=_rows_per_step, default=ROWS_PER_STEP, help="questions per step, as in sort=72,sum=30")
    parser.add_argument("--measure-every", type=int, default=125)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
