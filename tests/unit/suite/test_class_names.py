"""Each class of the product has a name of its own, so that a name leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "decode_worker", "deploy", "engine", "kv_transfer", "media_cache", "prefill_worker", "protocol", "proxy", "runtime",
    "telemetry", "worker",
)  # fmt: skip


def test_no_two_classes_of_the_product_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
