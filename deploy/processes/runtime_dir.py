"""Private folder of a running cluster: sockets and the processes' config files. The launcher removes it at the end.

Commands such as `tandem status` find it by the cluster's port. It is where the paths of its sockets fit into the 107
bytes that the kernel takes: XDG_RUNTIME_DIR, the folder for temporary files, or /tmp.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.runtime.errors import ConfigError
from tandem.runtime.files.user_paths import is_writable, user_folder
from tandem.runtime.files.whole_file import write_whole

PROXIES_FILE = "proxies"
"""File with the control endpoints of proxies on other hosts."""
NETWORK_FILE = "network.json"
"""File with the protection of these endpoints, a `protocol.network.NetworkConfig`."""
XDG = "XDG_RUNTIME_DIR"
LOGS = "logs"
"""Folder in it for the logs of a user without a cache."""
MAX_SOCKET_PATH_BYTES = 107
"""Limit of the Linux kernel (`sun_path`)."""
MAX_FOLDER_BYTES = MAX_SOCKET_PATH_BYTES - len("/media-cache.sock")
"""Limit on the folder's path, in which no socket of Tandem has a longer name."""
VLLM_MAX_FOLDER_BYTES = MAX_SOCKET_PATH_BYTES - len("/00000000-0000-0000-0000-000000000000")
"""The same for vLLM's sockets, whose names are UUIDs."""
_PATIENCE, _PATIENCE_S = 20, 0.4
"""Attempts to lock a folder, and their time: another launcher may be removing an abandoned one."""
_SHORT_NAME = re.compile(r"[\w.-]{1,24}", re.ASCII)

_locks: dict[Path, list[int]] = {}
"""Descriptors of this process's locks, by folder."""


def runtime_dir(port: int | str) -> Path:
    """port: HTTP port of the cluster, or the name of workers that joined one. Raises ConfigError where none fits."""
    name = str(port)
    if _SHORT_NAME.fullmatch(name) is None:
        name = hashlib.sha256(name.encode()).hexdigest()[:16]
    own, shared = f"tandem-{name}", f"tandem-{os.getuid()}-{name}"
    places = [(variable, base / (own if variable == XDG else shared)) for variable, base in _bases()]
    return _first_usable(places, MAX_FOLDER_BYTES)


def make_process_folder(name: str) -> Path:
    """Makes a folder for one process that has no launcher on its host. Raises ConfigError where none fits."""
    prefix, suffix = f"tandem-{name}-", "12345678"  # as long as those of `mkdtemp`
    bases = sorted(_bases(), key=lambda each: each[0] == XDG)  # may be small, and the folder will hold the log
    places = [(variable, base / (prefix + suffix)) for variable, base in bases]
    parent = _first_usable(places, VLLM_MAX_FOLDER_BYTES).parent
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mode 0700


def _first_usable(places: Sequence[tuple[str, Path]], max_bytes: int) -> Path:
    """Returns the first folder in which sockets can be made.

    places: folders, which need not exist, and the environment variables that name their parents. max_bytes: of the
    folder's path.
    """
    refused = []
    for variable, folder in places:
        num_bytes = len(os.fsencode(folder))
        if num_bytes > max_bytes:
            reason = f"is {num_bytes - max_bytes} bytes too long for the paths of sockets"
        elif not _is_text(folder):
            reason = "has bytes that are not text"
        elif not is_writable(folder.parent):
            reason = "is not a folder to which this user may write"
        else:
            return folder
        refused.append(f"{variable + '=' if variable else ''}{_shown(folder.parent)} {reason}")
    longest = max_bytes - 1 - min(len(folder.name) for _, folder in places)
    raise ConfigError(
        f"there is no folder for the cluster's sockets: {'; '.join(refused)}. Set {XDG} to a folder to which this user "
        f"may write, with a path of at most {longest} bytes"
    )


def _bases() -> Iterator[tuple[str, Path]]:
    """Yields the folders to try, with the environment variables that name them."""
    for variable in (XDG, "TMPDIR", "TEMP", "TMP"):
        base = Path(os.environ.get(variable, ""))
        if base.is_absolute():
            yield variable, base
    for default in ("/tmp", "/var/tmp"):  # noqa: S108  # `create_runtime_dir` trusts no file that another user has made
        yield "", Path(default)


