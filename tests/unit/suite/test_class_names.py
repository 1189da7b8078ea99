"""Each class of the product, the benchmarks and the tools has a name of its own, so that a name leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.product import PACKAGES, name_of, python_files


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in python_files([*PACKAGES, "bench", "tools"]):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{name_of(file)}:{node.lineno}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
