"""Clusters whose workers run vLLM answer as vLLM alone does, token for token.

All sampling fields, grammars, several sequences of a prompt and LoRA, with one worker and with KV that moves.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.protocol.network_keys import make_keys
from tests.support.cluster import MODEL, Cluster
from tests.support.greedy import load_reference
from tests.support.lora import make_adapter
from tests.support.noise_model import write_dummy_model
from tests.support.vllm_clusters import (
    START_TIMEOUT_S,
    cluster_arguments,
    nixl_environment_of_vllm,
    run_with_vllm,
)

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 24
NUM_PROMPTS = 50
ADAPTER = "adapter"
LARGER: dict[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "intermediate_size": 2048, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 100}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FIELDS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8, "seed": 1},
    "top_k": {"top_k": 20, "seed": 2},
    "min_p": {"min_p": 0.05, "temperature": 1.5, "seed": 3},
    "low temperature": {"temperature": 0.3, "seed": 4},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "seed": 5},
    "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, 2000, 16)), "seed": 6},
    "logit_bias": {"logit_bias": {"50": 5.0, "51": 5.0}, "seed": 7},
    "allowed_token_ids": {"allowed_token_ids": list(range(100, 120)), "seed": 8},
    "bad_words": {"bad_words": ["a", "in"], "temperature": 0},
    "n": {"n": 3, "seed": 9},
    "logprobs": {"logprobs": 3, "temperature": 0},
    "seeded logprobs": {"logprobs": 0, "seed": 10},
    "regex": {"structured_outputs": {"regex": "[a-z]{5,8} [0-9]{3}"}, "seed": 11, "ignore_eos": False},
    "choice": {"structured_outputs": {"choice": ["monday", "tuesday", "sunday"]}, "seed": 12, "ignore_eos": False},
    "grammar": {"structured_outputs": {"grammar": 'start: "a" /[b-d]+/ "e"'}, "seed": 13, "ignore_eos": False},
}


def requests() -> list[dict[str, Any]]:
    draw = random.Random(17)
    plain: dict[str, Any] = {"temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    found = []
    for number in range(NUM_PROMPTS):
        length = 3 + round((number / (NUM_PROMPTS - 1)) ** 2 * 1897)
        prompt = [draw.randrange(4, 2000) for _ in range(length)]
        sampling = {"temperature": 0.0} if number % 2 else {"seed": number}
        found.append({"prompt": prompt, "sampling": plain | sampling, "uses_adapter": number % 10 >= 8})
    for fields in FIELDS.values():
        prompt = [draw.randrange(4, 2000) for _ in range(90)]
        found.append({"prompt": prompt, "sampling": plain | fields, "uses_adapter": False})
    return found


@pytest.fixture(scope="module", params=["noise", pytest.param("77 M parameters", marks=pytest.mark.exhaustive)])
def model(request: pytest.FixtureRequest, noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "noise":
        return noise_model
    folder = write_dummy_model(tmp_path_factory.mktemp("larger"), **LARGER)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("lora"), load_reference(model), ("q_proj", "v_proj"), seed=1)


@pytest.fixture(scope="module")
def expected(model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("requests") / "requests.json"
    file.write_text(json.dumps(requests()))
    program = Path(__file__).with_name("answers_of_vllm_alone.py")
    return run_with_vllm(program, str(model), "1", str(adapter), str(file))


def ask(cluster: Cluster, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the choices as `answers_of_vllm_alone.py` has them."""
    model = ADAPTER if request["uses_adapter"] else MODEL
    body = {"model": model, "prompt": request["prompt"], "return_token_ids": True, **request["sampling"]}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return [
        {
            "token_ids": choice["token_ids"],
            "logprobs": choice["logprobs"] and choice["logprobs"]["token_logprobs"],
        }
        for choice in answer.json()["choices"]
    ]


def is_equal(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    return len(found) == len(wanted) and all(
        one["token_ids"] == other["token_ids"]
        and (one["logprobs"] or []) == pytest.approx(other["logprobs"] or [], abs=1e-4)
        for one, other in zip(found, wanted, strict=True)
    )


APART = ("--prefill", "1", "--decode", "1")


@pytest.mark.parametrize("connector", ["", "tcp", "nixl"])
def test_a_cluster_answers_as_vllm_alone(
    expected: Any, model: Path, adapter: Path, connector: str, tmp_path: Path
) -> None:
    """One worker, or two between which KV travels encrypted or through NIXL; the tests of faults have mapped memory."""
    layout: tuple[str, ...] = (*APART, "--kv-connector", connector) if connector else ("--workers", "1")
    if connector == "tcp":
        make_keys(tmp_path / "keys")
        layout += ("--network-keys", str(tmp_path / "keys"))
    environment = nixl_environment_of_vllm() if connector == "nixl" else {}
    layout += ("--model", str(model), "--served-model-name", MODEL)
    arguments = (*cluster_arguments(), *layout, "--kv-cache-gib", "0.4", "--lora", f"{ADAPTER}={adapter}")
    with Cluster(*arguments, start_timeout_s=START_TIMEOUT_S, env=environment) as cluster:
        asked = requests()
        found: dict[int, Any] = {}
        with ThreadPoolExecutor(4) as pool:
            for uses_adapter in (False, True):  # apart, see `answers_of_vllm_alone.py`
                numbers = [number for number, each in enumerate(asked) if each["uses_adapter"] == uses_adapter]
                answers = pool.map(lambda number: ask(cluster, asked[number]), numbers)
                found |= dict(zip(numbers, answers, strict=True))
        names = [*map(str, range(NUM_PROMPTS)), *FIELDS]
        in_order = [found[number] for number in range(len(asked))]
        pairs = zip(names, in_order, expected, strict=True)
        wrong = {name: (one, other) for name, one, other in pairs if not is_equal(one, other)}
        assert not wrong
        body: dict[str, Any] = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 3, "prompt_logprobs": 1}
        one, three = (cluster.complete(n=n, seed=1, temperature=1, **body)["choices"][0] for n in (1, 3))
        assert len(one["prompt_logprobs"]) == 5
        assert three["prompt_logprobs"] == one["prompt_logprobs"], "beside other sequences, with adapters on a CPU"
        # Not compared with vLLM alone, which allows other white space.
        body = {"prompt": [5, 6, 7], "max_tokens": 200, "temperature": 1, "seed": 14, "ignore_eos": False}
        answer = cluster.complete(structured_outputs={"json": SCHEMA}, **body)
        compact = "".join(answer["choices"][0]["text"].split())  # its end may be missing after much white space
        wanted = [f'{{"a":{number},"b":"{letter}"}}' for number in range(101) for letter in "xy"]
        assert len(compact) > 5 and any(each.startswith(compact) for each in wanted), compact
        cluster.wait_for(cluster.all_blocks_free)
        has_moved = any(each.load.num_transferred_bytes for each in cluster.status().workers)
        assert has_moved == bool(connector)
        connectors = {pair.connector for each in cluster.status().workers for pair in each.pairs}
        assert connectors == ({connector} if connector else set())
