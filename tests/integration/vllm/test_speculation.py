"""Speculative decoding changes how many tokens a step has, and no token.

`answer_checks.py` answers the same requests with and without it, in vLLM's interpreter.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.protocol.messages.transfer import KVLayout
from tests.support.cluster import Cluster, run_tandem
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments, complete, run_with_vllm

pytestmark = pytest.mark.timeout(900)

NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1})
PROGRAM = Path(__file__).with_name("answer_checks.py")


@pytest.fixture(scope="module")
def plain(noise_model: Path) -> dict[str, Any]:
    answer: dict[str, Any] = run_with_vllm(PROGRAM, str(noise_model), "{}")
    return answer


def write_eagle_head(model: Path, folder: Path) -> Path:
    """Writes an EAGLE head that was not trained: the model's last layer, after the mean of what the head is given."""
    config = json.loads((model / "config.json").read_text())
    last, size = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    weights = load_file(model / "model.safetensors")
    head = {name.replace(last, "layers.0."): each for name, each in weights.items() if name.startswith(last)}
    del head["layers.0.input_layernorm.weight"]  # EAGLE has none
    head["fc.weight"] = torch.cat([torch.eye(size)] * 2, 1).to(head["layers.0.self_attn.q_proj.weight"].dtype) / 2
    save_file(head, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


@pytest.fixture(scope="module", params=["n-grams", "draft model", "EAGLE"])
def method(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def drafted(method: str, noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The draft model is the model itself, whose drafts are right where the request has no limits on tokens."""
    config = NGRAM
    if method == "draft model":
        config = json.dumps({"method": "draft_model", "model": str(noise_model), "num_speculative_tokens": 3})
    elif method == "EAGLE":
        head = write_eagle_head(noise_model, tmp_path_factory.mktemp("head"))
        config = json.dumps({"method": "eagle", "model": str(head), "num_speculative_tokens": 2})
    answer: dict[str, Any] = run_with_vllm(PROGRAM, str(noise_model), json.dumps({"speculative_config": config}))
    return answer


def test_drafts_change_no_token_and_no_logprob(method: str, plain: dict[str, Any], drafted: dict[str, Any]) -> None:
    assert drafted["answers"].keys() == plain["answers"].keys()
    for name, answer in plain["answers"].items():
        found = drafted["answers"][name]
        assert (found["tokens"], found["ending"]) == (answer["tokens"], answer["ending"]), name
        logprobs = [logprob for logprob, *_ in answer["logprobs"]]
        assert [logprob for logprob, *_ in found["logprobs"]] == pytest.approx(logprobs, abs=1e-4), name
    assert {answer["ending"] for answer in drafted["answers"].values()} == {"stop", "length"}
    figures = drafted["figures"]
    least = 0 if method == "EAGLE" else 100  # the head was not trained
    assert least <= figures["num_accepted"] < figures["num_drafted"], "drafts were right, and were wrong"
    assert drafted["speculates"] and not plain["speculates"] and plain["figures"]["num_drafted"] == 0


def test_requests_go_on_with_kv_of_others_and_no_draft_is_shipped(
    plain: dict[str, Any], drafted: dict[str, Any]
) -> None:
    for found in (plain, drafted):
        assert found["moved"] and found["all_free"]
        for name, tokens in found["moved"].items():
            assert tokens == plain["answers"][name.partition(",")[0]]["tokens"], name


def test_workers_pair_with_others_unless_drafts_have_kv(
    method: str, plain: dict[str, Any], drafted: dict[str, Any]
) -> None:
    ours, theirs = (msgspec.convert(each["layout"], KVLayout) for each in (drafted, plain))
    difference, num_layers = ours.first_difference(theirs), {"draft model": 8, "EAGLE": 5}
    if method not in num_layers:
        assert difference is None
        return
    assert difference is not None
    field, own, other = difference
    assert field == "engine" and f": {num_layers[method]} FullAttention" in own and ": 4 FullAttention" in other


def test_a_worker_that_caches_no_prefixes_gives_the_same_tokens(noise_model: Path, plain: dict[str, Any]) -> None:
    """vLLM decides whether it does; models with states may have no prefix cache."""
    settings = json.dumps({"engine_args": ["enable_prefix_caching=false"]})
    found = run_with_vllm(PROGRAM, str(noise_model), settings)
    for kind in ("answers", "moved"):
        for name, answer in plain[kind].items():
            assert found[kind][name] == answer, name
    assert found["all_free"] and found["figures"]["num_cached_blocks"] == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One worker of each role, which hands each prompt over."""
    with Cluster("--speculative-config", NGRAM, *cluster_arguments(), start_timeout_s=START_TIMEOUT_S) as running:
        yield running


def body(name: str, **fields: Any) -> dict[str, Any]:
    """Returns the request of a case of `answer_checks.py`, with the longest prompt."""
    draw = random.Random(150)
    prompt = [draw.randrange(4, 2000) for _ in range(150)]
    few = {} if name == "free" else {"allowed_token_ids": [40, 41, 42, 43]}
    return {
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": 43,
        "ignore_eos": True,
        "return_token_ids": True,
        **few,
        **fields,
    }


def test_prompts_that_are_handed_over_get_the_same_tokens(cluster: Cluster, plain: dict[str, Any]) -> None:
    for name in ("free", "few"):
        tokens = plain["answers"][f"{name} after 150"]["tokens"]
        assert complete(cluster, body(name)) == [tokens]
        assert complete(cluster, body(name, max_tokens=17, n=2)) == [tokens[:17]] * 2
    accepted, drafted = (
        sum(getattr(each.load, f"num_{what}_tokens") for each in cluster.status().workers)
        for what in ("accepted", "drafted")
    )
    assert 0 < accepted < drafted
    shown = run_tandem("status", "--port", str(cluster.port)).stdout
    assert "drafted tokens accepted" in shown
    address = cluster.worker("decode-0").worker.metrics_address
    metrics = httpx.get(f"http://{address}/metrics", timeout=120).text
    assert re.search(r"^tandem_worker_spec_decode_num_accepted_tokens_total [1-9]", metrics, re.MULTILINE)


def test_a_stop_within_a_step_ends_the_answer_there(cluster: Cluster, plain: dict[str, Any]) -> None:
    tokens = plain["answers"]["few after 150"]["tokens"]
    for token in set(tokens):
        request = body("few", stop_token_ids=[token], logprobs=1)
        answer = httpx.post(f"{cluster.url}/v1/completions", json=request, timeout=300)
        choice = answer.json()["choices"][0]
        end = tokens.index(token) + 1
        assert choice["token_ids"][:end] == tokens[:end] and len(choice["token_ids"]) <= end
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) in (end - 1, end)


def test_streams_go_on_after_their_worker_is_killed(cluster: Cluster) -> None:
    [tokens] = complete(cluster, body("few", max_tokens=300))
    found: list[int] = []
    pid, num_migrations = cluster.worker("decode-0").worker.pid, cluster.num_migrations()
    request = body("few", max_tokens=300, stream=True)
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=request, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            before = len(found)
            found += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if before < 20 <= len(found):
                os.kill(pid, signal.SIGKILL)
    assert found == tokens and cluster.num_migrations() == num_migrations + 1


def test_what_drafts_would_ignore_is_refused_by_name(cluster: Cluster) -> None:
    for field in ({"min_p": 0.1}, {"logit_bias": {"50": 1.0}}):
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body("free", **field), timeout=300)
        assert answer.status_code == 400 and next(iter(field)) in answer.text
        assert "--speculative-config" in answer.text
