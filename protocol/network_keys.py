"""The cluster's CURVE keys: created by `tandem keys`, read by every process that uses ZeroMQ over tcp.

Each part, not each process, has a key pair: a host that runs only workers has the workers' secret key and cannot pose
as a proxy. Any process with a secret key is a member of the cluster.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq.auth

from tandem.runtime.errors import ConfigError

Part = Literal["proxy", "worker", "operator"]
"""Role of a process: proxy, worker (both kinds, and the launcher), or operator (`tandem status` and the like)."""

PARTS: tuple[Part, ...] = get_args(Part)
_MAY_CALL: dict[Part, tuple[Part, ...]] = {"proxy": ("worker", "operator"), "worker": ("proxy", "worker")}
"""Which parts may connect to a part's sockets. Operators bind none."""


class NetworkKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys that one process knows, in Z85 (40 bytes each). public: one for each part."""

    part: Part
    secret: bytes
    public: dict[Part, bytes]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.part!r})"  # without the secret

    @property
    def callers(self) -> frozenset[bytes]:
        """Public keys of the parts that may connect to this part's sockets."""
        return frozenset(self.public[part] for part in _MAY_CALL.get(self.part, ()))


def make_keys(folder: Path) -> list[Path]:
    """Creates a key pair for each part in `folder`, which gets mode 0700. Returns the files, with mode 0600.

    Raises ConfigError if the folder holds keys already: overwriting them would lock out running processes.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        existing = sorted(folder.glob("*.key*"))
        if existing:
            raise ConfigError(
                f"{folder} holds keys already ({existing[0].name}); choose another folder, or remove them first"
            )
        folder.chmod(0o700)
        mask = os.umask(0o077)
        try:
            files = [Path(file) for part in PARTS for file in zmq.auth.create_certificates(folder, part)]
        finally:
            os.umask(mask)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error.strerror}") from error
    return files


def load_keys(folder: Path, part: Part) -> NetworkKeys:
    """Reads a part's keys. Raises ConfigError for files that are missing, unreadable, or readable by other users.

    A file of root may be readable by its group, because a Secret that is mounted for another user has to be.
    """
    secret_file = folder / f"{part}.key_secret"
    try:
        status = secret_file.stat()
        is_mounted = status.st_uid == 0 and os.getuid() != 0
        if status.st_mode & (0o037 if is_mounted else 0o077):
            raise ConfigError(f"{secret_file} can be read by others; run: chmod 600 {secret_file}")
        secret = zmq.auth.load_certificate(secret_file)[1]
        public = {each: zmq.auth.load_certificate(folder / f"{each}.key")[0] for each in PARTS}
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the {part}'s keys in {folder} ({why}); make them with `tandem keys {folder}`"
        ) from error
    if secret is None:
        raise ConfigError(f"{secret_file} holds no secret key; make keys with `tandem keys FOLDER`")
    return NetworkKeys(part, secret, public)
