"""Bytes of tokens, for the two kinds of tokenisers whose tokens can be parts of characters.

Byte-level tokenisers (GPT-2, Llama 3, Qwen) have tokens of bytes, which their vocabulary spells with one character per
byte. Those with a byte fallback (Llama 2, Gemma) have tokens of text, and one token `<0xNN>` for each byte.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def spelled_bytes(piece: str) -> bytes | None:
    """Returns the bytes of a byte-level tokeniser's piece; None if it spells none, as most added tokens do."""
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return None


def fallback_byte(piece: str) -> bytes | None:
    """Returns the byte of a piece `<0xNN>`, and None for others."""
    match = _FALLBACK.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else None


class TokenBytes:
    """How one tokeniser's tokens become bytes. A tokeniser may be of neither kind."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self.is_byte_level = decoder is not None and decoder.decode(["a", *"ä½ł", "b"]) == "a你b"
        self.has_fallback = decoder is not None and decoder.decode(["a", "<0x41>", "b"]).startswith("aA")
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes | None:
        """Returns the bytes of a byte-level tokeniser's token, or the byte of a `<0xNN>`, or b"" for tokens of text.

        Returns None for ids without a token, which the vocabulary of a model may have.
        """
        found = self._known.get(token_id)
        if found is None and (piece := self._tokenizer.id_to_token(token_id)) is not None:
            if self.is_byte_level:
                spelled = spelled_bytes(piece)
                found = piece.encode() if spelled is None else spelled
            else:
                found = (fallback_byte(piece) if self.has_fallback else None) or b""
            self._known[token_id] = found
        return found


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """Returns the bytes of a tokeniser's tokens, which are found out once."""
    return TokenBytes(tokenizer)


@lru_cache(maxsize=8)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens that texts leave out."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _byte_of() -> dict[str, int]:
    """Returns GPT-2's mapping: printable bytes stand for themselves, others are characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of()
