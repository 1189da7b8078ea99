"""The container image: pinned by hashes and a digest, without tools for development, and not run by root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock"
IMAGE_LOCK = ROOT / "deploy" / "docker" / "requirements.lock"
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def locked(file: Path) -> dict[str, set[str]]:
    """Returns the hashes of each `name==version`. Fails for anything else in the file."""
    found: dict[str, set[str]] = {}
    for entry in file.read_text().replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split("--hash=")
        pinned = re.match(r"([a-z0-9-]+==[\w.+!-]+)\s*(;.*)?$", requirement.strip())
        assert pinned, f"{file.name}: {entry[:100]!r} is not pinned"
        found[pinned[1]] = {each.strip() for each in hashes}
    return found


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9-]", each)[0].lower() for each in requirements}


def instructions() -> list[list[str]]:
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def test_every_locked_package_has_hashes() -> None:
    for file in (LOCK, IMAGE_LOCK):
        entries = locked(file)
        assert len(entries) > 100
        assert all(hashes for hashes in entries.values())
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for hashes in entries.values() for each in hashes)


def test_the_image_installs_the_tested_versions_without_the_tools_for_development() -> None:
    everything, image = locked(LOCK), locked(IMAGE_LOCK)
    assert {key: everything.get(key) for key in image} == image
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {key.partition("==")[0] for key in image}
    assert names(project["dependencies"]) <= installed
    assert not names(project["optional-dependencies"]["dev"]) - {"aiohttp"} & installed  # Ray needs aiohttp
    assert not {"pip", "uv", "coverage", "pytest"} & installed


def test_hashes_are_required_wherever_the_lock_is_installed() -> None:
    for file in ("Makefile", "deploy/docker/Dockerfile", "deploy/ray/cluster.yaml"):
        lines = [
            x for x in (ROOT / file).read_text().splitlines() if "pip install" in x and "-r requirements.lock" in x
        ]
        assert lines and all("--require-hashes" in line for line in lines), file


def test_what_serving_needs_is_installed_as_it_is_locked() -> None:
    """uv checks the hashes of constraints. That the lock has every dependency follows from the test of the image's."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    [command] = [line for line in lines if "pip install" in line and "-r pyproject.toml" in line]
    assert "-c requirements.lock" in command and "--no-verify-hashes" not in command


def test_the_base_image_is_named_by_a_digest_that_must_be_given() -> None:
    bases = [text for kind, text in instructions() if kind == "FROM"]
    assert bases[0] == "python:3.12-slim-bookworm@${PYTHON_DIGEST} AS base"
    assert all(text.split()[0] == "base" for text in bases[1:])
    assert ["ARG", "PYTHON_DIGEST"] in instructions()  # without a default
    compose = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yaml").read_text())
    assert compose["services"]["tandem"]["build"]["args"]["PYTHON_DIGEST"].startswith("${PYTHON_DIGEST:?")


def test_the_image_does_not_run_as_root() -> None:
    [(index, user)] = [(index, text) for index, (kind, text) in enumerate(instructions()) if kind == "USER"]
    # a number, which Kubernetes can compare with runAsNonRoot
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert not [text for kind, text in instructions()[index:] if kind in ("RUN", "COPY", "ADD")]


def test_triton_can_compile_on_gpus() -> None:
    last = [text for kind, text in instructions() if kind == "RUN"][-1]
    assert re.search(r"apt-get install .*\bgcc libc6-dev\b", last), "without a compiler our kernels do not run"
    [cache] = [text for kind, text in instructions() if kind == "ENV"]
    service = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yaml").read_text())["services"]["tandem"]
    [volume] = service["volumes"]
    assert cache.removeprefix("TRITON_CACHE_DIR=").startswith(f"{volume.partition(':')[2]}/"), "all else is read-only"


def test_the_container_of_the_compose_file_has_no_privileges() -> None:
    service = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yaml").read_text())["services"]["tandem"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
