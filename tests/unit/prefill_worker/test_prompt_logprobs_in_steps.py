"""Prompts whose log-probabilities are wanted have few tokens in a step, and never keep others out of it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.prefill_worker.step import MAX_LOGPROB_TOKENS, MAX_PROMPT_LOGPROB_TOKENS, plan_step
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions

MAX_TOKENS = 2048


def prompt(number: int, num_tokens: int, num_prompt_logprobs: int | None) -> PrefillPrompt:
    ids = pack_token_ids(range(num_tokens))
    request = StartPrefill(
        "proxy", [str(number)], str(number), ids, SamplingParams(), [0], StopConditions(1), 1e9,
        decode_worker_id=None, decode_epoch=None, num_prompt_logprobs=num_prompt_logprobs,
    )  # fmt: skip
    return PrefillPrompt.of(request, None, True, number, float(number))


def shares(prompts: list[PrefillPrompt], max_tokens: int = MAX_TOKENS) -> dict[int, int]:
    step = plan_step(prompts, max_tokens, lambda prompt, is_first: True)
    return {each.number: num_tokens for each, num_tokens in step.chunks}


def test_long_prompts_leave_room_for_a_short_one() -> None:
    wanted = [prompt(number, 9000, 20) for number in range(4)]
    found = shares([*wanted, prompt(4, 100, None)])
    assert found == {0: MAX_PROMPT_LOGPROB_TOKENS, 1: MAX_PROMPT_LOGPROB_TOKENS, 4: 100}


def test_a_short_prompt_with_logprobs_passes_long_ones() -> None:
    wanted = [prompt(number, 9000, 20) for number in range(4)]
    assert shares([*wanted, prompt(4, 100, 5)])[4] == 100


def test_zero_alternatives_are_wanted_too() -> None:
    assert shares([prompt(0, 9000, 0)]) == {0: MAX_PROMPT_LOGPROB_TOKENS}


def test_other_prompts_take_whole_steps() -> None:
    assert shares([prompt(0, 9000, None)]) == {0: MAX_TOKENS}


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([None, 0, 20])), min_size=1, max_size=12),
    st.sampled_from([64, 512, 2048]),
)
def test_every_prompt_is_computed_within_the_limits(given: list[tuple[int, int | None]], max_tokens: int) -> None:
    prompts = [prompt(number, *each) for number, each in enumerate(given)]
    left = {each.number: each for each in prompts}
    num_computed: Counter[int] = Counter()
    while left:
        found = shares(list(left.values()), max_tokens)
        assert found and sum(found.values()) <= max_tokens
        rows = [num for number, num in found.items() if given[number][1] is not None]
        assert sum(rows) <= MAX_LOGPROB_TOKENS and max(rows, default=0) <= MAX_PROMPT_LOGPROB_TOKENS
        for number, num_tokens in found.items():
            num_computed[number] += num_tokens
            prompts[number].num_computed_tokens += num_tokens
            if prompts[number].is_computed:
                del left[number]
    assert all(num_computed[number] == num_tokens for number, (num_tokens, _) in enumerate(given))
