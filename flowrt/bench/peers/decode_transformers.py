"""transformers as the peer of `flowrt bench decode`, with a choice of expert implementations.

Facts: {"implementations": [...], "expert_bytes": of one expert of one layer, "num_active": experts per row, "vocab_size": n}.
Request: {"prompts": [[id ...] ...], "new_tokens": n, "prefill": name, "decode": name, "margins": bool}. Response: {"prefill_seconds",
"decode_seconds", "tokens": [[id ...] ...], "margins": [[top-two margin ...] ...] or null}. Prefill ends with the first tokens.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def open_peer(
    model_path: str, dtype: str, num_threads: str, *wanted: str
) -> Iterator[tuple[dict[str, Any], Callable[..., dict[str, Any]]]]:
    warnings.simplefilter("ignore")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(int(num_threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    expert_bytes, num_active = _experts(model)
    facts = {"expert_bytes": expert_bytes, "num_active": num_active, "vocab_size": model.config.vocab_size}

    def respond(prompts: list[list[int]], new_tokens: int, prefill: str, decode: str, margins: bool) -> dict[str, Any]:
        """Greedy decoding of one batch of prompts of one length."""
        tokens: list[Any] = []
        distances: list[Any] = []

        def select_tokens(logits: Any) -> Any:
            """Ids [S, 1] of the likeliest tokens, which are recorded."""
            logits = logits[:, -1]
            chosen = logits.argmax(-1, keepdim=True)
            tokens.append(chosen)
            if margins:
                best = logits.float().topk(2, dim=-1).values
                distances.append(best[:, 0] - best[:, 1])
            return chosen

        with torch.inference_mode():
            _set_experts(model, prefill)
            start = time.perf_counter()
            out = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            chosen = select_tokens(out.logits)
            prefill_seconds = time.perf_counter() - start
            _set_experts(model, decode)
            start = time.perf_counter()
            for _ in range(new_tokens - 1):
                out = model(chosen, past_key_values=out.past_key_values, use_cache=True)
                chosen = select_tokens(out.logits)
            decode_seconds = time.perf_counter() - start
        return {
            "prefill_seconds": prefill_seconds,
            "decode_seconds": decode_seconds,
            "tokens": torch.cat(tokens, dim=1).tolist(),
            "margins": torch.stack(distances, dim=1).tolist() if margins else None,
        }

    yield {"implementations": [name for name in wanted if _set_experts(model, name)], **facts}, respond


def _set_experts(model: Any, implementation: str) -> bool:
    """Uses this expert implementation; False when this build of transformers does not have it."""
    try:
        model.set_experts_implementation(implementation)
    except (AttributeError, ImportError, KeyError, ValueError):
        return implementation == "eager" and not hasattr(model, "set_experts_implementation")
    return True


def _experts(model: Any) -> tuple[int, int]:
    """(bytes of one expert of one layer, experts per row); 0 where the model does not define it."""
    config = model.config
    num_active = getattr(config, "num_experts_per_tok", 0) or getattr(getattr(config, "ffn_config", None), "moe_top_k", 0)
    layer_bytes: dict[str, int] = {}
    num_experts = 1
    for name, parameter in model.named_parameters():
        module, _, _ = name.partition(".experts.")
        if module != name and parameter.dim() == 3:
            layer_bytes[module] = layer_bytes.get(module, 0) + parameter.nbytes
            num_experts = parameter.shape[0]
    return max(layer_bytes.values(), default=0) // num_experts, num_active
