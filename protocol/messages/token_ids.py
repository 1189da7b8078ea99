"""Token ids on the wire: little-endian int32 in one byte string, so that decoding costs nothing per token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

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
