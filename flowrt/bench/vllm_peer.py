"""The second peer of `flowrt bench decode`: vLLM's CPU build, run by path with the interpreter that has it.

Here: the child; it imports nothing of flowrt, which that interpreter need not have. Not here: who asks (peer_process.py). The protocol
is that of transformers_peer.py. A run of one new token is the prefill, and decode is a run of all less that; margins are not known.

    PYTHON vllm_peer.py MODEL DTYPE THREADS MAX_LENGTH
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any

SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def main(model: str, dtype: str, num_threads: int, max_length: int) -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print must not mix with answers
        llm = import_module("vllm").LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=max_length,
            enforce_eager=True,
            enable_prefix_caching=False,
        )

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        say({"implementations": ["vllm"], "expert_bytes": 0, "num_active": 0, "vocab_size": llm.llm_engine.model_config.get_vocab_size()})
        for line in sys.stdin:
            say(answer(llm, json.loads(line)))


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    sampling_params = import_module("vllm").SamplingParams

    def run(new_tokens: int) -> tuple[float, list[list[int]]]:
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = sampling_params(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        out = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, [list(each.outputs[0].token_ids) for each in out]

    first_seconds, _ = run(1)
    whole_seconds, tokens = run(request["new_tokens"])
    decode_seconds = max(whole_seconds - first_seconds, 1e-9)
    return {"prefill_seconds": first_seconds, "decode_seconds": decode_seconds, "tokens": tokens, "margins": None}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
