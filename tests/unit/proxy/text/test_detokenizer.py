"""Streamed text concatenates to the whole text for any tokens, and stop strings cut at the same place."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tandem.protocol.messages.token_ids import pack_token_ids
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.proxy.text.stop_strings import StopStrings
from tests.support.tokenizers import SPECIAL, byte_level, sentencepiece_bpe, token_id


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, pack_token_ids(prompt or []))
    return [*(detokenizer.step(token_id) for token_id in token_ids), detokenizer.flush()]


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


@given(st.lists(st.integers(0, 350), max_size=60), st.lists(st.integers(0, 350), max_size=8))
@settings(max_examples=300)
def test_any_tokens_become_text_without_long_delays(token_ids: list[int], prompt: list[int]) -> None:
    """Random ids, as an untrained model gives: mostly broken bytes."""
    tokenizer = byte_level()
    pieces = stream(tokenizer, token_ids, prompt)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces).replace("�", "") == whole.replace("�", "") or len(token_ids) >= 16 or prompt
    silent = [number for number, piece in enumerate(pieces) if piece]
    assert all(b - a <= 16 for a, b in pairwise(silent)) or 0 in token_ids


@given(st.lists(st.integers(0, 264), max_size=60), st.lists(st.integers(0, 264), max_size=8))
@settings(max_examples=300)
def test_broken_byte_fallback_never_raises(token_ids: list[int], prompt: list[int]) -> None:
    stream(sentencepiece_bpe(), token_ids, prompt)


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
