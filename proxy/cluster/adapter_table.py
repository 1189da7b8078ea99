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

from tandem.protocol.messages.dispatch import AdapterRef
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.lora_files import AdapterFiles, InvalidAdapter, Shape
from tandem.runtime.files.whole_file import write_whole

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

    model: the served model's name, which no adapter may have. `load` and `unload` wait for the lock of the file: call
    them on a thread. The other methods may be called on the event loop meanwhile.
    """

    def __init__(self, file: Path | None, initial: list[NamedAdapter], model: str) -> None:
        self._file = file
        self._model = model
        # Identity and content of the file as it was read last; replaced as one, because threads share it.
        self._known: tuple[tuple[int, int] | None, dict[str, NamedAdapter]] = (None, {a.name: a for a in initial})

    def get(self, name: str) -> NamedAdapter | None:
        return self._by_name().get(name)

    def all(self) -> list[NamedAdapter]:
        return list(self._by_name().values())

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
            # Held for the time of writing a small file. The launcher kills a proxy that is frozen meanwhile.
            fcntl.flock(lock, fcntl.LOCK_EX)
            adapters = dict(self._by_name())
            yield adapters
            write_whole(self._file, msgspec.json.encode(list(adapters.values())))

    def _by_name(self) -> dict[str, NamedAdapter]:
        """Returns the adapters that are loaded now. The caller must not change the dict."""
        identity, by_name = self._known
        if self._file is None:
            return by_name
        try:
            found = self._file.stat()
            if (found.st_ino, found.st_mtime_ns) == identity:
                return by_name
            content = self._file.read_bytes()
        except FileNotFoundError:
            return by_name
        by_name = {each.name: each for each in msgspec.json.decode(content, type=list[NamedAdapter])}
        self._known = (found.st_ino, found.st_mtime_ns), by_name
        return by_name
