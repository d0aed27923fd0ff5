"""The requests of a chaos run."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrt.chaos.load import requests_of
from flowrt.engine.constraint_builder import ConstraintBuilder
from flowrt.errors import UserError
from flowrt.graph.settings import GraphLimits

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"


def test_every_request_of_a_constrained_load_has_a_grammar_that_can_be_used() -> None:
    pytest.importorskip("llguidance")
    requests = requests_of(8, 8, 8, 768, GraphLimits(), has_text=True, is_constrained=True)
    builder = ConstraintBuilder(TINY, 768, (0,))
    assert len({each.params.structured_outputs for each in requests} - {None}) == 4
    for each in requests:
        assert each.params.structured_outputs is not None
        builder.constraint(each.params)


def test_a_constrained_load_needs_a_tokenizer() -> None:
    with pytest.raises(UserError, match=r"--constrained needs a tokenizer\.json"):
        requests_of(8, 8, 8, 768, GraphLimits(), has_text=False, is_constrained=True)


def test_only_strict_numerics_compare_logprobs() -> None:
    """In others their last digits depend on what else is in a batch."""
    for is_exact in (True, False):
        requests = requests_of(8, 8, 8, 768, GraphLimits(), has_text=True, is_exact=is_exact)
        assert any(each.params.logprobs is not None for each in requests) == is_exact
        assert any(each.params.prompt_logprobs is not None for each in requests) == is_exact
