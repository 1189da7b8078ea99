"""Prints a random sample of the faults that cosmic-ray makes in the packages of a cluster's control, as JSON.

Packages are folders or files; with none, all of `PACKAGES`. Each mutant is a list: operator, file, text, and what
replaces it.

    uv run --no-project --with cosmic-ray==8.7.0 python tests/mutants/draw_mutants.py ROOT NUMBER SEED [PACKAGE]...

Runs outside of Tandem's environment, because nothing else needs cosmic-ray. Left out is what can change nothing or what
is no fault of the kind that is looked for: annotations, which nothing evaluates, calls of a log, assertions, and the
values of constants, of which many are as good. A type that is named counts as one: without it nothing can be imported.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cosmic_ray.plugins as plugins  # type: ignore[import-not-found]
from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-not-found]
from cosmic_ray.mutating import MutationVisitor  # type: ignore[import-not-found]

PACKAGES = (
    "proxy/dispatch",
    "proxy/cluster",
    "proxy/admission",
    "prefill_worker",
    "decode_worker",
    "handover",
    "worker",
    "deploy/launch",
)


class _WithoutHarmlessParts(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = ast.Constant(None)
        self.generic_visit(node)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if all(isinstance(each, ast.Name) and each.id.lstrip("_")[:1].isupper() for each in node.targets):
            node.value = ast.Constant(None)
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        is_log = isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("log.", "self._log."))
        is_docstring = isinstance(call, ast.Constant)
        return ast.Pass() if is_log or is_docstring else node


def meaning(source: str) -> str:
    """Returns the syntax tree of what the mutants may change."""
    return ast.dump(_WithoutHarmlessParts().visit(ast.parse(source)))


def operators() -> list[tuple[str, Any]]:
    found = ((name, plugins.get_operator(name)) for name in sorted(plugins.operator_names()))
    return [(name, operator()) for name, operator in found if not operator.arguments()]


def places(root: Path, packages: Sequence[str]) -> Iterator[tuple[Path, str, Any, int]]:
    """Yields (file, name of the operator, operator, number of the place)."""
    for package in packages:
        for file in sorted((root / package).rglob("*.py")) or [root / package]:
            nodes = list(ast_nodes(get_ast(file.read_text())))
            for name, operator in operators():
                num_places = sum(len(list(operator.mutation_positions(node))) for node in nodes)
                for number in range(num_places):
                    yield file, name, operator, number


def as_replacement(source: str, changed: str) -> tuple[str, str]:
    """Returns the lines that differ, before and after, with as many lines around them as make them unique."""
    old, new = source.splitlines(keepends=True), changed.splitlines(keepends=True)
    first = next(i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    num_after = next(i for i, (one, other) in enumerate(zip(old[::-1], new[::-1], strict=False)) if one != other)
    last, shift = len(old) - num_after, len(new) - len(old)
    while source.count("".join(old[first:last])) > 1:
        first, last = max(0, first - 1), min(len(old), last + 1)
    return "".join(old[first:last]), "".join(new[first : last + shift])


def main(root: Path, number: int, seed: int, packages: Sequence[str]) -> None:
    all_places = list(places(root, packages))
    random.Random(seed).shuffle(all_places)
    mutants: list[tuple[str, ...]] = []
    for file, name, operator, place in all_places:
        if len(mutants) == number:
            break
        source = file.read_text()
        changed = MutationVisitor.mutate_code(source, operator, place)
        try:
            if changed is None or meaning(changed) == meaning(source):
                continue
        except SyntaxError:
            continue
        old, new = as_replacement(source, changed)
        mutants.append((name, str(file.relative_to(root)), old, new))
    print(json.dumps(mutants))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or PACKAGES)
