"""Lists of tokens that would end or hold up vLLM's engine are refused, by themselves and times the sequences."""

from __future__ import annotations

import pytest

from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.sampling import SamplingParams, Thinking
from tandem.runtime.errors import InvalidRequest
from tandem.vllm_worker.engine.sampling_limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_ENTRIES,
    MAX_STOP_TOKENS,
    check_lists,
    check_supported,
)
from tests.unit.vllm_worker.scheduler.prompts import start


def message(sampling: SamplingParams | None = None, n: int = 1, num_stop: int = 0) -> StartPrefill:
    attempts = [str(number) for number in range(n)]
    return start(attempts, sampling=sampling or SamplingParams(), stop_token_ids=frozenset(range(num_stop)))


def words(number: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(first, first + size)) for first in range(number))


LISTS = {
    "allowed_token_ids": lambda num: message(SamplingParams(allowed_token_ids=tuple(range(num)))),
    "logit_bias": lambda num: message(SamplingParams(logit_bias=tuple((each, 1.0) for each in range(num)))),
    "stop_token_ids": lambda num: message(num_stop=num),
    "bad_words": lambda num: message(SamplingParams(bad_words=words(num, 2))),
}


@pytest.mark.parametrize(
    ("param", "limit"),
    [
        ("allowed_token_ids", MAX_ALLOWED_TOKENS),
        ("logit_bias", MAX_BIASED_TOKENS),
        ("stop_token_ids", MAX_STOP_TOKENS),
        ("bad_words", MAX_BAD_WORDS),
    ],
)
def test_a_list_has_a_limit_that_its_error_names(param: str, limit: int) -> None:
    check_lists(LISTS[param](limit))
    with pytest.raises(InvalidRequest, match=f"has {limit + 1} .*take at most {limit}\\.") as refused:
        check_lists(LISTS[param](limit + 1))
    assert refused.value.param == param


def test_all_tokens_of_bad_words_count() -> None:
    check_lists(message(SamplingParams(bad_words=words(16, MAX_BAD_WORD_TOKENS // 16))))
    with pytest.raises(InvalidRequest, match=f"tokens in bad_words; .*at most {MAX_BAD_WORD_TOKENS}"):
        check_lists(message(SamplingParams(bad_words=words(17, MAX_BAD_WORD_TOKENS // 16))))


def test_bad_words_of_one_token_count_as_biases() -> None:
    bias = tuple((each, 1.0) for each in range(MAX_BIASED_TOKENS - 10))
    check_lists(message(SamplingParams(logit_bias=bias, bad_words=words(10, 1))))
    with pytest.raises(InvalidRequest, match="in logit_bias, with bad_words of one token"):
        check_lists(message(SamplingParams(logit_bias=bias, bad_words=words(11, 1))))


@pytest.mark.parametrize("n", [2, 60, 128])
def test_entries_times_sequences_have_a_limit(n: int) -> None:
    most = min(MAX_ENTRIES // n, MAX_ALLOWED_TOKENS + MAX_BIASED_TOKENS)
    num_allowed = min(most, MAX_ALLOWED_TOKENS)

    def mixture(num_entries: int) -> StartPrefill:
        bias = tuple((each, 1.0) for each in range(num_entries - num_allowed))
        return message(SamplingParams(allowed_token_ids=tuple(range(num_allowed)), logit_bias=bias), n)

    check_lists(mixture(most))
    if most == MAX_ENTRIES // n:
        with pytest.raises(
            InvalidRequest, match=f"for each of {n} sequences; .*at most {MAX_ENTRIES} entries"
        ) as error:
            check_lists(mixture(most + 1))
        assert error.value.param == "n"


@pytest.mark.parametrize(
    ("param", "taken", "refused"),
    [
        ("allowed_token_ids", ((), (8, 7, 3)), ((7, 3), (3,))),
        ("bad_words", (((7, 3), (4,)),), (((8,),), ((3, 7),))),
    ],
)
def test_no_list_may_exclude_the_end_of_limited_thinking(
    param: str, taken: tuple[object, ...], refused: tuple[object, ...]
) -> None:
    limited, unlimited = (Thinking(True, (6,), (7,), (7, 8), limit) for limit in (5, None))

    def check(thinking: Thinking, given: object) -> None:
        check_supported(message(SamplingParams(thinking=thinking, **{param: given})))  # type: ignore[arg-type]

    for given in taken:
        check(limited, given)
    for given in refused:
        check(unlimited, given)
        with pytest.raises(InvalidRequest, match=rf"^{param} excludes tokens that end .* \(7, 8\)") as error:
            check(limited, given)
        assert error.value.param == param


def test_requests_without_lists_have_no_limit_on_sequences() -> None:
    check_lists(message(n=128))
