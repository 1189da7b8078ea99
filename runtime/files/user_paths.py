"""Paths in the user's home. A process may have none: containers run as users that no file of passwords lists."""

from __future__ import annotations

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
    """Whether this process may make files in the folder, which exists."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
