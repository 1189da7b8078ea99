"""What a public host runs: workflows call `.ci/run` and targets of the Makefile, and hooks the same tools."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def commands(workflow: str) -> list[str]:
    jobs = load(f".github/workflows/{workflow}.yml")["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_workflows_run_what_is_there() -> None:
    assert commands("ci") == [".ci/run", "make test"] and "test" in TARGETS
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert commands("links") == ["make links"] and "links" in TARGETS
    assert commands("search")[0].startswith("make test-properties ") and "test-properties" in TARGETS
    assert commands("search")[1].startswith("make soak ") and "soak" in TARGETS
    assert commands("release")[0] == "make release" and "release" in TARGETS


def test_hooks_run_what_lint_runs() -> None:
    [repository] = load(".pre-commit-config.yaml")["repos"]
    for hook in repository["hooks"]:
        program, *arguments = hook["entry"].split()
        assert (program == ".venv/bin/ruff" and arguments[0] in ("format", "check")) or arguments[0] in TARGETS


def test_the_version_has_a_dated_entry_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", headings[1])


def test_forms_of_issues_ask_for_something() -> None:
    for name in ("bug", "feature"):
        form = load(f".github/ISSUE_TEMPLATE/{name}.yml")
        assert form["name"] and form["description"]
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert ids and len(ids) == len(set(ids))
