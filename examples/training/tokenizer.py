"""Builds the small model's tokenizer files.

It trains a byte-level BPE tokenizer on the text of ``questions.py`` and writes it with its chat template.

A byte-level tokenizer encodes any text, and decoding gives back exactly that text. Every digit is a separate token, and so is a
space before a digit: that token gives the model one more step to compute before it writes the first digit of a number.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.training.questions import corpus

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
EOS_TOKEN_ID = 0
PAD_TOKEN_ID = 1
VOCAB_SIZE = 768
CONTEXT_TOKENS = 512

CHAT_TEMPLATE = "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content | trim }}"
"""The last thing the user said, as it is: the model is trained on bare questions and knows no earlier turns."""


def build_tokenizer() -> Tokenizer:
    """Train the tokenizer. The result is always the same, because the text comes from a fixed seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(4000), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as ``transformers.AutoTokenizer`` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
