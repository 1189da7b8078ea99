"""Private folder of a running cluster: sockets and the processes' config files. The launcher removes it at the end.

Commands such as `tandem status` find it by the cluster's port.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from tandem.runtime.errors import ConfigError
from tandem.runtime.files.whole_file import write_whole

PROXIES_FILE = "proxies"
"""File with the control endpoints of proxies on other hosts."""
NETWORK_FILE = "network.json"
"""File with the protection of these endpoints, a `protocol.network.NetworkConfig`."""


def runtime_dir(port: int | str) -> Path:
    """port: HTTP port of the cluster, or the name of workers that joined one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / f"tandem-{port}"
    return Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}-{port}"


def create_runtime_dir(port: int | str) -> Path:
    """Creates the folder with mode 0700. Raises ConfigError if another launcher uses it.

    The launcher holds a lock on a file in it, which the kernel releases when the process ends. The process id in the
    file says only whom to ask: after a crash it may be that of any process.
    """
    folder = runtime_dir(port)
    pid_file = folder / "launcher.pid"
    if folder.exists():
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to another user; choose another --port, or remove the folder")
        if pid_file.exists() and not _lock(pid_file):
            pid = pid_file.read_text()
            if isinstance(port, str):
                raise ConfigError(f"workers of this name are already running (process {pid}); choose another --name")
            raise ConfigError(f"a cluster already uses port {port} (process {pid}); choose another --port")
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    write_whole(pid_file, str(os.getpid()))
    _lock(pid_file)
    return folder


def _lock(file: Path) -> bool:
    """Locks the file until this process ends. Returns False if another process has locked it."""
    descriptor = os.open(file, os.O_RDONLY)  # stays open, as the lock is held for as long
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True


def cache_dir() -> Path:
    """Tandem's folder in the user's cache; it holds the logs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def log_dir(port: int | str) -> Path:
    folder = cache_dir() / "logs" / (f"port-{port}" if isinstance(port, int) else port)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
