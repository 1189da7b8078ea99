"""The LoRA adapters that clients may name as `model`, in a file that all proxies of this host and their readers share.

Each lookup compares the file's identity and reads it only when it has been replaced, so that a request through one
proxy finds the adapter that was loaded through another. Requests for the served model do not look it up.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tandem.protocol.lora_files import AdapterFiles, InvalidAdapter, Shape
from tandem.protocol.messages.adapter import AdapterRef
from tandem.protocol.proxy_endpoints import write_whole
from tandem.runtime.errors import InvalidRequest

MAX_ADAPTERS = 1024
"""Adapters that may be loaded at the same time."""


class NamedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """created: Unix time."""

    name: str
    ref: AdapterRef
    created: int = 0


class AdapterNotFound(InvalidRequest):
    """No adapter of this name is loaded."""

    code = "adapter_not_found"


class AdapterTable:
    """file: shared by the proxies of this host; None if adapters cannot be loaded. initial: those of the configuration.

    model: the served model's name, which no adapter may have.
    """

    def __init__(self, file: Path | None, initial: list[NamedAdapter], model: str) -> None:
        self._file = file
        self._model = model
        self._by_name = {adapter.name: adapter for adapter in initial}
        self._seen: tuple[int, int] | None = None

    def get(self, name: str) -> NamedAdapter | None:
        self._refresh()
        return self._by_name.get(name)

    def all(self) -> list[NamedAdapter]:
        self._refresh()
        return list(self._by_name.values())

    def load(
        self, name: str, files: AdapterFiles, folder: Path, modules: Mapping[str, Shape], *, replace: bool = False
    ) -> None:
        """Adds an adapter, for all proxies of this host. modules: layers of the served model that adapters may change.

        replace: an adapter of this name is replaced; requests in flight keep the one they have. Raises InvalidAdapter.
        """
        files.check_fits(modules)
        with self._change() as adapters:
            if name == self._model:
                raise InvalidAdapter(f"{name!r} is the served model's name; give the adapter another.", "lora_name")
            if name in adapters and not replace:
                raise InvalidAdapter(
                    f"The name {name!r} is in use: an adapter of this name is loaded from {adapters[name].ref.folder}. "
                    "Unload it first, or set load_inplace.",
                    "lora_name",
                )
            if len(adapters) >= MAX_ADAPTERS and name not in adapters:
                raise InvalidAdapter(
                    f"{MAX_ADAPTERS} adapters are loaded, which is the limit; unload one.", "lora_name"
                )
            adapters[name] = NamedAdapter(name, AdapterRef(files.digest, str(folder)), int(time.time()))

    def unload(self, name: str) -> None:
        """Requests in flight finish. Raises AdapterNotFound."""
        with self._change() as adapters:
            if name not in adapters:
                raise AdapterNotFound(f"No adapter {name!r} is loaded.", "lora_name")
            del adapters[name]

    @contextmanager
    def _change(self) -> Iterator[dict[str, NamedAdapter]]:
        """Holds the lock of the file, and writes the changed adapters unless an error is raised."""
        if self._file is None:
            raise InvalidAdapter("This proxy cannot load adapters: it has no lora_file.")
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for the time of writing a small file
            self._refresh()
            adapters = dict(self._by_name)
            yield adapters
            write_whole(self._file, msgspec.json.encode(list(adapters.values())).decode())
        self._refresh()

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            found = self._file.stat()
            if (found.st_ino, found.st_mtime_ns) == self._seen:
                return
            content = self._file.read_bytes()
        except FileNotFoundError:
            return
        self._by_name = {each.name: each for each in msgspec.json.decode(content, type=list[NamedAdapter])}
        self._seen = found.st_ino, found.st_mtime_ns
