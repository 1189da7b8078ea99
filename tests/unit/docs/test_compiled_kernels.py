"""The table of docs/gpu.md is what Triton and ptxas make of the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compiled_kernels import CAPABILITIES, LayerSizes, cell, launches, table, variants

DOCS = Path(__file__).parents[3] / "docs/gpu.md"


def test_the_page_has_the_table_of_one_generation() -> None:
    rows = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines()]
    column = 1 + CAPABILITIES.index(90)
    on_page = {row[0]: row[column] for row in rows if len(row) == 1 + len(CAPABILITIES)}
    for name, launch in variants(launches(LayerSizes())).items():
        assert on_page.get(name) == cell(launch, 90), "python -m tests.support.compiled_kernels prints the table"


@pytest.mark.extended
def test_the_page_has_the_whole_table() -> None:
    assert "\n".join(table()) in DOCS.read_text()
