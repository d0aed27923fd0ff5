"""Random checkpoints for tests, in the Hugging Face layout, and what transformers makes of them: the truth.

Weights are random but scaled so that greedy decoding wanders over the vocabulary: a wrong expert, a stale key or a lost row then
changes the tokens. Used by the tests of every room: `from checkpoints import make_checkpoint`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BOS, EOS = 1, 2

# A program: it loads two thirds of the experts of a directory in a dtype, with weights kept in that or in what a third argument names, and
# prints by how many bytes its memory has grown.
MEASURE_LOADING = """
import sys
from pathlib import Path
import torch
from flowrt.operators.checkpoint_files import check_files
from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.weights import Checkpoint

def kilobytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key + ":")).split()[1])

directory, dtype = Path(sys.argv[1]), sys.argv[2]
for wide in (torch.float32, torch.bfloat16):  # the library's own code comes into memory with its first product
    torch.nn.functional.linear(torch.ones(8, 512, dtype=wide), torch.ones(768, 512, dtype=wide))
config = read_model_config(directory, dtype, expert_weights=(*sys.argv, "dtype")[3])
if config.library is not None:  # nor with its first module
    check_files(directory)
    from flowrt.operators.library_experts import LibraryExperts as Experts
Experts(config, Checkpoint(directory), {config.moe_layers[0]: [0]})  # nor flowrt's own, and its threads, with the first expert
before = {key: kilobytes(key) for key in ("VmRSS", "VmHWM", "RssAnon")}
held = [expert for expert in range(config.num_experts) if expert % 3 != 2]
experts = Experts(config, Checkpoint(directory), dict.fromkeys(config.moe_layers, held))
print(*[(kilobytes(key) - before[key]) * 1024 for key in before])
"""


def loading_growth(*arguments: str, most: float = math.inf) -> list[int]:
    """By how many bytes a process grows that loads experts: its memory, its peak, and what is its own. `arguments`: of MEASURE_LOADING.

    The kernel may add huge pages and read ahead: the least of three tries, or the first that stays below `most`.
    """
    found: list[list[int]] = []
    while len(found) < 3 and not (found and max(found[-1]) < most):
        command = [sys.executable, "-c", MEASURE_LOADING, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        found.append([int(number) for number in done.stdout.split()])
    return min(found, key=max)


def make_checkpoint(
    directory: Path,
    *,
    architecture: str = "qwen3_moe",
    seed: int = 0,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    width: int = 48,
    experts: int = 8,
    top_k: int = 2,
    vocabulary: int = 512,
    max_positions: int = 4096,
    mlp_only_layers: Sequence[int] = (),
    sparse_step: int = 1,
    normalize_topk: bool = True,
    attention_bias: bool = False,
    tied: bool = False,
    dtype: str = "float32",
    gain: float | None = None,
    shard_bytes: int | None = None,
    tokenizer: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint with random weights, as `save_pretrained` of transformers does; returns `directory`.

    `architecture` is one of those below; options that it does not have are not looked at, and `config` has keys of its own for
    config.json. `gain` multiplies the embedding (default 4; tied 0.3, or each token would follow itself), `shard_bytes` splits the weights
    into files with an index, `tokenizer` adds one that maps every byte to a token (the
    vocabulary must have 259 or more).
    """
    transformers = _transformers()
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    own: dict[str, Any]
    match architecture:
        case "qwen3_moe":
            own = {
                "head_dim": head_dim,
                "intermediate_size": 2 * hidden,
                "moe_intermediate_size": width,
                "num_experts": experts,
                "norm_topk_prob": normalize_topk,
                "mlp_only_layers": list(mlp_only_layers),
                "decoder_sparse_step": sparse_step,
                "attention_bias": attention_bias,
            }
        case "qwen3_next":
            own = {
                "head_dim": head_dim,
                "intermediate_size": 2 * hidden,
                "moe_intermediate_size": width,
                "shared_expert_intermediate_size": width + 8,
                "num_experts": experts,
                "norm_topk_prob": normalize_topk,
                "mlp_only_layers": list(mlp_only_layers),
                "layer_types": ["full_attention" if layer % 3 == 1 else "linear_attention" for layer in range(layers)],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": head_dim,
                "linear_value_head_dim": head_dim - 4,  # other than a key's, so that mixing them up fails
            }
        case "mixtral":
            own = {"head_dim": head_dim, "intermediate_size": width, "num_local_experts": experts}
        case "deepseek_v2" | "deepseek_v3":
            own = {
                "num_key_value_heads": heads,
                "intermediate_size": 2 * hidden,
                "moe_intermediate_size": width,
                "n_routed_experts": experts,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "q_lora_rank": hidden // 2,
                "kv_lora_rank": hidden // 4,
                "qk_nope_head_dim": head_dim,
                "qk_rope_head_dim": head_dim // 2,
                "v_head_dim": head_dim + 4,  # other than a key's, so that mixing them up fails
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.5,
                "attention_bias": attention_bias,
            }
        case "dbrx":
            own = {
                "ffn_config": {"ffn_hidden_size": width, "moe_num_experts": experts, "moe_top_k": top_k},
                "attn_config": {"kv_n_heads": kv_heads, "rope_theta": 10000.0, "clip_qkv": 1.5},
            }
            names = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
            names |= {"max_position_embeddings": "max_seq_len"}  # its aliases come too late for what is derived from them
            dropped = ("num_key_value_heads", "num_experts_per_tok")
            common = {names.get(key, key): value for key, value in common.items() if key not in dropped}
        case _:
            raise ValueError(f"there is no way to make a checkpoint of architecture {architecture!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = transformers.AutoConfig.for_model(architecture, **common | own | dict(config or {}))
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        _randomize(model, gain if gain is not None else 0.3 if tied else 4.0)
    sizes = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(getattr(torch, dtype)).save_pretrained(directory, **sizes)
    if tokenizer:
        _write_tokenizer(directory, vocabulary)
    return Path(directory)


@torch.no_grad()
def _randomize(model: Any, gain: float) -> None:
    norms = ("q_norm.weight", "q_a_layernorm.weight")
    sharpened = norms if any(name.endswith(norms) for name, _ in model.named_parameters()) else ("q_proj.weight",)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.3)
        else:
            parameter.normal_(1.0, 0.1)  # norms of exactly 1 would hide one that is forgotten or swapped
        if "embed" in name or "wte" in name:
            parameter.mul_(gain)
        if name.endswith(sharpened):
            parameter.mul_(3.0)  # sharp attention: evenly mixed contexts soon repeat one token
    if any("linear_attn" in name for name, _ in model.named_parameters()):
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                parameter.sub_(1.0)  # these are stored minus one
            elif name.endswith("A_log"):
                parameter.sub_(3.0).mul_(2.0)  # slow decays: a state that is lost or stale changes many tokens
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1)


