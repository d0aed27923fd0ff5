"""Models in transformers, cut at their experts: each architecture of the installed library gives the library's own logits, in packed steps
over pages, or is refused with the reason."""

from __future__ import annotations

import functools
import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import loading_growth
from library_checkpoints import default_config, load_truth, small_config, write
from quantized_checkpoints import MXFP4, SCHEMES, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from flowrt.errors import GraphError
from flowrt.graph.file import load_graph
from flowrt.graph.written import to_yaml
from flowrt.launcher.model_facts import facts_of
from flowrt.operators import library_attention
from flowrt.operators.checkpoint_files import WHOLE_NAME, check_files
from flowrt.operators.families import library
from flowrt.operators.families.architectures import NO_TEXT, OTHER_CACHE, REASONS, library_architectures, that_run
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.kv_pages import KvPages
from flowrt.operators.library_config import model_class
from flowrt.operators.library_experts import LibraryExperts
from flowrt.operators.library_interfaces import library_alone
from flowrt.operators.library_linears import PanelLinear, lay_out_linears
from flowrt.operators.library_model import LibraryModel
from flowrt.operators.library_weights import expert_matrices, load_experts
from flowrt.operators.model_config import KeptWeights, ModelConfig, ModelError
from flowrt.operators.products import form_for, wide_levels
from flowrt.operators.proof import prove_model
from flowrt.operators.quantized_products import quantize as quantize_matrix
from flowrt.operators.state_slots import NO_STATE
from flowrt.operators.step_layout import StepLayout
from flowrt.operators.weights import Checkpoint

AT_LOADING = "jamba"  # found to be wrong when its module is loaded
REFUSED = {name: reason for name, reason in REASONS.items() if reason in (NO_TEXT, OTHER_CACHE)}
WORKS = that_run()
FIRST, SECOND = [5, 9, 33, 71, 12, 8, 90, 44, 3, 17, 60, 61, 62], [7, 7, 100, 23, 55, 2]
TABLES = [[1, 5, 3, 9], [2, 4, 7]]
PAGE_SIZE = 4


class Halves:
    """A model, and the experts of even and of odd ids on a server each."""

    def __init__(self, directory: Path) -> None:
        self.config = read_model_config(directory, implementation="transformers")
        checkpoint = Checkpoint(directory)
        self.model = LibraryModel(self.config, checkpoint)
        held = [dict.fromkeys(self.config.moe_layers, range(half, self.config.num_experts, 2)) for half in (0, 1)]
        self.servers = [LibraryExperts(self.config, checkpoint, each) for each in held]
        self.pages = KvPages.for_model(self.config, 16, PAGE_SIZE, num_slots=8)
        self.num_steps = 0
        self.has_states, self.slot_of = bool(self.config.recurrent_layers), dict[tuple[int, int], int]()

    def slots(self, queries: Sequence[int], contexts: Sequence[int]) -> list[tuple[int, int]]:
        """By sequence, the slots that a step reads and writes."""
        found = []
        for sequence, (query, context) in enumerate(zip(queries, contexts, strict=True)):
            before = NO_STATE if query == context else self.slot_of.get((sequence, context - query), NO_STATE)
            after = self.slot_of.setdefault((sequence, context), len(self.slot_of))
            found.append((before, after))
        return found

    def begin(self, tokens: Sequence[int], queries: Sequence[int], contexts: Sequence[int], key: str = "group") -> Step:
        self.num_steps += 1
        return Step(self, tokens, queries, contexts, (key, self.num_steps))

    def logits(self, tokens: Sequence[int], queries: Sequence[int], contexts: Sequence[int]) -> Tensor:
        """Of the last row of each sequence."""
        return self.begin(tokens, queries, contexts).finish()


