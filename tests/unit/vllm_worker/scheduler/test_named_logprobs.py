"""What a vLLM worker reports for requests that name the tokens of their logprobs."""

from __future__ import annotations

from tandem.protocol.messages.sampling import SampledToken, TokenLogprobs
from tandem.vllm_worker.scheduler.streams import with_named_logprobs

FILLED = (0, float("-inf"))
"""What vLLM fills short lists with."""


def test_the_own_token_and_the_named_ones_are_reported() -> None:
    token = SampledToken(42, TokenLogprobs(-0.5, 3, [(7, -2.0), (9, -4.0), FILLED, FILLED]))
    reported = with_named_logprobs(token, (7, 9))
    assert reported == SampledToken(42, TokenLogprobs(-0.5, 3, [(42, -0.5), (7, -2.0), (9, -4.0)]))


def test_a_sampled_token_that_is_named_is_reported_once() -> None:
    token = SampledToken(7, TokenLogprobs(-0.5, 1, [(7, -0.5), (9, -4.0)]))
    reported = with_named_logprobs(token, (7, 9))
    assert reported == SampledToken(7, TokenLogprobs(-0.5, 1, [(7, -0.5), (9, -4.0)]))


def test_other_tokens_are_left_alone() -> None:
    likeliest = SampledToken(42, TokenLogprobs(-0.5, 3, [(7, -0.1), (9, -0.4)]))
    assert with_named_logprobs(likeliest, ()) is likeliest
    plain = SampledToken(42)
    assert with_named_logprobs(plain, (7,)) is plain
