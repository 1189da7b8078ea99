"""The text of one sequence: where stop strings and stop tokens end it, and what is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.protocol.messages.sampling import FinishReason, SampledToken
from tandem.proxy.dispatch.generation import SequenceText, StopStrings, TextDelta
from tandem.proxy.text.detokenizer import Detokenizer
from tandem.telemetry.proxy_metrics import ProxyMetrics
from tandem.telemetry.request_log import SequenceTimer
from tests.support.proxy_cluster import EOS, FakeText

TEXT = FakeText()


def new_text(stop: list[str], **fields: Any) -> SequenceText:
    is_shown = fields.pop("is_shown", False)
    detokenizer = Detokenizer(TEXT.tokenizer, b"")
    timer = SequenceTimer(ProxyMetrics(), 0.0, [])
    return SequenceText(3, detokenizer, StopStrings(stop, is_shown), timer, lambda: 1.0, **fields)


def push(text: SequenceText, token_ids: list[int], finish_reason: FinishReason | None = None) -> TextDelta:
    tokens = [SampledToken(token_id) for token_id in token_ids]
    return asyncio.run(text.push(tokens, finish_reason, False, None))


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_stop_string_ends_the_text_behind_min_tokens(min_tokens: int, size: int) -> None:
    """Each character is a token, and "x" stands at tokens 2, 4 and 6. Tokens arrive `size` at a time."""
    text, ids, deltas = new_text(["x"], min_tokens=min_tokens), TEXT.ids("axbxcx"), list[TextDelta]()
    for start in range(0, 6, size):
        deltas.append(push(text, ids[start : start + size], "length" if start + size >= 6 else None))
        if deltas[-1].finish_reason is not None:
            break
    end = next((number for number in (2, 4, 6) if number > min_tokens), None)
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == (("stop", "x") if end else ("length", None))
    assert "".join(delta.text for delta in deltas) == ("axbxcx"[: end - 1] if end else "axbxcx")
    assert sum(len(delta.tokens) for delta in deltas) == (end or 6), "what completes the stop string counts"
    assert sum(delta.num_shown for delta in deltas) == (end or 6)


def test_the_stop_string_is_shown_if_it_was_asked_for() -> None:
    delta = push(new_text(["END"], is_shown=True), TEXT.ids("so END more"))
    assert (delta.text, len(delta.tokens), delta.index) == ("so END", 6, 3)


@pytest.mark.parametrize(("named", "reason"), [(frozenset({EOS}), EOS), (frozenset[int](), None)])
def test_a_stop_token_counts_but_is_not_shown(named: frozenset[int], reason: int | None) -> None:
    delta = push(new_text(["nothing"], stop_token_ids=named), [*TEXT.ids("ab"), EOS], "stop")
    assert (delta.text, delta.num_shown, len(delta.tokens)) == ("ab", 2, 3)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", reason)


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    text = new_text(["END"])
    assert [push(text, TEXT.ids(part)).text for part in ("aE", "N", "x", "EN")] == ["a", "", "ENx", ""]
    last = push(text, TEXT.ids("E"), "length")
    assert (last.text, last.finish_reason, last.stop_reason) == ("ENE", "length", None)
    assert text.timer.e2e_s == 1.0


@pytest.mark.parametrize(("min_tokens", "ends"), [(1, True), (2, False)])
def test_characters_that_are_never_complete_may_end_the_text(min_tokens: int, ends: bool) -> None:
    """The last bytes of the text are shown as U+FFFD, which may be a stop string."""
    text = new_text(["\ufffd"], min_tokens=min_tokens)
    delta = push(text, [*TEXT.ids("a"), TEXT.ids("é")[0]], "length")
    assert (delta.text, delta.finish_reason) == (("a", "stop") if ends else ("a\ufffd", "length"))


def test_the_loop_runs_between_many_tokens() -> None:
    async def run() -> int:
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        counting = asyncio.create_task(count())
        await new_text(["END"]).push([SampledToken(5)] * 640, None, False, None)
        counting.cancel()
        return num_turns

    assert 9 <= asyncio.run(run()) <= 11
