"""The files of the product. Its packages are those that `pyproject.toml` installs, so a new one is never left out."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: tuple[str, ...] = tuple(PROJECT["tool"]["setuptools"]["package-dir"].values())
"""Folders, e.g. `proxy`, which is imported as `tandem.proxy`."""


def python_files(folders: Iterable[str] = PACKAGES) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def with_tests(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with the repository on Python's path, which product processes do not import from."""
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))}


def name_of(file: Path) -> str:
    """Returns the file's path inside the repository."""
    return str(file.relative_to(ROOT))
