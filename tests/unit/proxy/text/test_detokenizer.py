"""Streamed text concatenates to the whole text for any tokens, and stop strings cut at the same place."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise, takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tandem.protocol.messages.packed import pack_token_ids
from tandem.proxy.dispatch.generation import StopStrings
from tandem.proxy.text.detokenizer import Detokenizer, decode_whole, spelled_bytes
from tests.support.tokenizers import (
    SPECIAL,
    byte_level,
    sentencepiece_bpe,
    sentencepiece_without_strip,
    token_id,
    unigram,
    word_ends,
    word_piece,
)

FALLBACK = (sentencepiece_bpe, sentencepiece_without_strip)
OTHERS = (unigram, word_piece, word_ends)


def stream(
    tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, pack_token_ids(prompt or []), skip_special_tokens)
    return [*(detokenizer.step(token_id) for token_id in token_ids), detokenizer.flush()]


@cache
def byte_level_with_added_tokens() -> Tokenizer:
    """Returns a tokeniser whose added tokens are spelled with and without the characters that stand for bytes."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens(["你", "é", "Ġ", "<tool_call>", "a b"])
    tokenizer.add_special_tokens(["<|im_end|>", "日 x"])
    return tokenizer


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def without_wrong_bytes(token_ids: list[int], wrong: int) -> list[int]:
    """Returns the tokens of a tokeniser with a byte fallback, with `wrong` for each byte that is in no character."""
    known = [token_id for token_id in token_ids if not 2 <= token_id < 258]
    left, found = [*token_ids], list[int]()
    while left:
        data = bytes(each - 2 for each in takewhile(lambda each: 2 <= each < 258, left[:4]))
        size = next((size for size in range(1, len(data) + 1) if is_character(data[:size])), 0)
        found += left[:size] or [wrong if data else left[0]]
        del left[: size or 1]
    assert [token_id for token_id in found if token_id != wrong and not 2 <= token_id < 258] == known
    return found


def whole(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    """Returns what sentencepiece shows, by tokenizers' own decoder, whose byte fallback shows right characters only."""
    marked = Tokenizer.from_str(tokenizer.to_str())
    marked.add_tokens(["\ufffd"])
    skipped = {token_id(tokenizer, SPECIAL)} if skip_special_tokens else set[int]()
    shown = [each for each in token_ids if each not in skipped and tokenizer.id_to_token(each) is not None]
    return marked.decode(without_wrong_bytes(shown, token_id(marked, "\ufffd")), skip_special_tokens=False)


def test_a_word_behind_bytes_that_are_no_character_keeps_its_blank() -> None:
    tokenizer = sentencepiece_bpe()
    word, wrong, blank_word = (token_id(tokenizer, piece) for piece in ("a", "<0xE2>", "▁b"))
    for number in (1, 16, 20):  # from some number on, they are shown before their end is known
        shown = "".join(stream(tokenizer, [word, *[wrong] * number, blank_word, blank_word]))
        assert shown == "a" + "�" * number + " b b"


@given(st.text())
def test_any_text_survives(text: str) -> None:
    token_ids = byte_level().encode_batch_fast([text])[0].ids
    assert "".join(stream(byte_level(), token_ids)) == text


@given(st.text(max_size=30), st.text(max_size=5))
def test_the_prompt_is_not_repeated(text: str, prompt: str) -> None:
    tokenizer = byte_level()
    prompt_ids = tokenizer.encode_batch_fast([prompt])[0].ids
    assert "".join(stream(tokenizer, tokenizer.encode_batch_fast([text])[0].ids, prompt_ids)) == text


@given(st.lists(st.integers(0, 340), max_size=80), st.lists(st.integers(0, 340), max_size=8), st.booleans())
@settings(max_examples=300)
def test_any_tokens_of_bytes_become_the_whole_text(token_ids: list[int], prompt: list[int], skip: bool) -> None:
    """Random ids, as an untrained model gives: mostly broken bytes, special tokens and ids without a token."""
    tokenizer = byte_level_with_added_tokens()
    pieces = stream(tokenizer, token_ids, prompt, skip)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)
    for number in range(len(token_ids)):
        shown = "".join(pieces[: number + 1])
        held = tokenizer.decode(token_ids[: number + 1], skip_special_tokens=skip).removeprefix(shown)
        assert held in ("", "�"), "only the beginning of one character is held"


