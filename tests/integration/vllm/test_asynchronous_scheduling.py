"""With asynchronous scheduling, which vLLM uses on GPUs, sequences that resume, move, skip steps or are aborted are as
without it. `asynchronous_checks.py` says what of a GPU this is, and what not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_clusters import run_with_vllm

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(noise_model: Path) -> dict[str, Any]:
    answer: dict[str, Any] = run_with_vllm(Path(__file__).with_name("asynchronous_checks.py"), str(noise_model))
    return answer


def test_a_batch_is_scheduled_while_another_runs(found: dict[str, Any]) -> None:
    assert (found["scheduler"], found["batches_at_once"]) == ("AsyncScheduler", 2)
    assert found["frees_are_deferred"], "a peer could write to blocks that a running batch still writes to"


def test_resumed_requests_go_on_exactly(found: dict[str, Any]) -> None:
    for case in found["resumed"]:
        for split, tokens in case["resumed"].items():
            assert tokens == case["whole"], f"{case['case']}, {case['num_prompt_tokens']} + {split} tokens"


def test_requests_go_on_with_blocks_that_another_computed(found: dict[str, Any]) -> None:
    for name, case in found["moved"].items():
        assert case["moved"] == case["whole"], name
        assert case["all_free"], name


def test_aborts_in_each_phase_leave_all_blocks_free(found: dict[str, Any]) -> None:
    for phase, facts in found["aborts"].items():
        assert all(facts.values()), f"{phase}: {facts}"


def test_sequences_that_skip_steps_get_the_same_tokens(found: dict[str, Any]) -> None:
    *cases, _ = found["skipped"]
    for case in cases:
        assert case["skipped"] == case["whole"]
