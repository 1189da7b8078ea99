"""Token ids to text, piece by piece. Characters that span tokens (emoji, most of CJK) are held until they are whole.

`DecodeStream` does the work. It does not give up what it holds, and fails when bytes that it took for a character turn
out to be none; so the tokens it holds are kept here too, to flush them at the end and to start anew.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tandem.protocol.messages.token_ids import unpack_token_ids

_MAX_HELD_TOKENS = 16
"""A character has at most four bytes; what is held longer is no character, and holding on would cost ever more."""
_NUM_CONTEXT_TOKENS = 6
"""Tokens before the text that are looked at: a first word keeps its leading space when it continues a prompt."""


class Detokenizer:
    """One sequence's. prompt_token_ids: packed; only the last few are used."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: bytes, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._held: list[int] = []
        self._restart(unpack_token_ids(prompt_token_ids[-4 * _NUM_CONTEXT_TOKENS :]))

    def step(self, token_id: int) -> str:
        """The text that becomes certain with this token, often one word, sometimes nothing."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # a bare Exception is what tokenizers raises: "Invalid prefix encountered"
            return self.flush()
        if text is None:
            return self.flush() if len(self._held) >= _MAX_HELD_TOKENS else ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        """What is held, whole or not (then with U+FFFD in place of broken characters)."""
        if not self._held:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._held)
        text = text[len(before) :] if text.startswith(before) else self._decode(self._held)
        self._restart(self._held)
        return text

    def _restart(self, context: list[int]) -> None:
        # With a broken character at its end DecodeStream would take the context for new text.
        self._context = [] if self._decode(context).endswith("�") else context
        self._held = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
