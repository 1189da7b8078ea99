"""Folders that take the place of a home, a cache or temporary files to which the user cannot write."""

from __future__ import annotations

import getpass
import logging
import os
import site
import tempfile
from pathlib import Path

import pytest

from tandem.deploy.processes import user_folders as module
from tandem.deploy.processes.user_folders import make_missing_folders, user_folders
from tandem.runtime.errors import ConfigError
from tests.support.hidden_folders import hide

VARIABLES = (
    "HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_MODULES_CACHE", "PYTHONUSERBASE",
    "LOGNAME", "USER", "TMPDIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR",
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that the user has. Folders named `locked` cannot be written to, also not by root."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    home = tmp_path / "me"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(site, "getuserbase", lambda: str(home / ".local"))
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: access(path, mode) and not (mode & os.W_OK and "locked" in Path(path).parts)
    )
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_usable_folders_are_used(folder: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = dict(os.environ)
    with user_folders(8000, folder) as logs:
        assert logs == home / ".cache/tandem/logs/port-8000"
        assert dict(os.environ) == before and not caplog.text
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["no home", "locked home", "the home of another user", "a file as home", "locked logs", "a locked log"]
)
def test_without_them_logs_and_caches_are_in_the_clusters_own(
    tmp_path: Path,
    home: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    logs = home / ".cache/tandem/logs/port-8000"
    match kind:
        case "no home":
            monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
        case "locked home":
            monkeypatch.setenv("HOME", str(tmp_path / "locked"))
            (tmp_path / "locked").mkdir()
            monkeypatch.setattr(module, "log_dir", lambda port: (_ for _ in ()).throw(OSError(30, "Read-only", "x")))
        case "the home of another user":  # an image sets HOME=/root, and the container runs as somebody else
            monkeypatch.setenv("HOME", str(tmp_path / "root"))
            hide(monkeypatch, tmp_path / "root")
        case "a file as home":
            monkeypatch.setenv("HOME", str(tmp_path / "file"))
            (tmp_path / "file").touch()
        case "locked logs":
            monkeypatch.setattr(os, "access", lambda path, mode: path != logs)
        case "a locked log":
            logs.mkdir(parents=True)
            (logs / "proxy-0.log").touch()
            monkeypatch.setattr(os, "access", lambda path, mode: path != logs / "proxy-0.log")
    before = dict(os.environ)
    with caplog.at_level(logging.WARNING), user_folders(8000, folder) as found:
        assert found == folder / "logs" and found.is_dir()
        if "home" in kind:
            assert os.environ["HOME"] == str(folder / "home")
            assert os.environ["XDG_CACHE_HOME"] == str(folder / "home/.cache")
            assert (folder / "home/.cache").is_dir()
    assert dict(os.environ) == before, "a program that embeds a cluster gets its own back"
    [record] = caplog.records
    line = record.getMessage()
    assert line.startswith(f"logs and caches are in {folder} until the cluster stops: ") and "\n" not in line
    assert line.endswith("set XDG_CACHE_HOME to a folder to which this user may write")


def test_a_cache_elsewhere_is_kept_though_the_home_is_locked(tmp_path: Path, folder: Path, home: Path) -> None:
    os.environ["HOME"], os.environ["XDG_CACHE_HOME"] = str(tmp_path / "locked"), str(home / "cache")
    assert make_missing_folders(folder) == {"HOME": str(folder / "home")}


def test_models_in_a_cache_that_can_only_be_read_are_found(tmp_path: Path, folder: Path) -> None:
    models = tmp_path / "locked/.cache/huggingface"
    models.mkdir(parents=True)
    os.environ["HOME"] = str(tmp_path / "locked")
    environment = make_missing_folders(folder)
    assert environment["HF_HOME"] == str(models)
    assert environment["HF_MODULES_CACHE"] == str(folder / "home/.cache/huggingface/modules")


def test_code_of_models_on_a_disk_that_can_only_be_read_is_kept_elsewhere(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "locked").mkdir()
    os.environ["HF_HOME"] = str(tmp_path / "locked")
    assert make_missing_folders(folder) == {"HF_MODULES_CACHE": str(folder / "home/.cache/huggingface/modules")}
    os.environ["HF_MODULES_CACHE"] = "/code"
    assert make_missing_folders(folder) == {}


@pytest.mark.parametrize("error", [KeyError("uid"), OSError("No username")])  # of Python 3.11 and 3.13
def test_a_user_without_a_name_gets_one(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: (_ for _ in ()).throw(error))
    assert make_missing_folders(folder) == {"LOGNAME": f"user-{os.getuid()}"}


def test_temporary_files_have_a_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError("no usable one")))
    assert make_missing_folders(folder) == {"TMPDIR": str(folder / "tmp")}
    assert (folder / "tmp").is_dir()


def test_a_folder_that_cannot_be_made_ends_the_start_in_one_line(tmp_path: Path) -> None:
    os.environ["HOME"] = str(tmp_path / "locked")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"^cannot write to {file}: Not a directory$"), user_folders(8000, file):
        pass


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"])
def test_caches_that_an_image_names_for_another_user_have_a_place(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "locked/cache"))
    (tmp_path / "locked").mkdir()
    assert make_missing_folders(folder) == {name: str(folder / "home/.cache" / name.lower())}
    monkeypatch.setenv(name, str(tmp_path / "new/cache"))
    assert make_missing_folders(folder) == {}


def test_what_is_installed_in_a_home_that_can_only_be_read_is_found(
    tmp_path: Path, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked"
    (locked / ".local/share").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(locked))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(site, "getuserbase", lambda: str(locked / ".local"))
    assert make_missing_folders(folder) == {
        "HOME": str(folder / "home"),
        "PYTHONUSERBASE": str(locked / ".local"),
        "XDG_DATA_HOME": str(locked / ".local/share"),
    }
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("PYTHONUSERBASE", "/packages")
    assert make_missing_folders(folder) == {"HOME": str(folder / "home")}
