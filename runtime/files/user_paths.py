"""Paths in the user's home. A process may have none: containers run as users that no file of passwords lists."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from tandem.runtime.errors import ConfigError


def home_folder() -> Path | None:
    """Returns the user's home, from HOME or else the file of passwords; None if neither names one."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home if home.is_absolute() else None


def user_name() -> str:
    """Returns the user's name, from the environment or the file of passwords; empty if neither has one."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def expanded(path: str | Path) -> Path:
    """Returns the path with a home in place of `~` or `~name`. Raises ConfigError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: no home folder is known for this user; write the whole path") from error


def user_folder(variable: str, default: str) -> Path:
    """Returns the folder of a kind of the user's files, such as XDG_CACHE_HOME and `.cache`.

    variable: names it if it is set to an absolute path, as the XDG specification demands. default: its place in the
    home. Raises ConfigError without both.
    """
    base = os.environ.get(variable, "")
    if Path(base).is_absolute():
        return Path(base)
    if (home := home_folder()) is None:
        raise ConfigError(f"there is no home folder; set {variable} to a folder to which this user may write")
    return home / default


def is_writable(folder: Path) -> bool:
    """Whether the folder exists and this process may make files in it."""
    # Path.is_dir would raise PermissionError for a folder within one that this user may not search.
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)  # noqa: PTH112


def is_readable_folder(path: Path) -> bool:
    """Returns whether there is such a folder. Raises ConfigError for one that this process may not read."""
    try:
        is_folder = path.is_dir()
    except OSError as error:  # in a folder that it may not search, or with a name that is too long
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if is_folder and not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"cannot read {path}: Permission denied")
    return is_folder
