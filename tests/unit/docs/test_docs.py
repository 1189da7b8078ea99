"""Symbols, paths, links, options and commands named in the README and in docs/ exist."""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from tandem.deploy import cli
from tandem.deploy.cluster_config import ClusterConfig, flag_name, settings
from tandem.runtime.errors import ConfigError

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
_ROOT_PAGES = [README, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT"))]
PAGES = [*_ROOT_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_SYMBOL = re.compile(r"([\w./-]+\.py)::(\w+(?:\.\w+)*)")
_PATH = re.compile(r"[\w.-][\w./-]*(?:/|\.(?:py|md|toml|lock|json))")

TASKS = sorted((ROOT / "docs/tasks").glob("*.md"))

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _spans(page: Path) -> list[str]:
    return _SPAN.findall(_FENCE.sub("", page.read_text()))


def _commands() -> list[list[str]]:
    """Commands of the README: lines of shell blocks, and inline code that begins with `make` or `tandem`."""
    lines = [line for kind, body in _FENCE.findall(README.read_text()) if kind == "sh" for line in body.splitlines()]
    lines += [span for span in _spans(README) if span.startswith(("make ", "tandem "))]
    return [shlex.split(line, comments=True) for line in lines if line]


@functools.cache
def _names(file: Path) -> frozenset[str]:
    """Names that a module defines at its top level, and those of its classes as `Class.name`."""
    return frozenset(_defined(ast.parse(file.read_text()).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> list[str]:
    names: list[str] = []
    for node in body:
        match node:
            case ast.ClassDef():
                names += [prefix + node.name, *_defined(node.body, f"{prefix}{node.name}.")]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.append(prefix + node.name)
            case ast.Assign():
                targets = [each for target in node.targets for each in getattr(target, "elts", [target])]
                names += [prefix + target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(prefix + name)
    return names


@each_page
def test_symbols_exist(page: Path) -> None:
    for path, symbol in _SYMBOL.findall(page.read_text()):
        if path == "path.py":  # explains the notation
            continue
        assert (ROOT / path).is_file(), f"{path} does not exist"
        assert symbol in _names(ROOT / path), f"{path} defines no {symbol}"


@each_page
def test_paths_exist(page: Path) -> None:
    for span in _spans(page):
        if _PATH.fullmatch(span):
            assert (ROOT / span).exists(), f"{span} does not exist"


@each_page
def test_relative_links_resolve(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), f"{target} does not exist"


@each_page
def test_configurations_parse(page: Path) -> None:
    parsers: dict[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    for kind, body in _FENCE.findall(page.read_text()):
        assert kind not in parsers or parsers[kind](body)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    docs = ROOT / "docs"
    trees = re.findall(r"^```{toctree}\n(.*?)^```$", (docs / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    pages = {str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("adr/0")}  # docs/adr/README.md lists them by a pattern
    assert pages - {"index"} <= {line for tree in trees for line in tree.split()}, "docs/index.md lists the pages"


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.stem)
def test_commands_and_flags_of_task_pages_exist(page: Path) -> None:
    text = page.read_text()
    blocks = "\n".join(body for kind, body in _FENCE.findall(text) if kind == "sh").replace("\\\n", "")
    commands = [line for line in [*blocks.splitlines(), *_spans(page)] if line.startswith("tandem ")]
    assert commands
    for command in commands:
        _parse(*shlex.split(command)[1:])


def test_the_flags_that_replace_those_of_vllm_exist() -> None:
    text = (ROOT / "docs/tasks/from_vllm.md").read_text()
    known = {flag_name(setting.key) for setting in settings()}
    rows = [row.split("|") for row in text.splitlines() if row.startswith(("| `--", "| `MODEL"))]
    assert len(rows) >= 12
    for _, theirs, ours, note, _ in rows:
        flags = re.findall(r"--[a-z-]+", note + (theirs if ours.strip() == "the same" else ours))
        assert not set(flags) - known, f"{theirs}: {flags}"


def test_commands_exist() -> None:
    commands = _commands()
    assert {"make", "tandem", "curl"} == {command[0] for command in commands}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands:
        match command:
            case ["make", target, *settings]:
                assert target in targets, f"the Makefile has no {target}"
                for setting in settings:
                    name, _, value = setting.partition("=")
                    assert name == "ARGS", f"`make` has no setting {name}"
                    if target == "serve":
                        _parse("up", *shlex.split(value))
                    else:
                        assert all((ROOT / path).exists() for path in shlex.split(value)), f"{value} does not exist"
            case ["tandem", *arguments]:
                _parse(*arguments)


def _parse(*arguments: str) -> argparse.Namespace:
    try:
        return cli._parser().parse_args(arguments)
    except ConfigError as error:
        pytest.fail(f"`tandem {shlex.join(arguments)}` does not parse: {error}")
    except SystemExit as exit:
        assert not exit.code and {"--help", "--help-all"} & {*arguments}
        return argparse.Namespace()


def test_readme_has_the_curl_line_that_tandem_up_prints(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_ready(Console(quiet=True), ClusterConfig(served_model_name="tandem-demo"), Path("logs"))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("curl ")]
    assert printed == [line for line in README.read_text().splitlines() if line.startswith("curl ")][:1]
