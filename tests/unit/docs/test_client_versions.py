"""The versions of clients in docs/clients.md are those that the tests install."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "tests/integration/clients"
_ROW = re.compile(r"^\| (?P<name>\S+)(?: \((?P<language>\w+)\))? \| (?P<version>\d+(?:\.\d+)+) \|", re.MULTILINE)
_PINNED = re.compile(r"^(?P<name>[\w-]+)==(?P<version>[\w.]+)", re.MULTILINE)


def pinned(text: str) -> dict[str, str]:
    return {found["name"]: found["version"] for found in _PINNED.finditer(text)}


def test_versions_are_those_that_are_tested() -> None:
    npm: dict[str, str] = json.loads((CLIENTS / "package.json").read_text())["dependencies"]
    locked = pinned((ROOT / "requirements.lock").read_text())
    load_generators = pinned((ROOT / ".ci/clients.sh").read_text().replace(" ", "\n").replace(";", "\n"))
    libraries = ("nixl", "mooncake")
    load_generators = {name: version for name, version in load_generators.items() if not name.startswith(libraries)}
    expected: dict[tuple[str, str | None], str] = {("openai", "JavaScript"): npm.pop("openai")}
    expected |= {(name, None): version for name, version in npm.items()}
    expected |= {(name, "Python"): locked[name] for name in ("openai", "anthropic")}
    expected |= {(name, None): version for name, version in pinned((CLIENTS / "requirements.txt").read_text()).items()}
    expected |= {(name, None): version for name, version in load_generators.items()}
    expected[("locust", None)] = locked["locust"]
    rows = _ROW.finditer((ROOT / "docs/clients.md").read_text())
    assert {(row["name"], row["language"]): row["version"] for row in rows} == expected
