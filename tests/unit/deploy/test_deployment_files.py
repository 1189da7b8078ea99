"""Files for Ray, Kubernetes, Docker and systemd are well formed, and their command lines are accepted."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml

from tandem.deploy import cli
from tandem.deploy.cluster_config import load_config, settings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
RAY_CONFIG = DEPLOY / "ray" / "cluster.yaml"
COMPOSE = DEPLOY / "docker" / "compose.yaml"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
PAGES = [ROOT / "docs" / "deploy.md", ROOT / "docs" / "autoscaling.md"]


def documents(file: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def dockerfile() -> list[list[str]]:
    """Returns the instructions, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def command_lines() -> list[list[str]]:
    """Returns all command lines that call `tandem` or `ray`."""
    lines = [
        line
        for page in PAGES
        for body in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
        for line in body.splitlines()
    ]
    lines += [
        line.removeprefix("ExecStart=")
        for unit in UNITS
        for line in unit.read_text().splitlines()
        if "ExecStart=" in line
    ]
    lines += [spec["entrypoint"] for each in documents(DEPLOY / "kubernetes/rayjob.yaml") if (spec := each["spec"])]
    [pod] = [each for each in documents(DEPLOY / "kubernetes/tandem.yaml") if each["kind"] == "Deployment"]
    lines.append(shlex.join(["tandem", *pod["spec"]["template"]["spec"]["containers"][0]["args"]]))
    ray = documents(RAY_CONFIG)[0]
    lines += ray["head_start_ray_commands"] + ray["worker_start_ray_commands"]
    found = []
    for line in lines:
        for part in line.split(";"):
            # systemd keeps quotes inside a word, and JSON needs them
            words = part.split() if "={" in part else shlex.split(part)
            words = words[words.index("--") + 1 :] if words[:3] == ["ray", "job", "submit"] else words
            if words and Path(words[0]).name in ("tandem", "ray"):
                found.append([Path(words[0]).name, *words[1:]])
    service = documents(COMPOSE)[0]["services"]["tandem"]
    found.append(["tandem", *service["command"]])
    found.append(service["healthcheck"]["test"][1:])
    entrypoint, default = (json.loads(text) for kind, text in dockerfile() if kind in ("ENTRYPOINT", "CMD"))
    found.append(entrypoint + default)
    return found


def test_every_tandem_command_is_accepted() -> None:
    lines = [line for line in command_lines() if line[0] == "tandem"]
    assert len(lines) >= 10
    for _, *arguments in lines:
        try:
            cli._parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"`tandem {shlex.join(arguments)}` does not parse")


@pytest.mark.filterwarnings("ignore")  # of the libraries that Ray imports
def test_every_ray_command_is_accepted() -> None:
    pytest.importorskip("ray")
    from ray.scripts.scripts import cli as ray_cli

    lines = [line for line in command_lines() if line[0] == "ray"]
    assert len(lines) >= 8
    for _, name, *arguments in lines:
        arguments = [argument for argument in arguments if not argument.startswith("--autoscaling-config=~")]
        context = ray_cli.commands[name].make_context(name, arguments)
        if any(argument.startswith("--resources") for argument in arguments):
            assert json.loads(context.params["resources"]) == {"tandem_proxy": 1}


def test_the_ray_cluster_file_is_valid_by_rays_schema() -> None:
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("Ray is not installed")
    schema = json.loads((Path(spec.origin).parent / "autoscaler/ray-schema.json").read_text())
    jsonschema_rs.validator_for(schema).validate(documents(RAY_CONFIG)[0])


def test_the_configuration_for_ray_is_valid() -> None:
    config = load_config(DEPLOY / "ray" / "cluster.toml", {"ray": "auto"})
    assert config.ray == "auto"
    assert "tandem_proxy" in RAY_CONFIG.read_text()
    assert tomllib.loads((DEPLOY / "ray" / "cluster.toml").read_text())["insecure_network"] is True


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_ray_clusters_on_kubernetes_are_consistent(name: str) -> None:
    """What Kubernetes' schemas cannot tell; see also tests/security/test_kubernetes.py."""
    locked = re.search(r"^ray==([\d.]+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert locked
    [document] = documents(DEPLOY / "kubernetes" / name)
    assert document["apiVersion"] == "ray.io/v1"
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    assert spec["rayVersion"] == locked[1], "the image and KubeRay must have the same Ray"
    # KubeRay puts it into a shell command line, so it needs shell quotes around escaped quotes.
    (resources,) = shlex.split(spec["headGroupSpec"]["rayStartParams"]["resources"])
    assert json.loads(resources) == {"tandem_proxy": 1}
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_units_are_valid(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"/opt/tandem/\.venv/bin/\w+", "/bin/true", unit.read_text()))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    mine = [line for line in verified.stderr.splitlines() if unit.name in line]
    assert verified.returncode == 0 and not mine, verified.stderr


def test_the_image_contains_every_package() -> None:
    sources = [text.split()[:-1] for kind, text in dockerfile() if kind == "COPY" and "--from" not in text]
    copied = {word.rstrip("/") for words in sources for word in words}
    assert all((ROOT / name).exists() for name in copied)
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = setuptools["package-dir"]
    assert set(folders.values()) <= copied
    present = {
        name + "".join(f".{part}" for part in file.parent.relative_to(ROOT / folder).parts)
        for name, folder in folders.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert present == set(setuptools["packages"])


def test_the_compose_file_names_what_it_declares() -> None:
    compose = documents(COMPOSE)[0]
    service = compose["services"]["tandem"]
    assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert [volume.split(":")[0] for volume in service["volumes"]] == list(compose["volumes"])
    assert service["secrets"] == list(compose["secrets"])
    keys = service["command"][service["command"].index("--api-keys-file") + 1]
    assert keys == f"/run/secrets/{service['secrets'][0]}"


def test_every_setting_may_be_in_the_config_file(tmp_path: Path) -> None:
    from tandem.deploy.cluster_config import ClusterConfig

    file = tmp_path / "cluster.toml"
    file.write_bytes(msgspec.toml.encode({each.key: each.default for each in settings()}))
    assert load_config(file, {}) == ClusterConfig(engine_is_given=True)


def test_the_gpu_override_reserves_gpus_and_shared_memory_for_the_same_service() -> None:
    override = yaml.safe_load((COMPOSE.parent / "compose.gpu.yaml").read_text())["services"]
    assert override.keys() <= yaml.safe_load(COMPOSE.read_text())["services"].keys()
    [device] = override["tandem"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert override["tandem"]["shm_size"] == "8gb"
