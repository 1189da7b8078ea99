"""Paths in the home of a user, who may have none."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import expanded, home_folder, is_readable_folder, is_writable, user_folder
from tests.support.hidden_folders import hide


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user of a container whom no file of passwords lists."""

    def getpwuid(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)


def test_a_home_is_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/models/a") == Path("/home/me/models/a")
    assert (expanded("models/a"), expanded("/m/~/a")) == (Path("models/a"), Path("/m/~/a"))
    assert home_folder() == Path("/home/me")


@pytest.mark.parametrize("path", ["~/models/a", "~nobody-has-this-name/a", "~"])
def test_without_a_home_the_whole_path_is_asked_for(unknown: None, path: str) -> None:
    assert home_folder() is None
    with pytest.raises(ConfigError, match=f"^{path}: no home folder is known for this user; write the whole path$"):
        expanded(path)
    assert expanded("/models/a") == Path("/models/a")


def test_a_variable_names_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, unknown: None) -> None:
    with pytest.raises(ConfigError, match="there is no home folder; set XDG_CACHE_HOME to a folder"):
        user_folder("XDG_CACHE_HOME", ".cache")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # "must be ignored", says the specification
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/home/me/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert user_folder("XDG_CACHE_HOME", ".cache") == Path("/cache")


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_is_no_path_is_none(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    assert home_folder() in (None, Path("/"))


def test_only_folders_are_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert is_writable(tmp_path) and not is_writable(file) and not is_writable(tmp_path / "none")


def test_folders_that_this_user_may_not_look_into_are_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, tmp_path / "of another user")
    assert not is_writable(tmp_path / "of another user/folder")


def test_a_folder_that_this_user_may_not_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, hidden := tmp_path / "of another user")
    for path in (hidden, hidden / "model"):
        with pytest.raises(ConfigError, match=f"^cannot read {path}: Permission denied$"):
            is_readable_folder(path)
    with pytest.raises(ConfigError, match=r"File name too long$"):
        is_readable_folder(tmp_path / ("m" * 300))
    assert is_readable_folder(tmp_path) and not is_readable_folder(tmp_path / "none")
