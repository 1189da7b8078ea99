"""Encodes and decodes messages. Nothing is pickled, and anything but an expected message is refused."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from tandem.runtime.errors import InvalidRequest, ProtocolError

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Limit on one message: 8 million token ids, far above any prompt."""

M = TypeVar("M")


class MessageTooLarge(InvalidRequest):
    """A message over the size limit. It is not sent, because the receiver would close the connection."""


class Codec(Generic[M]):
    """Encodes any message, decodes those of one direction (a union of tagged structs).

    `encode` raises MessageTooLarge.
    `decode` raises ProtocolError for unknown tags or fields, wrong types, and truncated or oversized bytes.
    """

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: msgspec.Struct | bytes) -> bytes:
        """Returns bytes as they are: a message for many peers is encoded once."""
        if isinstance(message, bytes):
            return message
        data = self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(
                f"The request needs a message ({type(message).__name__}) of {len(data)} bytes; the limit is "
                f"{MAX_MESSAGE_BYTES}. Send a shorter prompt or ask for fewer log-probabilities."
            )
        return data

    def decode(self, data: bytes) -> M:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not an expected message: {error}") from error
