"""The built-in model answers part of its exam over each connector as one process does alone, bit for bit, in bfloat16.

A KV cache that arrives late, out of order or incomplete would change a sum or make the model forget a list.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.worker.lone_engine import LoneEngine
from tests.integration.exam import EXACT, GREEDY, WARM, ask_all, is_different, share_right
from tests.support.cluster import MODEL, Cluster
from tests.support.exact_engine import exact_engine
from tools.demo_model.exam import exam

QUESTIONS = exam()[::8]
OPTIONS = {
    "ipc": ("--kv-connector", "ipc", "--max-num-batched-tokens", "100"),
    "tcp": ("--kv-connector", "tcp", "--prefill", "2", "--decode", "2"),
    "local-prefill": ("--decode-prefill-threshold", "2048"),
}


def make_cluster(*options: str) -> Cluster:
    return Cluster("--model", str(DEMO_MODEL), "--served-model-name", MODEL, *EXACT, *options)


@pytest.fixture(scope="module", params=["ipc", pytest.param("tcp", marks=pytest.mark.exhaustive), "local-prefill"])
def demo(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with make_cluster(*OPTIONS[request.param]) as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[LoneEngine]:
    engine = exact_engine(DEMO_MODEL)
    yield engine
    engine.close()


def test_the_model_is_small() -> None:
    sizes = {file.name: file.stat().st_size for file in DEMO_MODEL.iterdir()}
    assert sizes["model.safetensors"] <= 8_000_000
    assert sum(sizes.values()) <= 9_000_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("temperature", [GREEDY, pytest.param(WARM, marks=pytest.mark.extended)])
def test_answers_are_correct_and_equal_when_computed_alone(
    demo: Cluster, alone: LoneEngine, temperature: float
) -> None:
    answers = ask_all(demo.url, QUESTIONS, temperature)
    assert share_right(QUESTIONS, answers) >= 0.85
    assert not [answer for answer in answers if is_different(alone, answer)]


def test_a_story_is_long_and_ends_by_itself(demo: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "seed": 1, "temperature": 0.7}
    choice = httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["message"]["content"].split()) > 100
    assert choice["message"]["content"].endswith("The end.")
