"""Folders of the user in which processes and their libraries write: the home, the cache, temporary files.

Containers run as users without a home, or with a read-only one. There the cluster's own folder takes their place, until
the cluster stops: what libraries keep there, such as compiled kernels, is made again.
"""

from __future__ import annotations

import logging
import os
import site
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem.deploy.processes.runtime_dir import LOGS, log_dir
from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import home_folder, is_writable, user_folder, user_name

log = logging.getLogger(__name__)

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT")
"""Variables that an image may set to folders of its own user."""
_ADVICE = "set XDG_CACHE_HOME to a folder to which this user may write"


@contextmanager
def user_folders(port: int | str, folder: Path) -> Iterator[Path]:
    """Yields the folder of the logs, and lets this process and those that it starts find folders to write to.

    folder: the cluster's own, which is used where the user's cannot be. One line of the log says so. Raises ConfigError
    if that cannot be written to either.
    """
    try:
        logs, reason = _usable_logs(port), ""
    except ConfigError as error:
        logs, reason = folder / LOGS, error.message
    except OSError as error:
        logs, reason = folder / LOGS, f"{error.filename}: {error.strerror}; {_ADVICE}"
    environment = make_missing_folders(folder)
    try:
        logs.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    if reason:
        log.warning("logs and caches are in %s until the cluster stops: %s", folder, reason)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield logs
    finally:
        _restore(before)


def make_missing_folders(folder: Path) -> dict[str, str]:
    """Makes folders in `folder` for what the user cannot write to. Returns the environment variables that name them.

    Raises ConfigError if they cannot be made.
    """
    environment: dict[str, str] = {}
    home, cache, own_cache = home_folder(), _cache(), folder / "home" / ".cache"
    if home is None or not is_writable(home):
        environment["HOME"] = str(folder / "home")
        found = {name: str(path) for name, path in _still_read(home) if os.access(path, os.R_OK | os.X_OK)}
        environment |= {name: path for name, path in found.items() if name not in os.environ}
    if cache is None or not _can_make(cache):
        environment["XDG_CACHE_HOME"] = str(own_cache)
        if cache is not None and "HF_HOME" not in os.environ and os.access(cache / "huggingface", os.R_OK | os.X_OK):
            environment["HF_HOME"] = str(cache / "huggingface")  # its models can be read
    models = environment.get("HF_HOME") or os.environ.get("HF_HOME")
    if models and "HF_MODULES_CACHE" not in os.environ and not _can_make(Path(models)):
        environment["HF_MODULES_CACHE"] = str(own_cache / "huggingface" / "modules")
    for name in _CACHES:
        if (given := os.environ.get(name)) and not _can_make(Path(given)):
            environment[name] = str(own_cache / name.lower())
    if not user_name():  # libraries name folders after the user
        environment["LOGNAME"] = f"user-{os.getuid()}"
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        environment["TMPDIR"] = str(folder / "tmp")
    try:
        for path in environment.values():
            if path.startswith(f"{folder}/"):
                Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from error
    return environment


def _usable_logs(port: int | str) -> Path:
    """Raises ConfigError and OSError."""
    logs = log_dir(port)
    for path in (logs, *logs.glob("*.log*")):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{path} cannot be written to; {_ADVICE}")
    return logs


def _cache() -> Path | None:
    """The user's cache, which may not exist."""
    try:
        return user_folder("XDG_CACHE_HOME", ".cache")
    except ConfigError:
        return None


def _can_make(folder: Path) -> bool:
    """Whether this process may write to the folder once it has made it."""
    existing = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), folder)
    return is_writable(existing)


def _still_read(home: Path | None) -> Iterator[tuple[str, Path]]:
    """Yields folders of a home that can only be read, with the variables that name them: also Python's own packages."""
    if home is not None:
        yield "PYTHONUSERBASE", Path(site.getuserbase())
        yield "XDG_DATA_HOME", home / ".local/share"
        yield "XDG_CONFIG_HOME", home / ".config"


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
