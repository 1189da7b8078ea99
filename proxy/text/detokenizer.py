"""Incremental detokenising. Characters that span tokens (emoji, most of CJK) are held until they are complete.

`DecodeStream` of tokenizers does the work. It cannot be flushed, and fails on bytes that form no character. The tokens
that it holds are therefore kept here too, to flush them at the end and to restart the stream.
"""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tandem.protocol.messages.token_ids import unpack_token_ids

_MAX_HELD_TOKENS = 16
"""Tokens after which held bytes are flushed: a character has at most four bytes, so these are no character."""
_NUM_CONTEXT_TOKENS = 6
"""Prompt tokens before the text: with them the first word keeps its leading space."""


@lru_cache(maxsize=8)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens that texts leave out."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class Detokenizer:
    """Detokenises one sequence. prompt_token_ids: packed; only the last few are used."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: bytes, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._held: list[int] = []
        self._restart(unpack_token_ids(prompt_token_ids[-4 * _NUM_CONTEXT_TOKENS :]))
        self._skipped = special_ids(tokenizer) if skip_special_tokens else frozenset[int]()
        self.begins_text = self._skipped.issuperset(self._context)
        """The next token is the first that is decoded: no others came before, or only special ones."""

    def step(self, token_id: int) -> str:
        """Returns the text that this token completes; may be empty."""
        self.begins_text = self.begins_text and token_id in self._skipped
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises a bare Exception: "Invalid prefix encountered"
            return self.flush()
        if text is None:
            return self.flush() if len(self._held) >= _MAX_HELD_TOKENS else ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Returns the text that is held, with U+FFFD in place of incomplete characters."""
        if not self._held:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._held)
        text = text[len(before) :] if text.startswith(before) else self._decode(self._held)
        self._restart(self._held)
        return text

    def _restart(self, context: list[int]) -> None:
        # DecodeStream would emit a context that ends with an incomplete character. The one before serves as well: it
        # tells that the next token does not begin the text.
        if not self._decode(context).endswith("�"):
            self._context = context
        self._held = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
