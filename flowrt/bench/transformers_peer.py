"""The peer of `flowrt bench decode`, run as a module in a process of its own: transformers with a choice of expert implementations.

Here: the child. It loads a checkpoint once, then answers one JSON line per request on what was its standard output. Not here: who asks
(peer_process.py), which implementation counts (decode.py).

    python -m flowrt.bench.transformers_peer MODEL DTYPE THREADS IMPLEMENTATION...

First line out: {"implementations": [...], "expert_bytes": of one expert of one layer, "num_active": experts per row, "vocab_size": n}.
Request: {"prompts": [[id ...] ...], "new_tokens": n, "prefill": name, "decode": name, "margins": bool}; answer: {"prefill_seconds",
"decode_seconds", "tokens": [[id ...] ...], "margins": [[top-two margin ...] ...] or null}. Prefill ends with the first tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any


def main(model_path: str, dtype: str, num_threads: int, wanted: list[str]) -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print must not mix with answers
        warnings.simplefilter("ignore")
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(num_threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        expert_bytes, num_active = _experts(model)
        facts = {"expert_bytes": expert_bytes, "num_active": num_active, "vocab_size": model.config.vocab_size}
        say({"implementations": [name for name in wanted if _choose(model, name)], **facts})
        for line in sys.stdin:
            say(answer(model, json.loads(line)))


def answer(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy decoding of one batch of prompts of one length."""
    import torch

    ids = torch.tensor(request["prompts"])
    tokens: list[Any] = []
    margins: list[Any] = []

    def choose(logits: Any) -> Any:
        """Ids [S, 1] of the likeliest tokens; noted."""
        logits = logits[:, -1]
        chosen = logits.argmax(-1, keepdim=True)
        tokens.append(chosen)
        if request["margins"]:
            best = logits.float().topk(2, dim=-1).values
            margins.append(best[:, 0] - best[:, 1])
        return chosen

    with torch.inference_mode():
        _choose(model, request["prefill"])
        start = time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        chosen = choose(out.logits)
        prefill_seconds = time.perf_counter() - start
        _choose(model, request["decode"])
        start = time.perf_counter()
        for _ in range(request["new_tokens"] - 1):
            out = model(chosen, past_key_values=out.past_key_values, use_cache=True)
            chosen = choose(out.logits)
        decode_seconds = time.perf_counter() - start
    return {
        "prefill_seconds": prefill_seconds,
        "decode_seconds": decode_seconds,
        "tokens": torch.cat(tokens, dim=1).tolist(),
        "margins": torch.stack(margins, dim=1).tolist() if margins else None,
    }


def _choose(model: Any, implementation: str) -> bool:
    """Whether this build has it; from now on it is used."""
    try:
        model.set_experts_implementation(implementation)
    except (AttributeError, ImportError, KeyError, ValueError):
        return implementation == "eager" and not hasattr(model, "set_experts_implementation")
    return True


def _experts(model: Any) -> tuple[int, int]:
    """(bytes of one expert of one layer, experts per row); (0, 0) when the model does not say."""
    config = model.config
    num_active = getattr(config, "num_experts_per_tok", 0) or getattr(getattr(config, "ffn_config", None), "moe_top_k", 0)
    of_experts: dict[str, int] = {}
    num_experts = 1
    for name, parameter in model.named_parameters():
        module, _, _ = name.partition(".experts.")
        if module != name and parameter.dim() == 3:
            of_experts[module] = of_experts.get(module, 0) + parameter.nbytes
            num_experts = parameter.shape[0]
    return max(of_experts.values(), default=0) // num_experts, num_active


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])
