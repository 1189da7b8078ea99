"""Stored responses: one file each, in a folder that the proxies of a host share.

A file has the input and the answer of its own response, and the id of the one before it. It begins with one line, the
sizes of the parts that follow, so that an answer or a few items are read without the rest. Old files are removed when
all together are too large or too many. Responses end with the cluster, whose folder they are in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.proxy.api.responses_api.responses_answer import response_of
from tandem.proxy.api.responses_api.responses_request import InputItem, ItemIndex, StoredInput
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.client_files import ClientFiles, FileLimits
from tandem.runtime.files.whole_file import write_whole
from tandem.runtime.threads import Threads

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Limit for all stored responses together; beyond it the least recently used ones are removed. Of several clients, each
may have half."""
MAX_RESPONSES = 10_000
MAX_RESPONSE_BYTES = 16 << 20
"""Larger responses are not stored."""
MAX_AGE_S = 24 * 3600.0
"""Time after its last use at which a response is removed."""
MAX_HISTORY_BYTES = 64 << 20
"""Limit for all responses that one request continues."""
_MAX_HEAD_BYTES = 8192
_NUM_THREADS = 4


class ResponseNotFound(InvalidRequest):
    """No response with this id is stored for this client."""

    code = "response_not_found"


class PreviousResponseNotFound(InvalidRequest):
    """The request continues a response that is not stored."""

    code = "previous_response_not_found"


class StoredResponse(msgspec.Struct, frozen=True):
    response: bytes  # JSON of the answer
    input: StoredInput
    previous: str = ""  # id of the response before it


class _Head(msgspec.Struct, frozen=True):
    """The first line of a file. The index, the items and the answer follow."""

    previous: str
    num_index_bytes: int
    num_item_bytes: int


class _Output(msgspec.Struct):
    output: list[InputItem]


class ItemReader:
    """The items of one stored response, whose file is open."""

    def __init__(self, file: BinaryIO, index: ItemIndex, start: int) -> None:
        """start: of the first item in the file."""
        self._file = file
        self._index = index
        self._starts = list(accumulate(index.sizes, initial=start))

    @property
    def ids(self) -> list[str]:
        """The ids in the order of the request."""
        return self._index.ids

    def item(self, number: int) -> bytes:
        """Returns an item as JSON."""
        self._file.seek(self._starts[number])
        return self._file.read(self._index.sizes[number])