class Step:
    """One pass, layer by layer."""

    def __init__(self, of: Halves, tokens: Sequence[int], queries: Sequence[int], contexts: Sequence[int], key: tuple[str, int]) -> None:
        self._of, self._key, self._queries, self._layer = of, key, queries, 0
        states = of.slots(queries, contexts) if of.has_states else ()
        layout = StepLayout.from_lists(queries, contexts, TABLES[: len(queries)], PAGE_SIZE, states=states)
        self._stop = of.model.begin(*key, of.model.embed(torch.tensor(tokens)), layout, of.pages)

    def advance(self) -> Tensor:
        """What the layer ends with, or its experts add up to, and go on with that to the next layer."""
        stop, of = self._stop, self._of
        assert (stop.ids_TA is not None) == (self._layer in of.config.moe_layers)
        y_TH = stop.hidden_TH
        if stop.ids_TA is not None and stop.weights_TA is not None:
            y_TH = torch.zeros_like(stop.hidden_TH)
            for half, server in enumerate(of.servers):
                rows, places = (stop.ids_TA % 2 == half).nonzero(as_tuple=True)
                pairs = rows, stop.ids_TA[rows, places]
                y_TH += server.forward(self._layer, stop.hidden_TH, *pairs, stop.weights_TA[rows, places])
        self._layer += 1
        if self._layer < of.config.num_layers:
            self._stop = of.model.resume(*self._key, y_TH)
        return y_TH

    def finish(self) -> Tensor:
        while self._layer < self._of.config.num_layers:
            y_TH = self.advance()
        ends = torch.tensor(self._queries).cumsum(0) - 1
        return self._of.model.logits(self._of.model.end(*self._key, y_TH), ends)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: write(name, tmp_path_factory.mktemp(name)))


def expected(truth: Any, *sequences: list[int]) -> Tensor:
    return torch.stack([truth(input_ids=torch.tensor([sequence])).logits[0, -1] for sequence in sequences])


def test_every_architecture_is_known() -> None:
    assert {*REASONS} <= {*library_architectures()}
    assert len(WORKS) >= 40


