"""The cluster's CURVE keys: made by `tandem keys`, read by every process that speaks ZeroMQ over tcp.

There is a key pair for each part that a process can play, not for each process: a host that only runs workers gets the
workers' secret key and cannot pass for a proxy. Whoever holds a secret key is a member of the cluster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
import zmq.auth

from tandem.runtime.errors import ConfigError

Part = Literal["proxy", "worker", "operator"]
"""Who speaks: proxies, workers of both roles (and the launcher beside them), and `tandem status` and the like."""

PARTS: tuple[Part, ...] = get_args(Part)
_MAY_CALL: dict[Part, tuple[Part, ...]] = {"proxy": ("worker", "operator"), "worker": ("proxy", "worker")}
"""Who may connect to whose sockets; operators bind none."""


@dataclass(frozen=True)
class NetworkKeys:
    """What one process knows. Keys are in Z85, 40 bytes each. public: of each part."""

    part: Part
    secret: bytes
    public: dict[Part, bytes]

    @property
    def callers(self) -> frozenset[bytes]:
        """Public keys of those who may connect to this part's sockets."""
        return frozenset(self.public[part] for part in _MAY_CALL.get(self.part, ()))


class HandedKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """NetworkKeys inside of a configuration, which must then not be written anywhere. public: of each part."""

    part: Part
    secret: str
    public: dict[Part, str]

    @classmethod
    def of(cls, keys: NetworkKeys) -> HandedKeys:
        return cls(keys.part, keys.secret.decode(), {part: key.decode() for part, key in keys.public.items()})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.part!r})"  # not the secret

    def keys(self, part: Part) -> NetworkKeys:
        """Raises ConfigError where they are another part's."""
        if part != self.part:
            raise ConfigError(f"the keys that were handed over are a {self.part}'s, not a {part}'s")
        return NetworkKeys(part, self.secret.encode(), {each: key.encode() for each, key in self.public.items()})


def make_keys(folder: Path) -> list[Path]:
    """Make a key pair for each part in `folder`, which is created with mode 0700. Returns the files, each 0600.

    Raises ConfigError where there are keys already: to overwrite them would lock out the processes that use them.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = sorted(folder.glob("*.key*"))
        if there:
            raise ConfigError(
                f"{folder} holds keys already ({there[0].name}); name another folder, or remove them first"
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
    """Raises ConfigError for files that are missing, unreadable, or whose secrets others may read."""
    secret_file = folder / f"{part}.key_secret"
    try:
        mode = secret_file.stat().st_mode
        if mode & 0o077:
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
