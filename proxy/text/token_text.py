"""Text and bytes of single tokens, for logprobs. `proxy.text.detokenizer` handles text streams."""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "�"
_MAX_CACHED = 2**18
"""Texts that are kept. Requests for the log-probabilities of all tokens need a whole vocabulary again and again."""


class TokenText:
    """Tokens of one tokeniser. The text of a token that is part of a character contains U+FFFD; its bytes are exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cached_text = lru_cache(maxsize=_MAX_CACHED)(self._decode)

    def _decode(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def text(self, token_id: int) -> str:
        """Returns the token's text; special tokens by name."""
        return self._cached_text(token_id)

    def plain(self, token_id: int) -> str:
        """Returns the token's text as it counts for text offsets."""
        return self.text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        """Returns the token's bytes, also for a part of a character."""
        text = self.text(token_id)
        if _REPLACEMENT not in text:
            return list(text.encode())
        piece = self._tokenizer.id_to_token(token_id) or ""
        if match := _BYTE_FALLBACK.fullmatch(piece):
            return [int(match[1], 16)]
        if all(character in _BYTE_OF for character in piece):
            return [_BYTE_OF[character] for character in piece]
        return list(text.encode())


class TokensAsIds(TokenText):
    """Shows tokens as `token_id:NUMBER`, as vLLM's return_tokens_as_token_ids does; their bytes do not change."""

    def __init__(self, plain: TokenText) -> None:
        self._plain = plain

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def plain(self, token_id: int) -> str:
        return self._plain.text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        return self._plain.bytes(token_id)


def _byte_of() -> dict[str, int]:
    """Returns GPT-2's mapping: printable bytes stand for themselves, others are characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_of()
