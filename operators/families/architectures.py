"""The architectures of the installed transformers that call experts through its interface: those that flowrt runs, and why it refuses the
others. Free of torch and of transformers.

Tests compare this with the modules of transformers 5.23. Of another version, an architecture that is not known here is tried.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_INTERFACE = "@use_experts_implementation"  # what stands before a class of experts that can be cut off
_ROUTED = ("llama4",)  # modules that do not call their experts through it, but are let to (operators/library_scaled_experts.py)

OTHER_CACHE = "a cache of its own, or states of other kinds"
NO_TEXT = "no class that generates text alone: models of images or speech"
IN_PARTS = "recurrent layers that cannot go on with a prompt in parts, which is tried when the module is loaded"
NOT_TRIED = "not tried"
REASONS = {
    **dict.fromkeys(("deepseek_v4", "inkling", "inkling2", "minimax"), OTHER_CACHE),
    **dict.fromkeys(("deepseek_ocr2", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "mistral_large4", "muse_spark"), NO_TEXT),
    **dict.fromkeys(("openai_privacy_filter", "qwen3_omni_moe", "qwen3_vl_moe", "unlimited_ocr"), NO_TEXT),
    "jamba": IN_PARTS,
    **dict.fromkeys(("diffusion_gemma", "dots3_note", "gemma4", "qwen4_exp", "zaya"), NOT_TRIED),
}


def library_architectures() -> list[str]:
    """Those whose module calls experts through the library's interface, or is adapted to it. None without the library."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    files = sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py"))
    return [file.parent.name for file in files if file.parent.name in _ROUTED or _INTERFACE in file.read_text(encoding="utf-8")]


def that_run() -> list[str]:
    """Those of the library's architectures that run, where their config allows."""
    return [name for name in library_architectures() if name not in REASONS]


def refused() -> dict[str, list[str]]:
    """By the reason, those of the library's architectures that do not run."""
    found: dict[str, list[str]] = {}
    for name in library_architectures():
        if name in REASONS:
            found.setdefault(REASONS[name], []).append(name)
    return found
