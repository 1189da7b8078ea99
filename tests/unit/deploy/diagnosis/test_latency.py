"""TTFT and ITL are divided into parts that add up; what is narrow, and what would help, follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.deploy.autoscale.planner import mean_wait_s
from tandem.deploy.commands.doctor import diagnosis_text
from tandem.deploy.diagnosis.diagnosis import Diagnosis, diagnose
from tandem.deploy.diagnosis.latency import itl, ttft
from tandem.protocol.messages.operations import PlanReport
from tests.unit.deploy.diagnosis.figures import Cluster, serving, usual_cluster

STAGES = {"tokenize": 0.001, "queue": 0.06, "prefill": 0.039, "transfer": 0.01, "decode": 0.17}


def test_the_parts_of_a_latency_add_up() -> None:
    decode = {"num_running": 5, "num_decoding": 5}  # a step takes 15 ms
    observation = Cluster().worker("prefill-0").worker("decode-0", decode).observe(serving(100, STAGES))
    first, later = ttft(observation), itl(observation)
    assert first is not None and later is not None
    assert first.mean_s == pytest.approx(0.1) and first.share("queue") == pytest.approx(0.6)
    assert later.mean_s == pytest.approx(0.02), "180 ms for nine tokens"
    shown = {part.name: round(1000 * part.seconds, 2) for part in later.parts if part.seconds}
    assert shown == {"step": 10.0, "sequences": 5.0, "beside": 3.89, "transfer": 1.11}


def test_a_step_model_that_exceeds_what_was_measured_is_scaled_down() -> None:
    decode = {"num_running": 40, "num_decoding": 40}  # 50 ms by the fit, 19 measured
    later = itl(Cluster().worker("prefill-0").worker("decode-0", decode).observe(serving(100, STAGES)))
    assert later is not None and later.share("beside") == 0
    assert sum(part.share for part in later.parts) == pytest.approx(1)


def test_answers_of_one_token_have_no_itl() -> None:
    diagnosis = diagnose(usual_cluster().observe(serving(100, {"prefill": 0.1}, num_output_tokens=100)))
    assert diagnosis.itl is None and diagnosis.ttft is not None


@pytest.mark.parametrize(
    ("stages_s", "kind"),
    [
        ({"prefill": 0.1}, "nothing"),
        ({"prefill": 0.1, "queue": 0.03}, "nothing"),
        ({"prefill": 0.1, "queue": 0.04}, "prefill"),
        ({"prefill": 0.1, "reserve": 0.04}, "reservations"),
        ({"prefill": 0.1, "dispatch": 0.2, "queue": 0.1}, "messages"),
        ({"prefill": 0.1, "tokenize": 0.04}, "proxies"),
        ({"prefill": 0.001, "queue": 0.0019}, "nothing"),
        ({"prefill": 0.1, "decode": 0.1, "transfer": 0.1}, "transfer"),
        ({"prefill": 0.1, "decode": 0.09, "decode_wait": 0.05}, "decode steps"),
        ({"prefill": 0.1, "decode": 0.09, "interrupted": 0.1}, "lost workers"),
        ({"prefill": 0.1, "decode": 0.2}, "shared steps"),
    ],
)
def test_the_narrow_part_is_where_requests_wait(stages_s: dict[str, float], kind: str) -> None:
    decode = {"num_running": 1, "num_decoding": 1, "fixed_step_s": 0.01, "step_s_per_sequence": 0.0}
    diagnosis = diagnose(Cluster().worker("prefill-0").worker("decode-0", decode).observe(serving(100, stages_s)))
    assert diagnosis.narrow_part is not None and diagnosis.narrow_part.kind == kind


def test_sequences_that_share_steps_are_narrow_if_they_take_most_of_the_time() -> None:
    cluster = Cluster().worker("prefill-0").worker("decode-0", {"num_running": 20, "num_decoding": 20})
    diagnosis = diagnose(cluster.observe(serving(100, {"prefill": 0.1, "decode": 0.27})))
    assert diagnosis.narrow_part is not None and diagnosis.narrow_part.kind == "decode"
    [more] = diagnosis.advice
    text = "tandem scale prefill=1 decode=2: by the model, a decode step falls from 30 ms to 20 ms, because each worker"
    assert more.text == f"{text} runs 50% of the sequences."


def busy(num_prompts: int, **load: Any) -> Diagnosis:
    """Prompts of 100 tokens, which take 0.1 s each, arrive for five seconds and wait."""
    now = {"num_prompt_tokens": 100 * num_prompts, "num_finished": num_prompts}
    cluster = Cluster().worker("prefill-0", now, {"num_prompt_tokens": 0, "num_finished": 0}).worker("decode-0", load)
    plan = PlanReport(False, 1, 1, 2, 1, "much", "little", 0.1)
    return diagnose(cluster.observe(serving(num_prompts, {"queue": 0.4, "prefill": 0.1}), plan=plan))


def test_more_prefill_workers_are_proposed_with_the_waits_by_the_model() -> None:
    [advice, *others] = busy(40).advice
    before, after = mean_wait_s(1, 0.8, 0.1), mean_wait_s(2, 0.8, 0.1)
    assert (round(1000 * before), round(1000 * after)) == (400, 19)
    text = "tandem scale prefill=2 decode=1: by the model, the mean wait for prefill falls from 400 ms to 19 ms"
    assert advice.text == f"{text} (prompts ask for 0.80 workers, 100 ms each)."
    assert not others, "the planner says the same"


def test_an_overload_is_told_from_a_queue() -> None:
    assert "no longer grows without limit" in busy(60).advice[0].text


def test_prompts_that_wait_for_decode_do_not_wait_for_prefill() -> None:
    full = {"num_running": 4, "num_decoding": 24}
    diagnosis = busy(40, **full)
    assert diagnosis.narrow_part is not None and diagnosis.narrow_part.kind == "decode room"
    assert "runs 4 sequences all the time, which is its limit, and 20 sequences wait" in diagnosis.narrow_part.text
    kinds = {each.kind for each in diagnosis.advice}
    assert "more places" in kinds and "more prefill" not in kinds


def test_decode_without_free_blocks_needs_blocks() -> None:
    diagnosis = busy(40, num_running=8, num_decoding=28, num_free_blocks=10)
    assert diagnosis.narrow_part is not None
    assert "90% of the 100 KV blocks of decode-0 are in use, by 8 sequences" in diagnosis.narrow_part.text
    [blocks] = [each for each in diagnosis.advice if each.kind == "more blocks"]
    assert "take 45%" in blocks.text


def test_a_lower_limit_on_steps_with_prompts_is_proposed_with_its_cost() -> None:
    now = {"num_running": 4, "num_decoding": 4, "itl_slo_s": 0.07, "num_prompt_tokens": 2000, "num_finished": 20}
    cluster = Cluster().worker("worker-0", now, {"num_prompt_tokens": 0, "num_finished": 0})
    diagnosis = diagnose(cluster.observe(serving(100, {"prefill": 0.1, "decode": 0.3})))
    [advice] = [each for each in diagnosis.advice if each.kind == "itl slo"]
    text = "--itl-slo-ms 35: steps that hold prompts beside sequences then take at most 35 ms instead of 70 ms; by the"
    assert advice.text == f"{text} model, a prompt takes 1.3 times as long."


def test_without_traffic_the_answer_is_to_send_some() -> None:
    diagnosis = diagnose(usual_cluster().observe(serving(100), serving(100)))
    assert "Nothing was served in the last 5 s; send requests" in diagnosis.head
    assert diagnosis.ttft is None and diagnosis.narrow_part is None and not diagnosis.advice


def test_long_answers_are_described_by_what_came_before() -> None:
    diagnosis = diagnose(usual_cluster().observe(serving(100, STAGES, 1500), serving(100, STAGES, 1000)))
    assert "latencies are those since the start" in diagnosis.head and diagnosis.ttft is not None


def test_long_prompts_alone_make_ttft_high() -> None:
    now = {"num_prompt_tokens": 1000, "num_finished": 10}
    cluster = Cluster().worker("prefill-0", now, {"num_prompt_tokens": 0, "num_finished": 0}).worker("decode-0")
    [advice] = diagnose(cluster.observe(serving(10, {"prefill": 0.1}))).advice
    text = "a mean prompt has 100 uncached tokens, at 1,000 tokens/s; by the model, half of them take 50 ms less."
    assert advice.text.endswith(text)


def test_the_text_fits_its_width() -> None:
    lines = diagnosis_text(busy(40), 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "  waiting for prefill     400 ms   80.0%" in lines and "What looks wrong:" in lines
