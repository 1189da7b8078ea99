"""The tokens of log-probabilities, joined, are the text: for the tokenisers of all families."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.proxy.answers.logprobs import chat_logprobs, completion_logprobs
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.proxy.text.token_text import TokensAsIds, TokenText
from tests.support.tokenizers import FAMILIES, SPECIAL, byte_level, sentencepiece_bpe, token_id, word_ends

IDS = st.lists(st.integers(0, 10**6), max_size=8)


def sampled(token_id: int, *top: int) -> SampledToken:
    return SampledToken(token_id, TokenLogprobs(-1.0, 1, [(i, -1.0 - n) for n, i in enumerate(top)]))


def known(tokenizer: Tokenizer, given: list[int]) -> list[int]:
    """Returns token ids without special ones and `<unk>`, which stands for any text."""
    num_ids = tokenizer.get_vocab_size()
    skipped = {tokenizer.token_to_id(SPECIAL), tokenizer.token_to_id("<unk>")}
    return [i % num_ids for i in given if i % num_ids not in skipped]


def streamed(tokenizer: Tokenizer, prompt: list[int], token_ids: list[int]) -> tuple[str, bool]:
    """Returns the text of the tokens behind a prompt, and whether they begin a text."""
    detokenizer = Detokenizer(tokenizer, pack_token_ids(prompt))
    begins = detokenizer.begins_text
    return "".join([*map(detokenizer.step, token_ids), detokenizer.flush()]), begins


def without_counts(text: str) -> str:
    """Decoders differ in the number of U+FFFD for bytes that form no character."""
    return re.sub("�+", "�", text)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@given(IDS, IDS, st.booleans())
def test_the_bytes_of_the_tokens_are_those_of_the_text(
    family: Callable[[], Tokenizer], prompt: list[int], given: list[int], ends_special: bool
) -> None:
    tokenizer = family()
    context = known(tokenizer, prompt) + [token_id(tokenizer, SPECIAL)] * ends_special
    token_ids = known(tokenizer, given)
    text, begins = streamed(tokenizer, context, token_ids)
    content = chat_logprobs(TokenText(tokenizer), [sampled(i) for i in token_ids], 0, begins).content
    joined = b"".join(bytes(each.bytes) for each in content)
    if family is word_ends:  # the blank behind a word is part of its token, but streams show it before the next one
        joined, text = joined.strip(), text.strip()
    try:
        assert joined.decode() == text
    except UnicodeDecodeError:
        assert without_counts(joined.decode(errors="replace")) == without_counts(text)
    if "�" not in text + "".join(each.token for each in content):
        assert "".join(each.token for each in content).strip() == text.strip()
        sent = [sampled(i) for i in token_ids]
        offsets = completion_logprobs(TokenText(tokenizer), sent, 0, 3, begins)[0].text_offset
        lengths = [len(each.token) for each in content]
        assert offsets == [3 + sum(lengths[:number]) for number in range(len(lengths))]


def test_a_blank_before_a_word_is_part_of_its_token() -> None:
    tokenizer = sentencepiece_bpe()
    text = TokenText(tokenizer)
    with_blank, without = (token_id(tokenizer, piece) for piece in ("▁true", "true"))
    found, _ = completion_logprobs(text, [sampled(with_blank, with_blank, without)], 2, 0, False)
    assert found.tokens == [" true"] and found.top_logprobs == [{" true": -1.0, "true": -2.0}]
    begun, _ = completion_logprobs(text, [sampled(with_blank), sampled(with_blank)], 0, 0, True)
    assert begun.tokens == ["true", " true"] and begun.text_offset == [0, 4]


def test_parts_of_characters_have_names_of_their_own() -> None:
    for tokenizer in (sentencepiece_bpe(), byte_level()):
        pieces = ("<0xE2>", "<0xE3>", "<0x82>", "<0xAC>")
        if tokenizer.token_to_id(pieces[0]) is None:
            pieces = ("â", "ã", "Ĥ", "¬")
        first, other, second, third = (token_id(tokenizer, piece) for piece in pieces)
        text = TokenText(tokenizer)
        found, _ = completion_logprobs(
            text, [sampled(first, first, other), sampled(second), sampled(third)], 2, 0, False
        )
        assert found.tokens == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
        assert found.top_logprobs[0] == {"bytes:\\xe2": -1.0, "bytes:\\xe3": -2.0}
        assert found.text_offset == [0, 1, 1], "one character, which the first token begins"
        content = chat_logprobs(text, [sampled(first, other)], 1, False).content
        assert (content[0].token, content[0].bytes, content[0].top_logprobs[0].bytes) == ("�", [0xE2], [0xE3])
        as_ids, _ = completion_logprobs(TokensAsIds(text), [sampled(first), sampled(second)], 2, 0, False)
        assert as_ids.tokens == [f"token_id:{first}", f"token_id:{second}"] and as_ids.text_offset == [0, 1]


def test_special_tokens_are_shown_by_name_and_begin_no_text() -> None:
    tokenizer = sentencepiece_bpe()
    end, word = token_id(tokenizer, SPECIAL), token_id(tokenizer, "▁true")
    found, _ = completion_logprobs(TokenText(tokenizer), [sampled(end), sampled(word)], 0, 0, True)
    assert found.tokens == [SPECIAL, "true"]