def fuse_experts(source: Path, directory: Path) -> Path:
    """The same checkpoint with the experts of a layer in two tensors, `experts.gate_up_proj` and `experts.down_proj`."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        if not path.name.endswith(".index.json"):
            (directory / path.name).write_bytes(path.read_bytes())
    tensors: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    config = json.loads((source / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        if prefix + "0.down_proj.weight" not in tensors:
            continue
        experts: list[dict[str, torch.Tensor]] = [
            {kind: tensors.pop(f"{prefix}{expert}.{kind}_proj.weight") for kind in ("gate", "up", "down")}
            for expert in range(config.get("num_local_experts") or config["num_experts"])
        ]
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat((expert["gate"], expert["up"])) for expert in experts])
        tensors[prefix + "down_proj"] = torch.stack([expert["down"] for expert in experts])
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_large_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 512,
    width: int = 768,
    experts: int = 16,
    top_k: int = 2,
    vocabulary: int = 512,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a checkpoint whose experts weigh layers * experts * 3 * width * hidden * 4 bytes (as given, 302 MB), one file per layer.

    Quick, because nothing but the files is made: no model, no transformers. It runs like any other checkpoint.
    """
    directory.mkdir(parents=True, exist_ok=True)
    heads, kv_heads, head_dim = 8, 2, 64
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}

    def save(file_name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {}
        for name, shape in shapes.items():
            tensor = torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0.0, shape[-1] ** -0.5, generator=generator)
            tensors[name] = (tensor * 4.0 if "embed" in name else tensor).to(dtype)
            weight_map[name] = file_name
        save_file(tensors, directory / file_name)

    save(
        "model-head.safetensors",
        {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)},
    )
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * head_dim),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "mlp.gate.weight": (experts, hidden),
        }
        for expert in range(experts):
            for kind, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                shapes[f"{prefix}mlp.experts.{expert}.{kind}_proj.weight"] = shape
        save(f"model-layer-{layer}.safetensors", shapes)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def random_prompts(lengths: Sequence[int], *, vocabulary: int = 512, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths, without the ids that end a text."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(EOS + 1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def load_truth(directory: Path, dtype: str = "float32") -> Any:
    """The checkpoint as a transformers model."""
    return _transformers().AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def truth_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """logits [T, V] of one sequence."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def truth_continues(model: Any, prompt_ids: Sequence[int], generated: Sequence[int]) -> list[int]:
    """What transformers would choose, greedily, at each place of `generated`: equal to it exactly if it is the greedy continuation.

    One pass over the whole text, so much quicker than truth_greedy.
    """
    logits = truth_logits(model, [*prompt_ids, *generated])
    tokens: list[int] = logits[len(prompt_ids) - 1 : -1].argmax(dim=-1).tolist()
    return tokens


@torch.inference_mode()
def truth_greedy(model: Any, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation by exactly `num_tokens` ids; end-of-sequence ids do not end it."""
    input_ids, cache, generated = torch.tensor([list(prompt_ids)]), None, []
    for _ in range(num_tokens):
        output = model(input_ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        generated.append(int(output.logits[0, -1].argmax()))
        input_ids = torch.tensor([generated[-1:]])
    return generated


def _transformers() -> Any:
    """transformers, quiet. Imported here, because it takes seconds and few tests need it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer without merges: three special tokens, then one token per byte. Any text goes in and comes out unchanged."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *alphabet]
    if vocabulary < len(tokens):
        raise ValueError(f"a vocabulary of {vocabulary} has no room for {len(tokens)} tokens")
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