@pytest.mark.parametrize("name", WORKS)
def test_packed_steps_have_the_logits_of_the_library(name: str, checkpoint: Callable[[str], Path]) -> None:
    """A prompt in two chunks beside another prompt, then a decode step of both. The headers of the files have what the module needs."""
    check_files(checkpoint(name), "transformers")
    halves, truth = Halves(checkpoint(name)), load_truth(checkpoint(name))
    with torch.inference_mode():
        halves.logits(FIRST[:5], [5], [5])
        prompts = halves.logits(FIRST[5:] + SECOND, [8, 6], [13, 6])
        decoded = halves.logits([11, 13], [1, 1], [14, 7])
        torch.testing.assert_close(prompts, expected(truth, FIRST, SECOND), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(decoded, expected(truth, [*FIRST, 11], [*SECOND, 13]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_others_are_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    if reason is NO_TEXT:
        with pytest.raises(ModelError, match="no class of it that generates text alone"):
            model_class(default_config(name))
        return
    small_config(name).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="its module needs more than a pass has") as caught:
        read_model_config(tmp_path, implementation="transformers")
    assert "\n" not in str(caught.value)


def test_recurrent_layers_that_cannot_go_on_are_refused_at_loading(checkpoint: Callable[[str], Path]) -> None:
    """The module of the library gives other results for a prompt in two parts, silently."""
    with pytest.raises(ModelError, match="cannot go on with a prompt that was begun before"):
        Halves(checkpoint(AT_LOADING))


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_attention_reads_what_the_indexer_chooses(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice changes logits; scores of a few rows or sequences at a time give the same ones."""
    directory = checkpoint(name)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    values = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"index_topk": 100}))
    steps: tuple[Any, ...] = ((FIRST[:5], [5], [5]), (FIRST[5:] + SECOND, [8, 6], [13, 6]), ([11, 13], [1, 1], [14, 7]))
    with torch.inference_mode():
        whole, sparse, dense = Halves(directory), Halves(directory), Halves(tmp_path)
        assert whole.config.library is not None
        assert whole.config.library.index_tokens == values["index_topk"] == 5
        assert whole.config.kv_width == 16 + 8 + 16, "latents, rotary keys, keys of the indexer"
        for tokens, queries, contexts in steps:
            wanted, other = whole.logits(tokens, queries, contexts), dense.logits(tokens, queries, contexts)
            with monkeypatch.context() as patched:
                patched.setattr(library_attention, "MAX_INDEX_SCORES", 30)
                torch.testing.assert_close(sparse.logits(tokens, queries, contexts), wanted, rtol=1e-4, atol=1e-4)
        assert (wanted - other).abs().max() > 0.1


def test_a_context_reads_only_what_is_chosen(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step reads the latents of `index_topk` tokens, and the keys of the indexer of all."""
    halves, read = Halves(checkpoint("deepseek_v32")), list[int]()

    def note(self: KvPages, layer: int, slots_L: Tensor | slice) -> tuple[Tensor, Tensor]:
        assert isinstance(slots_L, Tensor)
        read.append(len(slots_L))
        return original(self, layer, slots_L)

    original = KvPages.read
    with torch.inference_mode():
        halves.logits(FIRST, [13], [13])
        monkeypatch.setattr(KvPages, "read", note)
        halves.logits([11], [1], [14])
    assert read == [5] * halves.config.num_layers


def test_several_passes_are_in_flight_and_one_is_dropped(checkpoint: Callable[[str], Path]) -> None:
    halves, truth = Halves(checkpoint("gpt_oss")), load_truth(checkpoint("gpt_oss"))
    with torch.inference_mode():
        wanted = expected(truth, FIRST[:8])
        dropped = halves.begin(FIRST[:6], [6], [6])
        dropped.advance()
        other = halves.begin(FIRST[:8], [8], [8], key="other")
        other.advance()
        replacing = halves.begin(FIRST[:8], [8], [8])  # takes the place of the first one, as after a rollback
        with pytest.raises(RuntimeError, match="the pass of step 1 was replaced by that of 3"):
            dropped.advance()
        torch.testing.assert_close(replacing.finish(), wanted, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(other.finish(), wanted, rtol=1e-3, atol=1e-3)


def test_an_error_of_the_module_ends_the_pass(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    halves, truth = Halves(checkpoint("gpt_oss")), load_truth(checkpoint("gpt_oss"))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("no such number")

    with torch.inference_mode():
        with monkeypatch.context() as patched:
            patched.setattr(halves.model.parts.layers[2], "forward", fail)
            with pytest.raises(ArithmeticError, match="no such number"):
                halves.logits(FIRST[:5], [5], [5])
        torch.testing.assert_close(halves.logits(FIRST[:5], [5], [5]), expected(truth, FIRST[:5]), rtol=1e-3, atol=1e-3)


def test_experts_that_are_not_held_are_refused(checkpoint: Callable[[str], Path]) -> None:
    halves = Halves(checkpoint("gpt_oss"))
    with pytest.raises(ValueError, match=r"layer 1: experts \[3\] were requested but are not held here; held are \[0, 2, 4, 6\]"):
        halves.servers[0].forward(1, torch.zeros(1, 64), torch.tensor([0]), torch.tensor([3]), torch.ones(1))


def test_tensors_are_read_one_after_another(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Checkpoint has one buffer for all that it converts or restores."""
    threads, read = set[int](), Checkpoint.read_tensor

    def note(self: Checkpoint, *args: Any) -> Tensor:
        threads.add(threading.get_ident())
        return read(self, *args)

    monkeypatch.setattr(Checkpoint, "read_tensor", note)
    Halves(checkpoint("gpt_oss"))
    assert threads == {threading.get_ident()}


def test_a_missing_tensor_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = checkpoint("gpt_oss")
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config: ModelConfig = read_model_config(directory, implementation="transformers")
    values = json.loads((directory / "config.json").read_text()) | {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.4\.\S+ is missing from the weights \(13 are\)"):
        LibraryModel(config, Checkpoint(tmp_path))


def as_mxfp4(source: Path, out: Path) -> Path:
    """Returns the folder of what its experts stand for."""
    return quantize(source, out, *MXFP4, ends=("gate_up_proj", "down_proj"))


def test_mxfp4_is_restored_as_in_transformers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    plain = as_mxfp4(checkpoint("gpt_oss"), tmp_path)
    directory = tmp_path / "quantized"
    check_files(directory)
    with library_alone():
        truth: Any = GptOssForCausalLM.from_pretrained(
            directory, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
        ).eval()
    of_files, loaded = Checkpoint(directory), dict(truth.named_parameters())
    stacked = {name: tensor for name, tensor in load_file(plain / WHOLE_NAME).items() if name.endswith(("gate_up_proj", "down_proj"))}
    assert len(stacked) == 8
    for name, tensor in stacked.items():
        assert torch.equal(tensor, loaded[name]), "the library restores what the files stand for"
        assert torch.equal(of_files.read_tensor(name, held=torch.float32), tensor)
        assert torch.equal(of_files.read_tensor(name, [1, 6]), tensor[[1, 6]].to(torch.bfloat16))
    halves = Halves(directory)
    with torch.inference_mode():
        torch.testing.assert_close(halves.logits(FIRST, [13], [13]), expected(truth, FIRST), rtol=1e-3, atol=1e-3)


def test_restoring_mxfp4_takes_no_more_memory_than_is_held(tmp_path: Path) -> None:
    """A server reads its experts alone: at its end and at its peak it has grown by 1.2 of them at most."""
    write("gpt_oss", tmp_path / "source", hidden_size=512, intermediate_size=1024, num_experts=12, num_hidden_layers=3)
    as_mxfp4(tmp_path / "source", tmp_path)
    held = 3 * 8 * 3 * 1024 * 512 * 2  # 3 layers, 8 of 12 experts
    found = loading_growth(str(tmp_path / "quantized"), "bfloat16", most=1.2 * held)
    assert all(0.95 * held < growth < 1.2 * held for growth in found)


def test_fp8_blocks_beside_an_indexer_are_restored(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As DeepSeek-V3.2 is published: its indexer has matrices in FP8, one in the model's dtype, and a layer norm; the index has another
    layer, for multi-token prediction."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint("deepseek_v32"), source)
    tensors = load_file(source / WHOLE_NAME)
    mtp = {name.replace(".layers.3.", ".layers.61."): tensor.clone() for name, tensor in tensors.items() if ".layers.3." in name}
    save_file(tensors | mtp, source / WHOLE_NAME)
    matrices = ("a_proj", "b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "_with_mqa", "wq_b", "wk")
    plain = quantize(source, tmp_path, *SCHEMES["FP8 by blocks"], ends=tuple(f"{name}.weight" for name in matrices))
    stored = load_file(tmp_path / "quantized" / WHOLE_NAME)
    assert stored["model.layers.1.self_attn.indexer.wk.weight"].dtype == torch.float8_e4m3fn
    assert stored["model.layers.1.self_attn.indexer.weights_proj.weight"].dtype == torch.float32
    halves, truth = Halves(tmp_path / "quantized"), load_truth(plain)
    with torch.inference_mode():
        torch.testing.assert_close(halves.logits(FIRST, [13], [13]), expected(truth, FIRST), rtol=1e-3, atol=1e-3)


DAMAGES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]], str]] = {
    "no scales": (lambda blocks, scales: (blocks, None), r"has no scales \(model\."),
    "no blocks": (lambda blocks, scales: (None, scales), "is missing from the weights"),
    "short scales": (lambda blocks, scales: (blocks, scales[:, :-1]), "are not blocks of MXFP4 and their scales"),
    "scales of another dtype": (lambda blocks, scales: (blocks, scales.to(torch.int32)), "are not blocks of MXFP4 and their scales"),
    "blocks of another dtype": (lambda blocks, scales: (blocks.to(torch.int8), scales), "are not blocks of MXFP4 and their scales"),
    "narrow blocks": (lambda blocks, scales: (blocks[..., :8], scales), "are not blocks of MXFP4 and their scales"),
    "few columns": (lambda blocks, scales: (blocks[:, :, :-1], scales[:, :, :-1]), r"has shape \[\d, 64, 64\], and config.json requires"),
    "few experts": (lambda blocks, scales: (blocks[:-1], scales[:-1]), r"has shape \[7, 96, 64\], and config.json requires"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_mxfp4_is_one_line(checkpoint: Callable[[str], Path], tmp_path: Path, damage: str) -> None:
    """Found in the headers, before a process starts; where it is not, when the experts are read."""
    as_mxfp4(checkpoint("gpt_oss"), tmp_path)
    (change, text), file = DAMAGES[damage], tmp_path / "quantized" / WHOLE_NAME
    tensors, name = load_file(file), "model.layers.2.mlp.experts.down_proj"
    changed = zip(("_blocks", "_scales"), change(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")), strict=True)
    save_file(tensors | {name + end: each.contiguous() for end, each in changed if each is not None}, file)
    for refuse in (check_files, Halves):
        with pytest.raises(ModelError, match=rf"tensor {name}.*{text}") as caught:
            refuse(tmp_path / "quantized")
        assert "\n" not in str(caught.value)


def test_without_the_packages_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_config("gpt_oss").save_pretrained(tmp_path)
    monkeypatch.setattr(library, "find_spec", lambda name: None if name == "greenlet" else object())
    with pytest.raises(ModelError, match=r"'gpt_oss' is not of flowrt's own families, and greenlet is not installed: pip install"):
        read_model_config(tmp_path)


def test_strict_numerics_are_refused(checkpoint: Callable[[str], Path]) -> None:
    """In both forms of a graph, and for a role."""
    text = "the modules of transformers compute rows of a batch together; write fast"
    graph: dict[str, Any] = {"flowrt": 1, "model": {"path": str(checkpoint("gpt_oss"))}, "deploy": {"experts": {"servers": 1}}}
    explicit = yaml.safe_load(to_yaml(load_graph(graph, facts_of=facts_of)))
    of_a_role = graph | {"deploy": {"attention": {"numerics": "strict"}}}
    for wrong, place in ((graph | {"numerics": "strict"}, "numerics"), (explicit | {"numerics": "strict"}, "numerics")):
        with pytest.raises(GraphError, match=f"{place}: {text}"):
            load_graph(wrong, facts_of=facts_of)
    with pytest.raises(GraphError, match=rf"deploy\.attention\.numerics: {text}"):
        load_graph(of_a_role, facts_of=facts_of)
    with pytest.raises(ModelError, match="compute rows of a batch together"):
        prove_model(checkpoint("gpt_oss"), None)


def test_models_that_are_loaded_at_once_leave_the_library_as_it_was(checkpoint: Callable[[str], Path]) -> None:
    """As workers in one process do. The library replaces functions while it makes a model; one that stayed would leave heads untied."""
    tie_weights, directory = PreTrainedModel.tie_weights, checkpoint("gpt_oss")
    config = read_model_config(directory, implementation="transformers")
    with ThreadPoolExecutor(4) as pool:
        for loaded in [pool.submit(LibraryExperts, config, Checkpoint(directory), {0: (each,)}) for each in range(4)]:
            loaded.result()
    assert PreTrainedModel.tie_weights is tie_weights


def test_a_text_model_inside_a_larger_one(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The tensors of a checkpoint that has a model of images, too, have another beginning."""
    shutil.copytree(checkpoint("mistral4"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / WHOLE_NAME)
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / WHOLE_NAME)
    truth = load_truth(checkpoint("mistral4"))
    with torch.inference_mode():
        logits = Halves(tmp_path).logits(FIRST, [13], [13])
        torch.testing.assert_close(logits, expected(truth, FIRST), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": ["x"]}, r"is \['x'\]; one of these is needed"),
        ({"text_config": {"hidden_size": 64}}, "text_config"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5; at least 1 is needed"),
        ({"num_hidden_layers": 2000, "layer_types": None}, "num_hidden_layers is 2000; 1 to 1000 are supported"),
        ({"is_causal": False}, "it is not causal"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "depend on the longest context of a batch"),
    ],
)
def test_configs_that_cannot_be_are_one_line(
    checkpoint: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    values = json.loads((checkpoint("gpt_oss") / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=reason) as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_dtype_is_that_of_the_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("bfloat16", "float16", "float32"):
        values = json.loads((checkpoint("gpt_oss") / "config.json").read_text()) | {"dtype": name}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert read_model_config(tmp_path).dtype == name


def test_an_expanded_graph_keeps_what_computes_its_model(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    keys = {"flowrt": 1, "model": {"path": str(checkpoint("mixtral")), "implementation": "transformers"}, "deploy": {}}
    graph = load_graph(keys, facts_of=facts_of)
    (tmp_path / "long.yaml").write_text(to_yaml(graph))
    assert load_graph(tmp_path / "long.yaml", facts_of=facts_of).model == graph.model


def test_a_model_that_is_dropped_leaves_nothing(checkpoint: Callable[[str], Path]) -> None:
    model = LibraryModel(read_model_config(checkpoint("gpt_oss")), Checkpoint(checkpoint("gpt_oss")))
    left = weakref.ref(model.model)
    del model
    gc.collect()
    assert left() is None


def test_scores_are_computed_in_blocks_of_rows(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Halves(checkpoint("gpt_oss"))
    with torch.inference_mode():
        whole = halves.logits(FIRST, [13], [13])
        monkeypatch.setattr(library_attention, "MAX_SCORES", 4 * 13 * 3)
        torch.testing.assert_close(halves.logits(FIRST, [13], [13]), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not wide_levels, reason="this processor has no AVX2, or there was no compiler")
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_experts_may_be_kept_in_8_bits(checkpoint: Callable[[str], Path], kept: KeptWeights) -> None:
    directory = checkpoint("gpt_oss")
    check_files(directory, "transformers", kept)
    config, weights = read_model_config(directory, expert_weights=kept), Checkpoint(directory)
    experts = LibraryExperts(config, weights, {1: (2, 5)})
    module: Any = load_experts(config, weights, {1: (2, 5)})[1]
    for name, matrix_ENK in expert_matrices(module).items():
        restored_ENK = torch.stack([quantize_matrix(matrix_NK.detach(), kept).restored() for matrix_NK in matrix_ENK])
        module._parameters[name] = torch.nn.Parameter(restored_ENK.transpose(1, 2) if module.is_transposed else restored_ENK)
    x_RH, place_P, weight_P = torch.randn(4, config.hidden_size), torch.tensor([1, 0, 1, 1]), torch.rand(4)
    expected = type(module).forward.__wrapped__(module, x_RH, place_P[:, None], weight_P[:, None])
    found = experts.forward(1, x_RH, torch.arange(4), torch.tensor([2, 5])[place_P], weight_P)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_experts_that_are_no_two_matrices_are_not_kept_in_8_bits(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match=r"an expert is a Llama4TextExperts; two matrices of a multiple of 16 rows .* write dtype"):
        check_files(checkpoint("llama4"), "transformers", "int8")


@pytest.mark.skipif(not wide_levels, reason="this processor has no AVX2, or there was no compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_products_take_the_place_of_those_of_the_library(checkpoint: Callable[[str], Path], dtype: str) -> None:
    """Of experts and of linear layers, but for a matrix that is the embedding, too."""
    config, weights = read_model_config(checkpoint("gpt_oss"), dtype), Checkpoint(checkpoint("gpt_oss"))
    experts = LibraryExperts(config, weights, {0: (1, 4, 6)})
    module = load_experts(config, weights, {0: (1, 4, 6)})[0]
    x_RH = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    row_P, expert_P, weight_P = torch.tensor([0, 1, 1, 4]), torch.tensor([6, 1, 6, 1]), torch.rand(4).to(x_RH.dtype)
    found = experts.forward(0, x_RH, row_P, expert_P, weight_P)
    place_P = torch.tensor([2, 0, 2, 0])
    expected = type(module).forward.__wrapped__(module, x_RH[row_P], place_P[:, None], weight_P[:, None])  # type: ignore[attr-defined]
    torch.testing.assert_close(
        found, torch.zeros_like(x_RH).index_add_(0, row_P, expected), rtol=2e-2, atol=1e-5 if dtype == "float32" else 1e-2
    )
    in_panels = form_for(x_RH.dtype, "cpu", (16, 32)) in ("panels", "wide panels")  # not where the library is as fast
    assert any(parameter.dim() == 3 for parameter in experts._layers[0]._module.parameters()) != in_panels
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 48), torch.nn.Linear(48, 32, bias=False), torch.nn.Linear(32, 16), torch.nn.Linear(16, 9)
    )
    model[1].weight = model[0].weight
    matrix, bias = model[2].weight.detach().clone(), model[2].bias
    lay_out_linears(model)
    assert [type(each) is PanelLinear for each in model] == [False, False, True, False]
    assert torch.equal(model[2].weight, matrix)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(model[2](x), torch.nn.functional.linear(x, matrix, bias))