@given(
    st.sampled_from(FALLBACK),
    st.lists(st.one_of(st.integers(0, 280), st.sampled_from([2 + byte for byte in "aé你😀".encode()])), max_size=60),
    st.booleans(),
)
@settings(max_examples=600)
def test_any_tokens_with_a_byte_fallback_become_the_whole_text(
    make: Callable[[], Tokenizer], token_ids: list[int], skip: bool
) -> None:
    tokenizer = make()
    pieces = stream(tokenizer, token_ids, [], skip)
    assert "".join(pieces) == whole(tokenizer, token_ids, skip) == decode_whole(tokenizer, token_ids, skip)
    for number in range(len(token_ids)):
        shown, before = "".join(pieces[: number + 1]), whole(tokenizer, token_ids[: number + 1], skip)
        assert before.startswith(shown) and before[len(shown) :] in ("", "�", "��", "���")


@given(st.sampled_from(FALLBACK), st.lists(st.integers(0, 280), max_size=6), st.lists(st.integers(0, 280), max_size=20))
@settings(max_examples=300)
def test_a_text_behind_a_prompt_with_a_byte_fallback(
    make: Callable[[], Tokenizer], prompt: list[int], token_ids: list[int]
) -> None:
    tokenizer = make()
    shown = "".join(stream(tokenizer, token_ids, prompt))
    if prompt and token_ids and 2 <= prompt[-1] < 258 and 2 <= token_ids[0] < 258:
        mark = "b"  # between them, because bytes at the end of a prompt are no part of the text behind it
        both = whole(tokenizer, [*prompt, token_id(tokenizer, mark), *token_ids])
        assert whole(tokenizer, prompt) + mark + shown == both
    else:
        assert whole(tokenizer, prompt) + shown == whole(tokenizer, [*prompt, *token_ids])


@given(st.sampled_from(OTHERS), st.lists(st.integers(0, 24), max_size=30), st.integers(0, 6), st.booleans())
@settings(max_examples=300)
def test_any_tokens_of_text_become_the_whole_text(
    make: Callable[[], Tokenizer], token_ids: list[int], num_prompt: int, skip: bool
) -> None:
    tokenizer = make()
    prompt = tokenizer.decode(token_ids[:num_prompt], skip_special_tokens=skip)
    pieces = stream(tokenizer, token_ids[num_prompt:], token_ids[:num_prompt], skip)
    assert prompt + "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("wrong", [[0xFF], [0xE4, 0xBD], [0xF0, 0x9F], [0x80]], ids=str)
@pytest.mark.parametrize("number", [1, 5, 15, 16, 17, 40])
def test_a_character_behind_a_run_of_wrong_bytes_is_shown(number: int, wrong: list[int]) -> None:
    good = [*"你".encode()]
    fallback = [2 + byte for byte in [*wrong * number, *good]]
    shown = "".join(stream(sentencepiece_bpe(), fallback))
    assert shown == "�" * len(wrong) * number + "你" == decode_whole(sentencepiece_bpe(), fallback, True)
    spelled = {spelled_bytes(piece): id_ for piece, id_ in byte_level().get_vocab().items()}
    tokens = [spelled[bytes([each])] for each in [*wrong * number, *good]]
    assert "".join(stream(byte_level(), tokens)) == bytes([*wrong * number, *good]).decode(errors="replace")


def test_work_per_token_does_not_grow_with_a_run_of_wrong_bytes() -> None:
    decoded: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(sentencepiece_bpe(), name)

        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(token_ids))
            return sentencepiece_bpe().decode(token_ids, skip_special_tokens)

    wrong, end = 2 + 0xFF, token_id(sentencepiece_bpe(), SPECIAL)
    for token_ids in ([wrong] * 1000, [2 + 0xE4] * 1000, [end] * 1000, [999] * 1000):
        detokenizer = Detokenizer(Counting(), b"")  # type: ignore[arg-type]
        for each in token_ids:
            detokenizer.step(each)
    assert not decoded


