"""The engine that computes one sequence at a time: the tokens of transformers, with every setting of a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.engine.engine_config import EngineConfig
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.runtime.errors import InvalidMessage, InvalidRequest, TandemError
from tandem.runtime.files.lora_files import read_adapter
from tandem.worker.lone_engine import LoneEngine
from tests.support.greedy import continuation, load_reference, random_prompts
from tests.support.lora import make_adapter
from tests.support.noise_model import ensure_noise_model

GREEDY = SamplingParams(temperature=0.0, logprobs=0)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> Iterator[LoneEngine]:
    model = str(ensure_noise_model())
    made = LoneEngine(EngineConfig(model, dtype="float32", kv_cache_bytes=64 << 20, max_num_batched_tokens=50))
    yield made
    made.close()


def tokens(engine: LoneEngine, prompt: list[int], sampling: SamplingParams = GREEDY, **fields: Any) -> list[int]:
    stop = fields.pop("stop", StopConditions(NUM_TOKENS))
    return [each.token_id for each in engine.tokens(prompt, sampling, stop, NUM_TOKENS, **fields)]


@pytest.mark.parametrize("length", [1, 49, 50, 51, 130])
def test_greedy_tokens_are_those_of_transformers(engine: LoneEngine, length: int) -> None:
    [prompt] = random_prompts([length], seed=length)
    assert tokens(engine, prompt) == continuation(load_reference(ensure_noise_model()), prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 6}, {"temperature": 3.0}, {"top_k": 2}, {"repetition_penalty": 30.0}, {"presence_penalty": 50.0},
        {"frequency_penalty": 50.0}, {"logit_bias": ((7, 100.0),)}, {"bad_words": ((5,), (6,))},
    ],
)  # fmt: skip
def test_settings_and_seeds_decide_the_tokens(engine: LoneEngine, changed: dict[str, Any]) -> None:
    prompt = list(range(5, 40))
    plain: dict[str, Any] = {"seed": 5, "logprobs": 0, "allowed_token_ids": tuple(range(5, 13))}  # so that they repeat
    other = SamplingParams(**{**plain, **changed})
    assert (
        tokens(engine, prompt, other)
        == tokens(engine, prompt, other)
        != tokens(engine, prompt, SamplingParams(**plain))
    )


def test_a_grammar_decides_the_tokens(engine: LoneEngine) -> None:
    tokenizer = Tokenizer.from_file(str(ensure_noise_model() / "tokenizer.json"))
    sampling = SamplingParams(seed=5, logprobs=0, grammar="start: /[ab]{100}/")
    assert set(tokenizer.decode(tokens(engine, [5, 6, 7], sampling))) <= {"a", "b"}


def test_every_token_has_its_log_probability(engine: LoneEngine) -> None:
    found = list(engine.tokens([5, 6, 7], GREEDY, StopConditions(4), 4))
    assert all(each.logprobs is not None and each.logprobs.logprob < 0 for each in found) and len(found) == 4


def test_stop_tokens_are_banned_before_min_tokens_and_end_nothing(engine: LoneEngine) -> None:
    prompt = [5, 6, 7, 8]
    free = tokens(engine, prompt)
    stop = frozenset({free[3]})
    assert tokens(engine, prompt, stop=StopConditions(99, stop)) == free
    assert not set(tokens(engine, prompt, stop=StopConditions(99, stop, NUM_TOKENS))) & stop


def test_an_adapter_is_loaded_from_its_folder(engine: LoneEngine, tmp_path: Path) -> None:
    make_adapter(tmp_path, load_reference(ensure_noise_model()), ["q_proj", "v_proj"], seed=1)
    digest = read_adapter(tmp_path).digest
    prompt = list(range(5, 40))
    assert tokens(engine, prompt, adapter=AdapterRef(digest, str(tmp_path))) != tokens(engine, prompt)
    with pytest.raises(TandemError, match="cannot load this LoRA adapter"):
        tokens(engine, prompt, adapter=AdapterRef("0" * 64, str(tmp_path)))


@pytest.mark.parametrize(
    "prompt, sampling",
    [
        ([2**31 - 1], GREEDY), ([5] * 5000, GREEDY), ([5], SamplingParams(temperature=-1.0)),
        ([5], SamplingParams(top_p=float("nan"))), ([5], SamplingParams(grammar="start: (")),
        ([5], SamplingParams(grammar="start: " + "(" * 2000 + '"a"' + ")" * 2000)),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_served_are_refused(
    engine: LoneEngine, prompt: list[int], sampling: SamplingParams
) -> None:
    with pytest.raises((InvalidMessage, InvalidRequest)):
        tokens(engine, prompt, sampling)
    assert tokens(engine, [5, 6, 7])
