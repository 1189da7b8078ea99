"""Incremental detokenising. Characters that span tokens (emoji, most of CJK) are held until they are complete.

Tokens give the same text whole and in any parts. Bytes that form no character are shown as U+FFFD:

- Byte-level tokenisers show one for as many bytes as begin a character, as `Tokenizer.decode` and Unicode do.
- Those with a byte fallback show one for each byte, as sentencepiece does. `Tokenizer.decode` shows all bytes of a run
  as U+FFFD if one of them is wrong. A stream cannot, because it has shown the characters before.

At most three bytes are held, and each step decodes a few tokens.
"""

from __future__ import annotations

import codecs
import re
from functools import lru_cache

from tokenizers import Tokenizer

from tandem.protocol.messages.packed import unpack_token_ids

_NUM_CONTEXT_TOKENS = 6
"""Prompt tokens before the text: with them the first word keeps its leading space."""
_REPLACEMENT = "�"


class Detokenizer:
    """Detokenises one sequence. prompt_token_ids: packed; only the last few are used."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: bytes, skip_special_tokens: bool = True) -> None:
        self._bytes = token_bytes(tokenizer)
        self._skipped = special_ids(tokenizer) if skip_special_tokens else frozenset[int]()
        prompt = unpack_token_ids(prompt_token_ids[-4 * _NUM_CONTEXT_TOKENS :])
        context = [each for each in prompt if each not in self._skipped and self._bytes.of(each) is not None]
        self.begins_text = not context
        """The next token is the first that is decoded: no others came before, or only special ones."""
        self._text: _ByteText | _PieceText
        if self._bytes.is_byte_level:
            self._text = _ByteText()
        else:
            self._text = _PieceText(tokenizer, context, bool(context and self._bytes.of(context[-1])))

    def step(self, token_id: int) -> str:
        """Returns the text that this token completes; may be empty."""
        data = self._bytes.of(token_id)
        if data is None or token_id in self._skipped:
            return ""
        self.begins_text = False
        return self._text.step(token_id, data)

    def flush(self) -> str:
        """Returns the text that is held, with U+FFFD in place of incomplete characters. No step may follow."""
        return self._text.flush()


def decode_whole(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> str:
    """Returns the text that `Detokenizer` gives for all tokens together."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    if _REPLACEMENT not in text or not token_bytes(tokenizer).has_fallback:
        return text
    detokenizer = Detokenizer(tokenizer, b"", skip_special_tokens)
    return "".join([*map(detokenizer.step, token_ids), detokenizer.flush()])


class _ByteText:
    """Text of a byte-level tokeniser, whose tokens do not depend on each other."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceText:
    """Text of a tokeniser with tokens of text, whose decoder may treat the first token in another way than the others.

    A token is therefore decoded behind those before it, without their own text.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int], is_behind_bytes: bool) -> None:
        self._tokenizer = tokenizer
        self._context = context
        """The last tokens that have text, or the first ones of all."""
        self._is_behind_bytes = is_behind_bytes
        """Whether the context ends with a byte token. Decoded beside wrong ones, right ones would not be shown."""
        self._run: list[int] = []
        """Byte tokens that begin a character, and their bytes."""
        self._run_bytes = b""

    def step(self, token_id: int, data: bytes) -> str:
        """data: a byte token's byte, else empty."""
        if not data:
            text = self.flush()
            self._is_behind_bytes = False
            return text + self._decode([token_id])
        self._run.append(token_id)
        self._run_bytes += data
        text = ""
        while self._run:
            try:
                character, _ = codecs.utf_8_decode(self._run_bytes, "strict", False)
            except UnicodeDecodeError:
                text += self._wrong_byte()
                continue
            if character:
                text += character if self._is_behind_bytes else self._decode(self._run)
                self._behind_bytes(self._run)
                self._run, self._run_bytes = [], b""
            break
        return text

    def flush(self) -> str:
        text = ""
        while self._run:
            text += self._wrong_byte()
        return text

    def _wrong_byte(self) -> str:
        """Shows the first byte that is held."""
        self._behind_bytes(self._run[:1])
        self._run, self._run_bytes = self._run[1:], self._run_bytes[1:]
        return _REPLACEMENT

    def _behind_bytes(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._is_behind_bytes = True

    def _decode(self, token_ids: list[int]) -> str:
        """Returns what the tokens add to the text."""
        before: str = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text: str = self._tokenizer.decode([*self._context, *token_ids], skip_special_tokens=False)
        added = text[len(before) :] if text.startswith(before) else self._tokenizer.decode(token_ids, False)
        if added or not before:
            self._context = token_ids
        return added


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
    """How one tokeniser's tokens become bytes, for the two kinds of tokenisers whose tokens can be parts of characters.

    Byte-level tokenisers (GPT-2, Llama 3, Qwen) have tokens of bytes, which their vocabulary spells with one character
    per byte. Those with a byte fallback (Llama 2, Gemma) have tokens of text, and one token `<0xNN>` for each byte. A
    tokeniser may be of neither kind.
    """

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