def _is_text(folder: Path) -> bool:
    """Whether an endpoint, which is text without control characters, can name the folder."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        return False
    return str(folder).isprintable()


def _shown(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def create_runtime_dir(port: int | str) -> Path:
    """Makes the folder with mode 0700, anew if it was left by a launcher that has been killed.

    Raises ConfigError if another launcher uses it. What decides is a lock on a file beside it, which the kernel
    releases when the process ends: from then on nothing happens to the folder but by the process that has the lock.
    Folders beside it that other launchers have left are removed: their ports or names may never be used again.
    """
    folder = runtime_dir(port)
    remove_abandoned_dirs(folder.parent)
    locks = [_lock(folder, port)]
    pid_file = folder / "launcher.pid"
    try:
        if os.path.lexists(folder):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise ConfigError(f"{folder} belongs to another user; {_advice(port)}, or remove the folder")
            if pid_file.exists():  # the file beside the folder may have been removed, as /tmp is cleaned by age
                locks.append(_lock_pid_file(pid_file, port))
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        write_whole(pid_file, str(os.getpid()))
        locks.append(_lock_pid_file(pid_file, port))
    except BaseException as error:
        for lock in locks:
            os.close(lock)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
        raise
    _locks[folder] = locks
    return folder


def remove_runtime_dir(folder: Path, *, keeps_logs: bool = False) -> None:
    """Removes a folder that this process has created, and lets others create it. keeps_logs: the logs in it stay."""
    if keeps_logs and (folder / LOGS).is_dir():
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                if entry.name != LOGS:
                    shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if locks := _locks.pop(folder, None):
        _lock_file(folder).unlink(missing_ok=True)  # before the lock is released: afterwards it may be another's
        for lock in locks:
            os.close(lock)


def remove_abandoned_dirs(base: Path) -> None:
    """Removes the folders of this user's launchers that were killed. Logs that a failed cluster has left stay."""
    with suppress(OSError):
        for file in base.glob("tandem-*.lock"):  # which a launcher removes when it ends by itself
            _remove_if_abandoned(file.with_name(file.name.removesuffix(".lock")), file)


def _remove_if_abandoned(folder: Path, file: Path) -> None:
    """file: the lock beside the folder. A launcher that starts there at this moment waits for it, see `_lock`."""
    locks: list[int] = []
    try:
        for each in (file, folder / "launcher.pid"):
            if each == file or os.path.lexists(folder):
                locks.append(os.open(each, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = [os.fstat(lock) for lock in locks]
        are_ours = all(stat.S_ISREG(each.st_mode) and each.st_uid == os.getuid() for each in found)
        if not are_ours or not _is_same(file, found[0]):
            return
        if len(locks) > 1:
            shutil.rmtree(folder)
        file.unlink()
    except OSError:  # it is in use, or another user's
        return
    finally:
        for lock in locks:
            os.close(lock)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _lock(folder: Path, port: int | str) -> int:
    """Locks the file beside the folder. Returns its descriptor. Raises ConfigError.

    The owner removes the file before it releases the lock, so a file that was opened before may be nobody's when it is
    locked: then the next one is tried.
    """
    file, patience = _lock_file(folder), _PATIENCE
    while True:
        try:
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:  # a link, or in /tmp another user's file
            raise ConfigError(f"cannot open {file}: {error.strerror}; {_advice(port)}, or remove it") from error
        try:
            status = os.fstat(lock)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise ConfigError(f"{file} belongs to another user; {_advice(port)}, or remove the file")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(file, status):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        except BlockingIOError:
            pid = os.pread(lock, 20, 0).decode(errors="replace")
            if patience == 0:
                os.close(lock)
                raise _in_use(port, pid) from None
            patience -= 1
            time.sleep(_PATIENCE_S / _PATIENCE)
        except OSError as error:
            os.close(lock)
            raise ConfigError(f"cannot lock {file}: {error.strerror}") from error
        except ConfigError:
            os.close(lock)
            raise
        os.close(lock)


def _lock_pid_file(file: Path, port: int | str) -> int:
    """Locks the file in the folder. Returns its descriptor. Raises ConfigError and OSError."""
    lock = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(lock, 20, 0).decode(errors="replace")
        os.close(lock)
        raise _in_use(port, pid) from None
    return lock


def _in_use(port: int | str, pid: str) -> ConfigError:
    """pid: of the owner, which may not have written it yet."""
    owner = f" (process {pid})" if pid.isdecimal() else ""
    if isinstance(port, str):
        return ConfigError(f"workers of this name are already running{owner}; {_advice(port)}")
    return ConfigError(f"a cluster already uses port {port}{owner}; {_advice(port)}")


def _advice(port: int | str) -> str:
    return f"choose another {'--name' if isinstance(port, str) else '--port'}"


def _is_same(file: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.lstat(), status)
    except FileNotFoundError:
        return False


def cache_dir() -> Path:
    """Tandem's folder in the user's cache; it holds the logs. Raises ConfigError for a user without a home."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "tandem"


def log_dir(port: int | str) -> Path:
    """Makes the folder of the logs in the user's cache. Raises ConfigError and OSError."""
    folder = cache_dir() / "logs" / (f"port-{port}" if isinstance(port, int) else port)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
