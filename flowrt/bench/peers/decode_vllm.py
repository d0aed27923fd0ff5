"""vLLM's CPU build as the peer of `flowrt bench decode`; runs in an interpreter that need not have flowrt.

Facts and requests are those of decode_transformers.py. Prefill is a run of one new token, decode a run less that; margins are unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def open_peer(model: str, dtype: str, num_threads: str, max_length: str) -> Iterator[tuple[dict[str, Any], Callable[..., dict[str, Any]]]]:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = num_threads
    vllm = import_module("vllm")
    llm = vllm.LLM(
        model=model, skip_tokenizer_init=True, dtype=dtype, max_model_len=int(max_length), enforce_eager=True, enable_prefix_caching=False
    )

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        out = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - start, [list(each.outputs[0].token_ids) for each in out]

    def respond(prompts: list[list[int]], new_tokens: int, **unused: Any) -> dict[str, Any]:
        prefill_seconds, _ = run(prompts, 1)
        seconds, tokens = run(prompts, new_tokens)
        decode_seconds = max(seconds - prefill_seconds, 1e-9)
        return {"prefill_seconds": prefill_seconds, "decode_seconds": decode_seconds, "tokens": tokens, "margins": None}

    yield {"implementations": ["vllm"], "vocab_size": llm.llm_engine.model_config.get_vocab_size()}, respond
