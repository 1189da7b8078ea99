"""No sampling parameters that proxies and workers accept end vLLM's engine: each request gets its tokens or an error.

The parameters are drawn: with token ids beyond the vocabulary, more log-probabilities than it has tokens, and the ends
of all ranges.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.protocol.messages.checks import check_request
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions, Thinking
from tandem.runtime.errors import InvalidRequest
from tandem.vllm_worker.engine.sampling_limits import check_supported
from tests.support.noise_model import write_dummy_model
from tests.support.vllm_clusters import run_with_vllm
from tests.support.vllm_python import vllm_python
from tools.demo_model.tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.timeout(600)

NUM_REQUESTS = 240
MAX_MODEL_LEN = 512
"""Of `engine_driver`."""
SMALL_VOCABULARY = 200
"""Fewer than the log-probabilities that a request may ask for."""
GRAMMARS = ('start: "a" /[b-d]+/ "e"', "start: /[a-z]{5,8} [0-9]{3}/", 'start: %json {"type": "integer"}', "start: ((")
T = TypeVar("T")


def several(elements: st.SearchStrategy[T], max_size: int = 6) -> st.SearchStrategy[tuple[T, ...]]:
    none: tuple[T, ...] = ()
    return st.just(none) | st.lists(elements, max_size=max_size).map(tuple)


@st.composite
def requests(draw: st.DrawFn, vocab_size: int) -> StartPrefill:
    known = st.integers(0, vocab_size - 1) | st.sampled_from((0, vocab_size - 1))
    token = known | st.sampled_from((vocab_size, vocab_size + 1, 10 * vocab_size, 2**31 - 1))
    num_tokens = draw(st.integers(1, 80) | st.integers(MAX_MODEL_LEN - 8, MAX_MODEL_LEN - 1))
    max_tokens = draw(st.integers(1, min(8, MAX_MODEL_LEN - num_tokens)))
    num_generated = draw(st.just(0) | st.integers(0, min(num_tokens, max_tokens) - 1))
    named = draw(several(token, 128).map(lambda ids: tuple(dict.fromkeys(ids))))
    num_top = st.none() | st.integers(0, 3) | st.sampled_from((20, 21, 129, 256, vocab_size - 1, vocab_size))
    num_reported = draw(num_top)
    grammar = draw(st.none() | st.sampled_from(GRAMMARS)) if vocab_size == VOCAB_SIZE else None
    marks = st.lists(token | st.integers(3, 40), min_size=1, max_size=3).map(tuple)
    thinking = st.builds(Thinking, st.booleans(), marks, marks, marks, st.none() | st.integers(0, 6))
    # Proxies refuse values outside these ranges, and allowed tokens or bad words beside a grammar.
    sampling = SamplingParams(
        temperature=draw(st.sampled_from((0.0, 0.0, 5e-324, 1e-6, 1.0, 2.0)) | st.floats(0, 2)),
        top_p=draw(st.sampled_from((1.0, 1.0, 5e-324, 1e-9)) | st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.sampled_from((0, 0, 1, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1))),
        min_p=draw(st.sampled_from((0.0, 0.0, 1.0)) | st.floats(0, 1)),
        repetition_penalty=draw(st.sampled_from((1.0, 1.0, 1e6, 5e-324)) | st.floats(0, 1e6, exclude_min=True)),
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        logit_bias=draw(several(st.tuples(token, st.floats(-100, 100)))),
        allowed_token_ids=draw(several(token)) if grammar is None else (),
        bad_words=draw(several(st.lists(token, min_size=1, max_size=3).map(tuple))) if grammar is None else (),
        seed=draw(st.sampled_from((-(2**63), -1, 0, 2**63 - 1))),
        logprobs=num_reported if not named else 1 + len(named),
        logprob_token_ids=named,
        grammar=grammar,
        thinking=draw(st.none() | thinking),
    )
    prompt = random.Random(draw(st.integers(0, 2**31))).choices(range(vocab_size), k=num_tokens)
    return StartPrefill(
        proxy_id="p",
        attempt_ids=["a"],
        transfer_id="t",
        token_ids=pack_token_ids(prompt),
        sampling=sampling,
        seeds=[sampling.seed],
        stop=StopConditions(max_tokens, frozenset(draw(several(token))), draw(st.integers(0, max_tokens))),
        deadline_s=600.0,
        num_generated=num_generated,
        decode_worker_id=None,
        decode_epoch=None,
        num_prompt_logprobs=draw(num_top),
    )


@pytest.fixture(scope="module", params=[VOCAB_SIZE, SMALL_VOCABULARY])
def vocab_size(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    vllm_python()  # without it, skips before requests are drawn
    return request.param


@pytest.fixture(scope="module")
def model(vocab_size: int, noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if vocab_size == VOCAB_SIZE:
        return noise_model
    folder = write_dummy_model(tmp_path_factory.mktemp("small"), hidden_size=128, num_hidden_layers=2, head_dim=64)
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(folder, vocab_size=vocab_size, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_no_accepted_sampling_parameters_end_the_engine(model: Path, vocab_size: int, tmp_path: Path) -> None:
    drawn: list[StartPrefill] = []

    @settings(max_examples=NUM_REQUESTS, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(requests(vocab_size))
    def collect(message: StartPrefill) -> None:
        check_request(message, vocab_size, MAX_MODEL_LEN)
        with suppress(InvalidRequest):  # for lists that exclude the forced end of the thinking
            check_supported(message)
            drawn.append(msgspec.structs.replace(message, attempt_ids=[str(len(drawn))]))

    collect()
    file = tmp_path / "requests.json"
    file.write_bytes(msgspec.json.encode(drawn))
    found = run_with_vllm(Path(__file__).with_name("drawn_requests.py"), str(model), str(file))
    for message, (ending, num_tokens) in zip(drawn, found, strict=True):
        sampling = message.sampling
        may_be_refused = sampling.grammar is not None or sampling.allowed_token_ids or sampling.forced_token_ids
        assert ending in ("stop", "length") or (may_be_refused and ending.startswith("invalid_request: ")), message
        assert num_tokens <= message.stop.max_tokens, message
    assert sum(ending == "length" for ending, _ in found) > NUM_REQUESTS / 4
