"""Compares `flowrt serve` with `transformers serve` and vLLM's server: output tokens per second of one client, on the same cores.

All servers hold the same float32 checkpoint with random weights (12 layers, 32 experts, top-4, hidden 1024) and are measured in turn with
`flowrt bench serve`; the others are idle meanwhile. Prints the median of each and the ratio of the pairs with its 95 % interval.

    python tests/serving/peers.py --transformers DIRECTORY/bin/python --vllm DIRECTORY/bin/python

`--transformers` is an interpreter with `transformers[serving]` (and torch), `--vllm` one with vLLM's CPU build; each may be left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from flowrt.bench.report.figures import Spread, median_ratio  # noqa: E402

START_SECONDS = 180.0
VOCABULARY = 32000
GRAPH = """
flowrt: 1
model: {{path: {model}, dtype: {dtype}}}
deploy: {{attention: {{groups: 1}}, experts: {{servers: 2}}}}
limits: {{max_num_seqs: 32, kv_pages: 1024, page_size: 16, max_tokens: 128}}
"""


def write_model(directory: Path) -> Path:
    """Writes a checkpoint of 2.8 GB, unless it is there, with a tokenizer that has a word for each id."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if (directory / "tokenizer_config.json").exists():
        return directory
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=names[0], bos_token=names[1], eos_token=names[2])
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[int]:
    """A server as a process group of its own; yields its port when it is healthy."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(command)}: did not start\n{log.read_text(errors='replace')[-2000:]}") from None
                time.sleep(0.2)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def tokens_per_second(port: int, model: Path, concurrency: int, options: argparse.Namespace) -> float:
    """Output tokens per second of one load. Temperature 0; a response may end early, where the model has generated an end."""
    num_prompts = concurrency * (1 if concurrency > 1 else 2)
    command = [sys.executable, "-m", "flowrt", "bench", "serve", "--port", str(port), "--model", str(model), "--tokenizer", str(model)]
    command += ["--random-input-len", "64", "--random-output-len", str(options.tokens), "--num-prompts", str(num_prompts)]
    command += ["--max-concurrency", str(concurrency), "--no-ignore-eos", "--temperature", "0"]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--save-result", "--result-dir", folder, "--result-filename", "load.json"]
        progress = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True).stderr
        result = json.loads((Path(folder) / "load.json").read_text(encoding="utf-8"))
    if result["failed"]:
        raise SystemExit(f"{' '.join(command)}\n{progress}")
    return float(result["output_throughput"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--model", type=Path, default=Path("build/peer-model"), help="written when it is missing")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="of each response")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    model = write_model(options.model.resolve())
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "graph.yaml"
        graph.write_text(GRAPH.format(model=model, dtype=options.dtype), encoding="utf-8")
        ports = {name: free_port() for name in ("flowrt", "transformers", "vllm")}
        commands = {"flowrt": [sys.executable, "-m", "flowrt", "serve", str(graph), "--served-model-name", str(model)]}
        if options.transformers:
            program = str(Path(options.transformers).with_name("transformers"))
            commands["transformers"] = [program, "serve", str(model), "--dtype", options.dtype, "--device", "cpu", "--continuous-batching"]
        if options.vllm:
            vllm = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", options.dtype]
            commands["vllm"] = [*vllm, "--max-model-len", "512", "--no-enable-prefix-caching"]
        for name, command in commands.items():
            log = Path(folder) / f"{name}.log"
            stack.enter_context(running([*command, "--host", "127.0.0.1", "--port", str(ports[name])], ports[name], log))
            print(f"{name} serves", flush=True)
        for concurrency in options.concurrency:
            rates = {name: list[float]() for name in commands}
            for pair in range(options.pairs + 1):  # the first is not counted
                for name in commands:
                    rate = tokens_per_second(ports[name], model, concurrency, options)
                    if pair:
                        rates[name].append(rate)
            print(f"concurrency {concurrency}, {options.dtype}: flowrt {Spread.of(rates['flowrt']).text('tokens/s')}", flush=True)
            for name in list(commands)[1:]:
                ratio = median_ratio(rates["flowrt"], rates[name])
                print(f"  {name} {Spread.of(rates[name]).text('tokens/s')}; ratio {ratio.text()} of {options.pairs} pairs", flush=True)


if __name__ == "__main__":
    main()
