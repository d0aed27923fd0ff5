"""The tables of docs/models.md are those of what `flowrt models` knows."""

from __future__ import annotations

from docs.model_tables import PAGE, TABLE, TABLES, rendered

TEXT = PAGE.read_text(encoding="utf-8")


def test_tables_are_those_of_the_code() -> None:
    assert [match[2] for match in TABLE.finditer(TEXT)] == [*TABLES]
    assert rendered(TEXT) == TEXT, "run python tests/docs/model_tables.py"