class ResponseStore:
    """The stored responses of all clients. scope: of the client's API key.

    All methods block on files; call them on `threads` or in another process.
    """

    def __init__(self, folder: Path) -> None:
        self.threads = Threads("responses", _NUM_THREADS)
        self._files = ClientFiles(folder, ".json", FileLimits(MAX_BYTES, MAX_RESPONSES, MAX_AGE_S))

    def save(self, scope: str, response_id: str, stored: StoredResponse) -> bool:
        """Returns False if the response is too large. Raises OSError."""
        head = _Head(stored.previous, len(stored.input.index), len(stored.input.items))
        first = msgspec.json.encode(head) + b"\n"
        content = b"".join((first, stored.input.index, stored.input.items, stored.response))
        if len(content) > MAX_RESPONSE_BYTES or len(first) > _MAX_HEAD_BYTES:
            return False
        file = self._file(scope, response_id)
        self._files.make_room(file, len(content))
        write_whole(file, content)
        return True

    def load(self, scope: str, response_id: str) -> bytes:
        """Returns the answer as JSON. Raises ResponseNotFound."""
        with self._opened(scope, response_id) as (file, head):
            file.seek(head.num_index_bytes + head.num_item_bytes, os.SEEK_CUR)
            return file.read()

    @contextmanager
    def input_items(self, scope: str, response_id: str) -> Iterator[ItemReader]:
        """Opens the items that the response was asked with. Raises ResponseNotFound."""
        with self._opened(scope, response_id) as (file, head):
            index = msgspec.json.decode(file.read(head.num_index_bytes), type=ItemIndex)
            yield ItemReader(file, index, file.tell())

    def output(self, scope: str, response_id: str, max_bytes: int) -> tuple[list[InputItem], int]:
        """Returns the items of the answer, and its size. Raises ResponseNotFound, InvalidRequest beyond `max_bytes`."""
        with self._opened(scope, response_id) as (file, head):
            file.seek(head.num_index_bytes + head.num_item_bytes, os.SEEK_CUR)
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise InvalidRequest(
                f"The responses that item_reference items name have more than {MAX_HISTORY_BYTES >> 20} MiB; send the "
                "items themselves.",
                "input",
            )
        return msgspec.json.decode(content, type=_Output).output, len(content)

    def delete(self, scope: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        with self._opened(scope, response_id):
            self._file(scope, response_id).unlink(missing_ok=True)

    def history(self, scope: str, response_id: str) -> list[InputItem]:
        """Returns the items of a response and of those before it, oldest first. Raises PreviousResponseNotFound."""
        chain: list[tuple[list[bytes], bytes]] = []
        num_bytes, wanted = 0, response_id
        known: set[str] = set()
        while wanted:
            if wanted in known:  # a client may give a later response the id of an earlier one
                raise InvalidRequest(
                    f"The response {wanted!r} comes before itself, because a later one was given its id; begin a new "
                    "chain.",
                    "previous_response_id",
                )
            known.add(wanted)
            try:
                with self._opened(scope, wanted) as (file, head):
                    num_bytes += os.fstat(file.fileno()).st_size
                    if num_bytes > MAX_HISTORY_BYTES:
                        raise InvalidRequest(
                            f"The responses before this one have more than {MAX_HISTORY_BYTES >> 20} MiB; begin a new "
                            "chain.",
                            "previous_response_id",
                        )
                    index = msgspec.json.decode(file.read(head.num_index_bytes), type=ItemIndex)
                    chain.append(([file.read(size) for size in index.sizes], file.read()))
            except ResponseNotFound as error:
                raise PreviousResponseNotFound(error.message, "previous_response_id") from error
            wanted = head.previous
        items: list[InputItem] = []
        for encoded, response in reversed(chain):
            items += [msgspec.json.decode(each, type=InputItem) for each in encoded]
            items += msgspec.json.decode(response, type=_Output).output
        return items

    @contextmanager
    def _opened(self, scope: str, response_id: str) -> Iterator[tuple[BinaryIO, _Head]]:
        """Opens a file and reads its first line. A file that cannot be read is removed. Raises ResponseNotFound."""
        path = self._file(scope, response_id)
        try:
            with path.open("rb") as file:
                if self._files.is_too_old(os.fstat(file.fileno())):
                    raise FileNotFoundError
                os.utime(file.fileno())
                head = msgspec.json.decode(file.readline(_MAX_HEAD_BYTES), type=_Head)
                yield file, head
        except FileNotFoundError as error:
            raise ResponseNotFound(
                f"There is no response {response_id[:100]!r} here: it was not stored, is older than "
                f"{MAX_AGE_S / 3600:g} hours, is larger than {MAX_RESPONSE_BYTES >> 20} MiB, or was removed to make "
                "room for others.",
                "response_id",
            ) from error
        except msgspec.DecodeError as error:
            log.error("removed the stored response %s, which cannot be read: %s", path, error)
            path.unlink(missing_ok=True)
            raise ResponseNotFound(
                f"The response {response_id[:100]!r} was damaged and is lost.", "response_id"
            ) from error

    def _file(self, scope: str, response_id: str) -> Path:
        return self._files.path(scope, sha256(response_id.encode()).hexdigest())


class ItemLookup:
    """Finds items of one client's stored answers by their ids, for one request. Each answer is read once."""

    def __init__(self, store: ResponseStore, scope: str) -> None:
        self._store, self._scope = store, scope
        self._found: dict[str, InputItem] = {}
        self._read: set[str] = set()
        self._num_bytes_left = MAX_HISTORY_BYTES

    def find(self, item_id: str) -> InputItem | None:
        """Returns None for an item that is not stored. Raises InvalidRequest if the answers are too large together."""
        response_id = response_of(item_id)
        if item_id not in self._found and response_id not in self._read:
            self._read.add(response_id)
            with suppress(ResponseNotFound):
                items, num_bytes = self._store.output(self._scope, response_id, self._num_bytes_left)
                self._num_bytes_left -= num_bytes
                self._found |= {item.id: item for item in items if item.id is not None}
        return self._found.get(item_id)
