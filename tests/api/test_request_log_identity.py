"""Which graphs and models may continue the request log of another launcher: those that compute the same tokens."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest

from flowrt.api.log_identity import identity_of
from flowrt.api.opening import read_graph

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"


def identity(model: Path, *settings: str) -> dict[str, str]:
    return identity_of(read_graph({"flowrt": 1, "model": {"path": str(model)}}, settings))


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_another_deployment_may_continue(numerics: str) -> None:
    own = f"numerics={numerics}"
    assert identity(MODEL, own) == identity(MODEL, own, "deploy.attention.groups=2", "deploy.experts={servers: 2, replicas: 2}")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("page_size", ("limits.page_size=8",)),
        ("chunk_tokens", ("limits.chunk_tokens=32",)),
        ("threads", ("deploy.attention.threads=2", "deploy.experts.threads=2")),
    ],
)
def test_strict_numerics_depend_on_more(name: str, settings: tuple[str, ...]) -> None:
    assert identity(MODEL) == identity(MODEL, *settings)
    own, other = identity(MODEL, "numerics=strict"), identity(MODEL, "numerics=strict", *settings)
    assert {key for key in own if own[key] != other[key]} == {name}


@pytest.mark.parametrize("name", ["weights", "expert_weights"])
def test_weights_in_8_bits_are_another_model(name: str) -> None:
    own, other = identity(MODEL), identity(MODEL, f"model.{name}=int8")
    assert other == own | {name: "int8"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_another_file_of_the_model_is_another_model(name: str, tmp_path: Path) -> None:
    copytree(MODEL, tmp_path / "model")
    before = identity(tmp_path / "model")
    with (tmp_path / "model" / name).open("ab") as file:
        file.write(b" ")
    assert identity(tmp_path / "model")["model"] != before["model"]
