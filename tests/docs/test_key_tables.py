"""The tables of graph-file keys and of models in docs/ are those of the code, and hold each key."""

from __future__ import annotations

import pytest
from docs.key_tables import ROOT, TABLE, rendered, rows, table

from docs import model_tables
from flowrt.graph.schema import keys_of, sections, sentences_of

PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", sorted(name for name, text in PAGES.items() if TABLE.search(text)))
def test_tables_are_those_of_the_code(page: str) -> None:
    assert rendered(PAGES[page]) == PAGES[page], "run python tests/docs/key_tables.py"


def test_tables_of_models_are_those_of_the_code() -> None:
    text = model_tables.PAGE.read_text(encoding="utf-8")
    assert [match[2] for match in model_tables.TABLE.finditer(text)] == [*model_tables.TABLES]
    assert model_tables.rendered(text) == text, "run python tests/docs/model_tables.py"


def test_each_key_is_in_a_table() -> None:
    shown = {name for text in PAGES.values() for match in TABLE.finditer(text) for name in match[2].split()}
    for row in rows():
        assert any(row.path[: len(at)] == at for at in (tuple(name.split(".")) for name in shown)), ".".join(row.path)


def test_each_key_has_a_sentence_or_keys_below_it() -> None:
    paths = [path for path, _ in sections()]
    for path, section in sections():
        for name in keys_of(section).keys() - sentences_of(section).keys():
            assert any(below[: len(path) + 1] == (*path, name) for below in paths), ".".join((*path, name))


def test_table_of_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match="no key of a graph file is limit"):
        table("limit")
