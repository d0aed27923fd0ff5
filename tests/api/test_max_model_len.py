"""The longest context of a served graph: what model and graph allow, and one line for an option that asks for more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrt.api.opening import read_graph
from flowrt.api.served import max_model_len
from flowrt.errors import UserError
from flowrt.operators.families.registry import read_model_config

TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"


@pytest.mark.parametrize(
    ("pages", "chosen", "found"),
    [
        (512, None, 512),
        (512, 100, 100),
        (512, 512, 512),
        (4, None, 64),
        (512, 513, "--max-model-len is 513, the model has 512 positions (config.json); write that number or fewer"),
        (
            4,
            65,
            "--max-model-len is 65, a group holds 64 tokens (limits.kv_pages x limits.page_size); write fewer, or --set limits.kv_pages=5",
        ),
    ],
)
def test_what_is_possible_and_what_is_refused(pages: int, chosen: int | None, found: int | str) -> None:
    graph = read_graph(TINY, [f"limits.kv_pages={pages}"])
    config = replace(read_model_config(TINY), max_position_embeddings=512)
    if isinstance(found, int):
        assert max_model_len(graph, config, chosen) == found
    else:
        with pytest.raises(UserError) as error:
            max_model_len(graph, config, chosen)
        assert str(error.value) == found
