"""Every tool checks every package. Their settings cannot be derived from each other, so they are compared with the
packages that are installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.product import PACKAGES, PROJECT, ROOT

TOOLS: dict[str, Any] = PROJECT["tool"]
NAMES = {f"tandem.{package}" for package in PACKAGES}
OTHERS = {"bench", "tests", "tools"}
"""Folders of the repository that are checked and not installed."""
ONLY = {"Only protocol speaks ZeroMQ": "tandem.protocol", "Only deploy knows Ray": "tandem.deploy"}
"""Contracts that let one package import something."""


def contract(name: str) -> dict[str, Any]:
    [found] = [each for each in TOOLS["importlinter"]["contracts"] if each["name"] == name]
    return found


def named_in_layers(layers: Iterable[str]) -> set[str]:
    modules = (module.strip() for layer in layers for module in layer.split("|"))
    return {".".join(module.split(".")[:2]) for module in modules}


def test_every_folder_with_an_init_file_is_installed() -> None:
    found = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("__init__.py")}
    installed = {ROOT / name.removeprefix("tandem.").replace(".", "/") for name in TOOLS["setuptools"]["packages"]}
    assert installed == found
    top = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert top - OTHERS == set(PACKAGES)
    assert {f"tandem.{package}": package for package in PACKAGES} == TOOLS["setuptools"]["package-dir"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (TOOLS["importlinter"]["root_packages"], NAMES | OTHERS),
        (TOOLS["mypy"]["packages"], NAMES | OTHERS),
        (TOOLS["coverage"]["run"]["source"], set(PACKAGES)),
        (
            [each for each in TOOLS["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"] if "." not in each],
            set(PACKAGES),
        ),
        (named_in_layers(contract("Imports point down only")["layers"]), NAMES),
        *((contract(name)["source_modules"], NAMES - {allowed}) for name, allowed in ONLY.items()),
    ],
    ids=["import-linter", "mypy", "coverage", "ruff", "layers", *ONLY],
)
def test_a_tool_checks_every_package(found: Iterable[str], expected: set[str]) -> None:
    assert set(found) == expected


def test_the_image_is_built_of_every_package() -> None:
    lines = (ROOT / "deploy/docker/Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if line.startswith("COPY ") and len(line.split()) == 3}
    assert set(PACKAGES) <= copied
