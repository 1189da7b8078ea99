"""Text and bytes of single tokens, for logprobs. `proxy.text.detokenizer` handles text streams."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer

from tandem.proxy.text.detokenizer import fallback_byte, special_ids, spelled_bytes

_REPLACEMENT = "�"
_MAX_CACHED = 2**18
"""Texts that are kept. Requests for the log-probabilities of all tokens need a whole vocabulary again and again."""
_MAX_TRIED, _MAX_WORDS = 4096, 8
"""Tokens, and words among them, that are tried as neighbours of others. The vocabulary of BERT begins with a thousand
that have no use."""


class TokenText:
    """Tokens of one tokeniser, as parts of a text: joined, their bytes are the text's bytes.

    Decoders treat the first and the last token of a text in another way than the others: sentencepiece's leave out the
    blank of a first word, WordPiece's put no blank before it, and those with a mark for the end of a word put no blank
    behind the last one. A token is therefore decoded between two others. begins: the token is the first of a text.

    The text of a token that is part of a character contains U+FFFD; its bytes are exact.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before, self._after, self._num_after = _neighbours(tokenizer)
        self._cached_text = lru_cache(maxsize=_MAX_CACHED)(self._decode)

    def _decode(self, token_id: int, begins: bool) -> str:
        before = [] if begins else self._before
        text, num_before = self._joined([*before, token_id, *self._after]), len(self._joined(before))
        return text[num_before : len(text) - self._num_after]

    def _joined(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        """Returns whether the token is shown by name, though texts leave it out."""
        return token_id in special_ids(self._tokenizer)

    def text(self, token_id: int, begins: bool = False) -> str:
        """Returns the token's text; special tokens by name."""
        return self._cached_text(token_id, begins)

    def name(self, token_id: int, begins: bool = False) -> str:
        """Returns a text that no token with other bytes has: of a part of a character `bytes:\\xe2`, as OpenAI does."""
        text = self.text(token_id, begins)
        if _REPLACEMENT not in text:
            return text
        exact = bytes(self.bytes(token_id, begins))
        return text if exact == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in exact)

    def num_characters(self, token_id: int, begins: bool = False) -> int:
        """Returns how many characters of the text begin with this token."""
        text = self._cached_text(token_id, begins)
        if _REPLACEMENT not in text:
            return len(text)
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes(token_id, begins))

    def bytes(self, token_id: int, begins: bool = False) -> list[int]:
        """Returns the token's bytes, also for a part of a character."""
        text = self._cached_text(token_id, begins)
        if _REPLACEMENT not in text:
            return list(text.encode())
        piece = self._tokenizer.id_to_token(token_id) or ""
        exact = fallback_byte(piece) or spelled_bytes(piece)
        return list(text.encode() if exact is None else exact)


class TokensAsIds(TokenText):
    """Shows tokens as `token_id:NUMBER`, as vLLM's return_tokens_as_token_ids does; their bytes do not change."""

    def __init__(self, plain: TokenText) -> None:
        self._plain = plain

    def is_special(self, token_id: int) -> bool:
        return self._plain.is_special(token_id)

    def text(self, token_id: int, begins: bool = False) -> str:
        return f"token_id:{token_id}"

    def name(self, token_id: int, begins: bool = False) -> str:
        return self.text(token_id)

    def num_characters(self, token_id: int, begins: bool = False) -> int:
        return self._plain.num_characters(token_id, begins)

    def bytes(self, token_id: int, begins: bool = False) -> list[int]:
        return self._plain.bytes(token_id, begins)


def _neighbours(tokenizer: Tokenizer) -> tuple[list[int], list[int], int]:
    """Returns the tokens between which others are decoded, and the number of characters that the second one adds.

    The first is a word, and the second continues it without a blank. Both, or only the second, are empty where the
    vocabulary has none.
    """
    added = tokenizer.get_added_tokens_decoder()
    known = [i for i in range(min(tokenizer.get_vocab_size(), _MAX_TRIED)) if i not in added]

    def text(*token_ids: int) -> str:
        return tokenizer.decode([*token_ids], skip_special_tokens=False)

    words = [token_id for token_id in known if _is_word(text(token_id))][:_MAX_WORDS]
    for first in words:
        before = text(first)
        for after in known:
            shown = text(first, after)
            if shown.startswith(before) and _is_word(added_text := shown[len(before) :]):
                return [first], [after], len(added_text)
    return words[:1], [], 0


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum()
