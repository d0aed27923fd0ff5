"""`flowrt init`: write a commented graph file. It also knows where the files of `flowrt demo` are."""

from __future__ import annotations

from pathlib import Path

import flowrt
from flowrt.cli.graph import load
from flowrt.errors import UserError
from flowrt.graph.default import default_graph_text

DEMO = Path(flowrt.__file__).with_name("demo")
PROMPTS = ("What is 347 + 285?", "Count from 3 to 8")  # what the demo's model can answer


def write_graph(folder: Path, model: Path | None) -> None:
    """Write folder/graph.yaml for the model directory. Raises UserError when the file exists or the model cannot be served."""
    path = folder / "graph.yaml"
    if model is not None:
        load(DEMO / "quickstart.yaml", None, model)  # the model's errors
    text = default_graph_text(DEMO / "tiny-moe", PROMPTS) if model is None else default_graph_text(model)
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
    print(f"wrote {path}; run it: flowrt run {path}" + ("" if model is None else ' --prompt "Hello"'))