def test_invalid_bytes_do_not_damage_other_text() -> None:
    tokenizer = sentencepiece_bpe()
    valid = [2 + byte for byte in "你".encode()]
    pieces = stream(tokenizer, [*valid, 2 + 0xFF, token_id(tokenizer, "a")])
    assert "".join(pieces).startswith("你") and "".join(pieces).endswith("a")


def test_emoji_are_not_split() -> None:
    text = "a👩‍👩‍👧 é 你好"
    pieces = stream(byte_level(), byte_level().encode_batch_fast([text])[0].ids)
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_an_incomplete_character_at_the_end_is_flushed() -> None:
    token_ids = byte_level().encode_batch_fast(["ok 👩"])[0].ids[:-1]
    assert "".join(stream(byte_level(), token_ids)) == "ok �"


def test_special_tokens_are_skipped() -> None:
    tokenizer = byte_level()
    token_ids = [*tokenizer.encode_batch_fast(["fox"])[0].ids, token_id(tokenizer, SPECIAL)] * 2
    assert "".join(stream(tokenizer, token_ids)) == "foxfox"


def test_the_first_word_keeps_its_space_after_a_prompt() -> None:
    tokenizer = sentencepiece_bpe()
    word = token_id(tokenizer, "▁ab")
    assert "".join(stream(tokenizer, [word, word])) == "ab ab"
    assert "".join(stream(tokenizer, [word, word], prompt=[word])) == " ab ab"


def run_stops(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    checker = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown.append(text)
        if stopped:
            return "".join(shown), True
    return "".join(shown) + checker.flush(), False


def test_stop_strings() -> None:
    assert run_stops(["END"], ["a E", "N", "D b"]) == ("a ", True)
    assert run_stops(["END"], ["a E", "N", "X b"]) == ("a ENX b", False)
    assert run_stops(["END"], ["a EN"]) == ("a EN", False)
    assert run_stops(["b", "ab"], ["xab"]) == ("x", True), "of two stop strings that end together the longer one cuts"
    assert run_stops([], ["a"]) == ("a", False)


@given(st.text("abc"), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_do_not_depend_on_how_text_is_split(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    expected = run_stops(stops, list(text))
    assert run_stops(stops, pieces) == expected
    shown, stopped = expected
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(shown) and not any(stop in shown for stop in stops)


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_stop_strings_are_found_where_a_plain_search_finds_them(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(text)))  # only from here on may a stop string be completed
    checker = StopStrings(stops)
    shown = ""
    for number, character in enumerate(text):
        piece, stopped = checker.push(character, may_end=number >= first)
        shown += piece
        ends = [stop for stop in stops if text[: number + 1].endswith(stop)] if number >= first else []
        assert stopped == bool(ends)
        if ends:
            assert checker.matched == max(ends, key=len) and shown == text[: number + 1 - len(max(ends, key=len))]
            return
    assert shown + checker.flush() == text


def test_text_that_almost_matches_stop_strings_takes_linear_time() -> None:
    """256 stop strings whose last character never comes, the worst case."""
    checker = StopStrings(["a" * 60 + chr(1000 + number) for number in range(256)])
    began_at = time.process_time()
    shown = "".join(checker.push("aaaa")[0] for _ in range(500))
    assert len(shown) == 2000 - 60 and time.process_time() - began_at < 5


def test_stop_strings_within_the_first_tokens_do_not_end_the_text() -> None:
    checker = StopStrings(["END", "AxENDy"])
    assert checker.push("END a AxEND", may_end=False) == ("END a ", False), "what may become the longer one is held"
    assert checker.push("z") == ("AxENDz", False), "the shorter one was complete before"
    assert checker.push(" EN", may_end=False) == (" ", False)
    assert checker.push("D b") == ("", True), "one that is complete later ends it"
