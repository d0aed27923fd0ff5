"""The training script's own forward pass, its optimizer, and its way of measuring, against transformers and plain algebra."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3MoeForCausalLM

from examples.training.forward import hidden_states
from examples.training.optimizer import orthogonalized
from examples.training.questions import KINDS, held_out
from examples.training.train import encode_rows, model_config

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"


def _model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = model_config(768)
    config.num_hidden_layers = 2
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms start at one, which would hide a forgotten weight
            parameter.data.uniform_(0.5, 1.5)
    return model


def test_forward_and_gradients_equal_transformers() -> None:
    model = _model()
    groups = encode_rows(Tokenizer.from_file(str(MODEL / "tokenizer.json")), [held_out(kind, 1)[0] for kind in KINDS])
    assert len(groups) > 2
    hidden_NH, router_logits = hidden_states(model, [rows.token_ids_BT for rows in groups])
    answer_N = torch.cat([rows.answer_BT.flatten() for rows in groups])
    targets_N = torch.cat([rows.token_ids_BT.roll(-1, 1).flatten() for rows in groups])[answer_N]
    functional.cross_entropy(model.lm_head(hidden_NH[answer_N]), targets_N, reduction="sum").backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()

    theirs, offset = [], 0
    for rows in groups:
        outputs = model.model(rows.token_ids_BT, use_cache=False, output_router_logits=True)
        theirs.append(outputs.last_hidden_state.flatten(0, 1))
        count = rows.token_ids_BT.numel()
        for mine, reference in zip(router_logits, outputs.router_logits, strict=True):
            torch.testing.assert_close(mine[offset : offset + count], reference, rtol=1e-4, atol=1e-5)
        offset += count
    torch.testing.assert_close(hidden_NH, torch.cat(theirs), rtol=1e-4, atol=1e-5)
    functional.cross_entropy(model.lm_head(torch.cat(theirs)[answer_N]), targets_N, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max()), msg=name)


def test_rows_mark_exactly_the_answer() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for kind in KINDS:
        question = held_out(kind, 1)[0]
        (rows,) = encode_rows(tokenizer, [question])
        targets = rows.token_ids_BT.roll(-1, 1)[rows.answer_BT].tolist()
        assert targets[-1] == model_config(768).eos_token_id
        assert tokenizer.decode(targets[:-1]) == question.answer


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 16), (2, 32, 8), (2, 8, 32)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.3
