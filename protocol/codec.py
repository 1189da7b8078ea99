"""Encodes and decodes messages. Nothing is pickled, and anything but an expected message is refused."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from tandem.runtime.errors import ProtocolError

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Limit on one message: 8 million token ids, far above any prompt."""

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes any message, decodes those of one direction (a union of tagged structs).

    `decode` raises ProtocolError for unknown tags or fields, wrong types, and truncated or oversized bytes.
    """

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: msgspec.Struct) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not an expected message: {error}") from error
