"""Stored responses: one file each, in a folder that the proxies of a host share.

A file has the input and the answer of its own response, and the id of the one before it. Old files are removed when all
together are too large or too many. Responses end with the cluster, whose folder they are in.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from tandem.proxy.api.responses_request import InputItem
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.whole_file import write_whole

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
_CHECK_INTERVAL_S, _CHECK_BYTES = 30.0, 16 << 20
"""Old responses are removed after this time, or after this much that was stored, whichever comes first."""


class ResponseNotFound(InvalidRequest):
    """No response with this id is stored for this client."""

    code = "response_not_found"


class PreviousResponseNotFound(InvalidRequest):
    """The request continues a response that is not stored."""

    code = "previous_response_not_found"


class StoredResponse(msgspec.Struct, frozen=True):
    """response: the answer. input: items of the request. previous: id of the response before it, or ""."""

    response: msgspec.Raw
    input: msgspec.Raw
    previous: str = ""


class _Output(msgspec.Struct):
    output: list[InputItem]


class ResponseStore:
    """The stored responses of all clients. scope: of the client's API key.

    All methods block on files; call them on a thread or in another process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checked_at = 0.0
        self._num_unchecked_bytes = 0

    def save(self, scope: str, response_id: str, stored: StoredResponse) -> bool:
        """Returns False if the response is too large. Raises OSError."""
        content = msgspec.json.encode(stored)
        if len(content) > MAX_RESPONSE_BYTES:
            return False
        file = self._file(scope, response_id)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_old(len(content))
        write_whole(file, content)
        return True

    def load(self, scope: str, response_id: str) -> StoredResponse:
        """Raises ResponseNotFound."""
        file = self._file(scope, response_id)
        try:
            content = file.read_bytes()
            if time.time() - file.stat().st_mtime > MAX_AGE_S:
                raise FileNotFoundError
            os.utime(file)
        except FileNotFoundError as error:
            raise ResponseNotFound(
                f"There is no response {response_id!r} here: it was not stored, is older than {MAX_AGE_S / 3600:g} "
                f"hours, is larger than {MAX_RESPONSE_BYTES >> 20} MiB, or was removed to make room for others.",
                "response_id",
            ) from error
        return msgspec.json.decode(content, type=StoredResponse)

    def input_items(self, scope: str, response_id: str) -> list[InputItem]:
        """Returns the items that the response was asked with, in their order. Raises ResponseNotFound."""
        return msgspec.json.decode(self.load(scope, response_id).input, type=list[InputItem])

    def delete(self, scope: str, response_id: str) -> None:
        """Raises ResponseNotFound."""
        self.load(scope, response_id)
        self._file(scope, response_id).unlink(missing_ok=True)

    def history(self, scope: str, response_id: str) -> list[InputItem]:
        """Returns the items of a response and of those before it, oldest first. Raises PreviousResponseNotFound."""
        chain: list[StoredResponse] = []
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
                chain.append(self.load(scope, wanted))
            except ResponseNotFound as error:
                raise PreviousResponseNotFound(error.message, "previous_response_id") from error
            num_bytes += len(bytes(chain[-1].input)) + len(bytes(chain[-1].response))
            if num_bytes > MAX_HISTORY_BYTES:
                raise InvalidRequest(
                    f"The responses before this one have more than {MAX_HISTORY_BYTES >> 20} MiB; begin a new chain.",
                    "previous_response_id",
                )
            wanted = chain[-1].previous
        items: list[InputItem] = []
        for stored in reversed(chain):
            items += msgspec.json.decode(stored.input, type=list[InputItem])
            items += msgspec.json.decode(stored.response, type=_Output).output
        return items

    def _file(self, scope: str, response_id: str) -> Path:
        client = sha256(scope.encode()).hexdigest()[:32]
        return self._folder / client / f"{sha256(response_id.encode()).hexdigest()}.json"

    def _remove_old(self, num_bytes: int) -> None:
        """Removes old responses beyond the limits, counting one more of `num_bytes`, unless it did so recently."""
        now = time.time()
        self._num_unchecked_bytes += num_bytes
        if now - self._checked_at < _CHECK_INTERVAL_S and self._num_unchecked_bytes < _CHECK_BYTES:
            return
        self._checked_at, self._num_unchecked_bytes = now, 0
        found = []
        for file in self._folder.glob("*/*"):
            with suppress(FileNotFoundError):  # another proxy removes files too
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file))
        found.sort(key=lambda each: each[0], reverse=True)
        share = 1 if len({file.parent for _, _, file in found}) <= 1 else 2
        total, num_kept = num_bytes, 1
        by_client: Counter[Path] = Counter()
        num_by_client: Counter[Path] = Counter()
        for used_at, size, file in found:
            client = file.parent
            if (
                now - used_at > MAX_AGE_S
                or total + size > MAX_BYTES
                or num_kept >= MAX_RESPONSES
                or by_client[client] + size > MAX_BYTES // share
                or num_by_client[client] >= MAX_RESPONSES // share
            ):
                file.unlink(missing_ok=True)
                continue
            total, num_kept = total + size, num_kept + 1
            by_client[client] += size
            num_by_client[client] += 1
