"""API keys: which are valid, whose they are, and the file that they are read from.

A line of the file is `KEY` or `KEY NAME`. Keys with the same NAME are one client, which keeps its limits and its cached
prefixes while its keys are replaced. A key without a NAME is a client of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from functools import partial
from hashlib import sha256
from pathlib import Path

from tandem.proxy.admission.api_key import ApiKey
from tandem.runtime.errors import ConfigError, TandemError
from tandem.runtime.files.regular_file import read_regular_with_status
from tandem.runtime.threads import Threads

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
"""Seconds between two reads of the file. A change holds after the second read that finds the same content."""
MAX_FILE_BYTES = 1 << 20
"""Size of the file; about 15,000 keys."""
_READ_TIMEOUT_S = 10.0
"""What a read of the file may take before that is logged. It is tried again."""
_BEARER = "bearer"
_UNCHANGED = "the keys that were read before stay valid"


class ApiKeys:
    """Raises ConfigError for a file that cannot be read, is too large, or holds no keys.

    api_key: valid besides those of the file, and never revoked. file: None if there is none. setting: that names it.
    """

    def __init__(self, api_key: str | None, file: Path | None, setting: str = "api_keys_file") -> None:
        self._fixed = {} if api_key is None else {_digest(api_key): _own_client(api_key)}
        self._keys: dict[bytes, ApiKey] = {}
        self._file = KeyFile(file, setting) if file is not None else None
        self._setting = setting
        self._replace(parse_keys(self._file.read(), setting) if self._file is not None else {})

    def find(self, authorization: str, x_api_key: str = "") -> ApiKey | None:
        """Returns the valid key in one of these headers, or None where there is none.

        A client may use `Authorization` for a gateway before this server, and Anthropic's `X-Api-Key` for the key.
        Keys are looked up by their hash, so that the time of an answer reveals nothing about them.
        """
        scheme, _, credentials = authorization.partition(" ")
        given = [credentials.lstrip(" ")] if scheme.lower() == _BEARER else []
        found = (self._keys.get(_digest(key)) for key in [*given, x_api_key] if key)
        return next((key for key in found if key is not None), None)

    def of_client(self, client: str) -> ApiKey | None:
        """Returns a valid key of this client."""
        return next((key for key in self._keys.values() if key.client == client), None)

    async def watch(self) -> None:
        """Takes the keys of the file, which must exist, when it has changed. One without valid keys changes nothing."""
        assert self._file is not None
        async for text in self._file.changes():
            try:
                self._replace(await self._file.threads.run(partial(parse_keys, text, self._setting)))
            except TandemError as error:
                log.error("%s; %s", error, _UNCHANGED)
            else:
                log.info("read the API keys again: %d are valid", len(self._keys))

    def _replace(self, clients: dict[bytes, str]) -> None:
        """Takes these keys instead of the present ones. clients: by digest of their key."""
        before, clients = self._keys, self._fixed | clients
        self._keys = {}
        for digest, client in clients.items():
            known = before.get(digest)
            self._keys[digest] = known if known is not None and known.client == client else ApiKey(client)
        for digest, key in before.items():
            if digest not in clients:
                key.revoke()


class KeyFile:
    """Reads the file, and again once it has changed. threads: for reading and parsing it, and for nothing else.

    setting: that names the file, for error messages.
    """

    def __init__(self, path: Path, setting: str = "api_keys_file") -> None:
        self._path = path
        self._setting = setting
        self.threads = Threads("api keys", 1, 2, _READ_TIMEOUT_S)
        self._read_as: tuple[int, ...] | None = None  # how the file looked when it was read
        self._seen_as: tuple[int, ...] | None = None  # how it looked at the last call of `changed`

    def read(self) -> str:
        """Raises ConfigError for a file that cannot be read, is too large or is not UTF-8 text."""
        try:
            content, status = read_regular_with_status(self._path, MAX_FILE_BYTES)
            self._read_as = self._seen_as = _looks(status)
            return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{self._setting}: cannot read {self._path}: {reason}") from error

    def changed(self) -> str | None:
        """Reads the file if it differs from the one read last and has not changed since the last call, else None.

        So a file that is being written is not read. Raises ConfigError as `read` does.
        """
        try:
            looks = _looks(self._path.stat())
        except OSError as error:
            raise ConfigError(f"{self._setting}: cannot read {self._path}: {error.strerror}") from error
        is_settled, self._seen_as = looks == self._seen_as, looks
        return self.read() if is_settled and looks != self._read_as else None

    async def changes(self) -> AsyncGenerator[str, None]:
        """Yields the text after each change, for ever. Logs once why the file cannot be read.

        Reads on a thread of its own: a revoked key is refused however slow other files are.
        """
        trouble = ""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                text = await self.threads.run(self.changed)
            except TandemError as error:
                if error.message != trouble:
                    trouble = error.message
                    log.error("%s; %s", trouble, _UNCHANGED)
                continue
            if text is not None:
                trouble = ""
                yield text


def parse_keys(text: str, setting: str = "api_keys_file") -> dict[bytes, str]:
    """Returns the client of each key, by digest of the key. Blank lines and lines that begin with # are ignored.

    Raises ConfigError, which quotes no line, for a text without keys or with a key that has two names.
    """
    clients: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key, *name = line.split(maxsplit=1) or ("",)
        if not key or key.startswith("#"):
            continue
        digest = _digest(key)
        client = f"name {name[0].rstrip()}" if name else _own_client(key)
        if clients.setdefault(digest, client) != client:
            raise ConfigError(f"{setting}: the key in line {number} has another name in a line before")
    if not clients:
        raise ConfigError(f"{setting}: the file holds no keys; write one on each line")
    return clients


def _digest(key: str) -> bytes:
    return sha256(b"tandem api key\0" + key.encode("utf-8", "surrogateescape")).digest()


def _own_client(key: str) -> str:
    """The client of a key without a name; the same on all proxies and after a restart."""
    return f"key {_digest(key).hex()[:32]}"


def _looks(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
