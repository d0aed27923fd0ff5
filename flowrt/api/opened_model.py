"""Opens the files of a graph's model: checks them, reads its config, loads its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flowrt.api.sampling_defaults import SamplingDefaults, read_sampling_defaults
from flowrt.api.served import max_model_len
from flowrt.gateway.gateway import ServedModel
from flowrt.graph.emulated import emulation_note
from flowrt.graph.model import Graph, ModelPart
from flowrt.launcher.events import ModelNotice
from flowrt.launcher.start_checks import check_model
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.serving.front_end_settings import ServeOptions
from flowrt.serving.tokenizer import Tokenizer
from flowrt.serving.tokenizer_process import TokenizerProcess


@dataclass(frozen=True)
class OpenedModel:
    """`tokenizer` and its process (not started): None for a folder without one. `sampling`: defaults of requests. `notes`: on files that
    contradict each other, one line each. `emulated`: whose times and bytes count, "" for those of this machine. `kept`: what weights, KV
    and rows are kept in, "" if all are as in the checkpoint."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    tokenizer_process: TokenizerProcess | None
    sampling: SamplingDefaults
    notes: tuple[str, ...]
    emulated: str = ""
    kept: str = ""

    def notices(self) -> list[ModelNotice]:
        """What the user should know of the model at the start."""
        shown = [ModelNotice(text, is_warning=False) for text in (self.emulated, self.kept, self.sampling.text) if text]
        return [*map(ModelNotice, (*self.notes, *self.sampling.notes)), *shown]

    def served(self, graph: Graph, serving: ServeOptions | None) -> ServedModel:
        """What a gateway needs to know of it. Front ends bound the active requests; callers in this process bound their own."""
        model = ServedModel.of(self.config, self.tokenizer.stream if self.tokenizer is not None else None)
        if serving is None:
            return model
        bounds = graph.serving
        length = max_model_len(graph, self.config, serving.max_model_len)
        return replace(model, max_model_len=length, max_requests=bounds.max_requests, max_prompt_tokens=bounds.max_prompt_tokens)


def open_model(graph: Graph, generation_config: str, has_chats: bool) -> OpenedModel | None:
    """The model of the graph; None for a graph that serves none. `generation_config`: see read_sampling_defaults. `has_chats`: the
    chat template is checked. Raises GraphError, TokenizerError or UserError for files that cannot be used."""
    if graph.model is None:
        return None
    notes, directory = check_model(graph), Path(graph.model.path)
    tokenizer = Tokenizer.open(directory)
    if has_chats and tokenizer is not None and (problem := tokenizer.chat_problem()):
        notes = (*notes, problem)
    config = read_model_config(directory, None, graph.model.implementation)
    process = TokenizerProcess(directory, config.vocab_size, config.eos_token_ids) if tokenizer is not None else None
    sampling = read_sampling_defaults(directory, generation_config)
    return OpenedModel(config, tokenizer, process, sampling, notes, emulation_note(graph, config), _kept_note(graph.model, config))


def _kept_note(model: ModelPart, config: ModelConfig) -> str:
    dtype = {"dtype": f"{model.dtype} in place of {config.dtype}"} if model.dtype != config.dtype else {}
    found = ", ".join(f"{key} {value}" for key, value in (dtype | model.kept).items())
    return found and f"model: {found}"
