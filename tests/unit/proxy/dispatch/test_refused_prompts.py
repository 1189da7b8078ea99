"""Prompts that crashed their workers are refused for a while."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest

from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams
from tandem.proxy.dispatch import sequence
from tandem.proxy.dispatch.sequence import REFUSAL_S, RefusedPrompts, RequestCrashesWorkers, prompt_digest
from tandem.proxy.text.prompt import Prompt

SAMPLING = SamplingParams()


def prompt(number: int) -> Prompt:
    return Prompt(pack_token_ids([1, number]), 2, cache_salt="a")


def refuse(refused: RefusedPrompts, now: float, *numbers: int) -> None:
    for number in numbers:
        refused.add(now, prompt_digest(prompt(number), SAMPLING))


def is_refused(refused: RefusedPrompts, now: float, number: int) -> bool:
    try:
        refused.check(now, prompt(number), SAMPLING)
    except RequestCrashesWorkers:
        return True
    return False


def test_a_prompt_is_refused_for_ten_minutes_since_its_last_crash() -> None:
    refused = RefusedPrompts()
    refuse(refused, 0.0, 1, 2)
    refuse(refused, 100.0, 1)
    assert [is_refused(refused, REFUSAL_S - 1, each) for each in (1, 2, 3)] == [True, True, False]
    assert [is_refused(refused, REFUSAL_S, each) for each in (1, 2)] == [True, False]
    assert not is_refused(refused, REFUSAL_S + 100, 1)


def test_only_the_prompts_that_were_added_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MAX_REFUSED_PROMPTS", 3)
    refused = RefusedPrompts()
    refuse(refused, 0.0, 1, 2, 3)
    assert all(is_refused(refused, 0.0, each) for each in (1, 2, 3))
    refuse(refused, 0.0, 1, 4)
    assert [is_refused(refused, 0.0, each) for each in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("other", "sampling", "is_same"),
    [
        (replace(prompt(1), cache_salt="b"), SAMPLING, False),
        (replace(prompt(1), num_prompt_logprobs=2), SAMPLING, False),
        (prompt(1), msgspec.structs.replace(SAMPLING, temperature=0.25), False),
        (prompt(1), msgspec.structs.replace(SAMPLING, seed=9), True),
        (replace(prompt(1), priority=3), SAMPLING, True),
    ],
)
def test_what_workers_compute_counts_and_the_client(other: Prompt, sampling: SamplingParams, is_same: bool) -> None:
    refused = RefusedPrompts()
    refuse(refused, 0.0, 1)
    with pytest.raises(RequestCrashesWorkers) if is_same else nullcontext():
        refused.check(0.0, other, sampling)
