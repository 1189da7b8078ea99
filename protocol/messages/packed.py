"""Token ids and log-probabilities of prompts on the wire, packed so that an event loop can handle a million of them.

Token ids are little-endian int32 in one byte string: decoding costs nothing per token. Log-probabilities are encoded
pieces, which their reader decodes one at a time. Decoded at once, they would hold an event loop for a second and take
ten times the memory.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec

from tandem.protocol.codec import MAX_MESSAGE_BYTES
from tandem.protocol.messages.sampling import TokenLogprobs
from tandem.runtime.errors import ProtocolError

assert array("i").itemsize == 4 and sys.byteorder == "little", "Tandem supports little-endian hosts with 32-bit ints"


BYTES_PER_TOKEN = 4


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Returns `token_ids`, each in [0, 2**31), as bytes."""
    return array("i", token_ids).tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_token_ids`. Raises ValueError unless the length is a multiple of four."""
    return token_array(packed).tolist()


def token_array(packed: bytes) -> array[int]:
    """Returns what `unpack_token_ids` does, without an object for each token. NumPy copies it at once."""
    return array("i", packed)


MAX_PROMPT_LOGPROBS_BYTES = MAX_MESSAGE_BYTES // 2
"""Encoded logprobs of one prompt, which proxies enforce: 52,000 tokens with 20 top tokens each, or 490,000 with one."""
_LOGPROBS_PER_PIECE = 1024
"""Encoding, decoding and rendering a piece each take about a millisecond."""
_BYTES_PER_TOKEN, _BYTES_PER_TOP_TOKEN = 19, 15
"""At most, in msgpack: a float, a rank and the headers of arrays; an array of a token id and a float."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[TokenLogprobs])


def pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[bytes]:
    """Returns the pieces for logprobs with the same number of top tokens."""
    if not logprobs:
        return []
    length = max(1, _LOGPROBS_PER_PIECE // (1 + len(logprobs[0].top)))
    return [_encode(logprobs[start : start + length]) for start in range(0, len(logprobs), length)]


def unpack_logprobs(piece: bytes) -> list[TokenLogprobs]:
    """Decodes one piece. Raises ProtocolError."""
    try:
        return _decoder.decode(piece)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a piece of prompt logprobs: {error}") from error


def max_packed_bytes(num_tokens: int, num_top: int) -> int:
    """Returns an upper limit for the size of all pieces together."""
    return num_tokens * (_BYTES_PER_TOKEN + _BYTES_PER_TOP_TOKEN * num_top)
