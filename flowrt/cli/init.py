"""`flowrt init`: write a commented graph file. It also knows where the files of `flowrt demo` are."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import flowrt
from flowrt.cli.graph import load
from flowrt.errors import TokenizerError, UserError
from flowrt.graph.default import default_graph_text
from flowrt.serving.tokenizer import Tokenizer

CONFIG_FILE = "config.json"
DEMO = Path(flowrt.__file__).with_name("demo")
PROMPTS = ("What is 347 + 285?", "Count from 3 to 8")  # what the demo's model can answer


def write_graph(folder: Path, model: Path | None) -> None:
    """Write folder/graph.yaml for the model directory. Raises UserError when the file exists or the model cannot be served."""
    path = folder / "graph.yaml"
    if model is not None:
        load(DEMO / "quickstart.yaml", None, model)  # the model's errors
    prompts, suggestion = (PROMPTS, "") if model is None else _first_prompt(model)
    text = default_graph_text(DEMO / "tiny-moe" if model is None else model, prompts)
    created = False
    try:
        content = text.encode()
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            created = True
            file.write(content)
    except UnicodeEncodeError:
        raise UserError(f"{model}: the path is not UTF-8, which a graph file must be; rename it") from None
    except FileExistsError as error:
        raise UserError(f"{error.filename}: exists already; give another folder") from None
    except OSError as error:
        if created:  # a part of the text would stop the next attempt
            path.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another folder") from None
    print(f"wrote {path}; run it: flowrt run {path}{suggestion}")


def _first_prompt(model: Path) -> tuple[tuple[str, ...], str]:
    """Prompts for the file, and options of flowrt run for a first prompt that the model can answer."""
    with suppress(OSError):
        if (model / CONFIG_FILE).read_bytes() == (DEMO / "tiny-moe" / CONFIG_FILE).read_bytes():
            return PROMPTS, ""
    with suppress(TokenizerError):
        if (tokenizer := Tokenizer.open(model)) is not None:
            tokenizer.check_chat_template()
            return (), ' --chat --prompt "What is the capital of France?"'
    return (), ' --prompt "Once upon a time"'
