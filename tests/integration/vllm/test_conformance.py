"""vLLM's engine does what Tandem's worker relies on, of which vLLM calls some experimental.

`engine_checks.py` does it in vLLM's interpreter. Run this first when another version is to be supported; it runs with
any version that TANDEM_TEST_VLLM_PYTHON has.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.kv_transfer.handshake import agree
from tandem.kv_transfer.registry import load_connector
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import KVLayout, OpenPair
from tandem.runtime.errors import KVLayoutMismatch
from tandem.vllm_worker.engine import sampling_limits
from tandem.vllm_worker.versions import SUPPORTED_VERSIONS
from tests.support.vllm_clusters import run_with_vllm
from tests.support.vllm_python import older_vllm_python

pytestmark = pytest.mark.timeout(600)

LAYERS, KV_HEADS, HEAD_DIM, FLOAT_BYTES = 4, 2, 64, 4
"""Of the noise model."""


OLDER_PARTS = ("resumed", "memory", "layouts", "prefixes", "moved", "aborts", "tables", "supported")
"""What is tried with the oldest version, too: all that depends on how vLLM keeps requests and blocks."""


class Found(dict[str, Any]):
    """What happened, by part. Skips the test of a part that was not tried."""

    def __missing__(self, part: str) -> None:
        pytest.skip(f"{part} is tried with the default version of vLLM only")


@pytest.fixture(scope="module", params=["default", "oldest"])
def found(request: pytest.FixtureRequest, noise_model: Path) -> dict[str, Any]:
    checks, model = Path(__file__).with_name("engine_checks.py"), str(noise_model)
    if request.param == "default":
        return Found(run_with_vllm(checks, model))
    return Found(run_with_vllm(checks, model, *OLDER_PARTS, python=older_vllm_python()))


def test_the_version_is_one_that_workers_run(found: dict[str, Any]) -> None:
    assert found["version"] in SUPPORTED_VERSIONS


def test_a_resumed_request_goes_on_exactly(found: dict[str, Any]) -> None:
    """Greedy and seeded, with penalties, limits, bad words and grammars, of short prompts and in chunks."""
    for case in found["resumed"]:
        assert len(case["whole"]) > 31, case["case"]
        for split, tokens in case["resumed"].items():
            assert tokens == case["whole"], f"{case['case']}, {case['num_prompt_tokens']} + {split} tokens"


def test_the_cases_do_what_they_say(found: dict[str, Any]) -> None:
    whole = {(each["case"], each["num_prompt_tokens"]): each["whole"] for each in found["resumed"]}
    assert whole["greedy", 150] != whole["seeded", 150] != whole["top-k and top-p", 150]
    assert set(whole["greedy with penalties", 150]) != set(whole["greedy", 150])
    assert whole["min_tokens", 20][35:], "min_tokens"
    assert not {41, 42} & set(whole["min_tokens", 20][:35])
    for length in (20, 150):
        words = whole["bad words", length]
        assert 43 not in words
        assert (41, 42) not in set(pairwise(words))
    assert {50, 51} & set(whole["logit bias", 150])
    for length in (20, 150):
        assert whole["thinking budget", length][12:15] == [42, 43, 44]
        assert whole["greedy with a thinking budget", length].index(42) <= 30
        assert whole["thinking budget and grammar", length][:7] == [*[41] * 6, 42], "the bias opens it and goes on"
        assert whole["thinking budget and grammar", length][7] != 41, "the answer follows the grammar"


def test_a_request_goes_on_with_blocks_that_another_computed(found: dict[str, Any]) -> None:
    for name, case in found["moved"].items():
        assert case["num_cached"] == 2, "the first two blocks were cached"
        assert case["moved"] == case["whole"], name
        assert case["num_blocks"] == (6 if name.endswith("after 20") else 5), name
        assert case["all_free"], name


def test_blocks_are_rows_of_a_file_that_peers_can_map(found: dict[str, Any]) -> None:
    memory = found["memory"]
    assert memory["file"].startswith("/memfd:tandem-kv")
    block_bytes = found["block_size"] * KV_HEADS * 2 * HEAD_DIM * FLOAT_BYTES
    assert memory["shape"] == [memory["num_blocks"] + 1, LAYERS, block_bytes], "one block is for padding"
    assert memory["is_written"]
    assert memory["is_same"]


def test_workers_that_arrange_blocks_differently_do_not_pair(found: dict[str, Any]) -> None:
    ours, theirs, split = (msgspec.convert(each, KVLayout) for each in found["layouts"])
    assert (ours.num_layers, ours.head_dim) == (LAYERS, 32 * KV_HEADS * 2 * HEAD_DIM * FLOAT_BYTES), "rows of bytes"
    offer = OpenPair(PROTOCOL_VERSION, "prefill-0", "epoch", [1], "d", "pair", theirs, "here", "cpu", ["ipc"])
    connectors = {"ipc": load_connector("ipc")}
    layout = rf"vllm LBNHC vec of 0\.31\.0: {LAYERS} FullAttention, blocks of 32"
    reason = f"prefill has {layout}, decode has {layout.replace('LBNHC', 'LBHNC')}$"
    with pytest.raises(KVLayoutMismatch, match=f"KV layout differs in engine: {reason}"):
        agree(offer, ours, "here", "cpu", connectors)
    with pytest.raises(
        KVLayoutMismatch, match=r"in engine: prefill has (vllm LBHNC vec .*) on 2 ranks, decode has \1$"
    ):
        agree(msgspec.structs.replace(offer, layout=split), ours, "here", "cpu", connectors)
    assert agree(msgspec.structs.replace(offer, layout=ours), ours, "here", "cpu", connectors) == "ipc"


def test_the_numerics_name_vllm_and_that_its_answers_depend_on_the_batch(found: dict[str, Any]) -> None:
    ours, _, split = (msgspec.convert(each, KVLayout).numerics for each in found["layouts"])
    assert ours.engine == f"vllm {found['version']}" and ours.dtype == ours.kv_dtype == "float32"
    assert "in oneDNN" in ours.instruction_set and ours.libraries.startswith("torch ")
    assert "depend on the batch" in ours.problem
    assert ours.first_difference(split) == ("num_ranks", "1", "2")


def test_the_prefix_cache_is_named_as_proxies_name_it(found: dict[str, Any]) -> None:
    prefixes = found["prefixes"]
    assert len(prefixes["expected"]) == 4, "three blocks of the prompt and one with generated tokens"
    assert prefixes["added"] == prefixes["expected"]
    assert prefixes["added_salted"] == prefixes["expected_salted"]
    assert not set(prefixes["expected"]) & set(prefixes["expected_salted"])
    assert set(prefixes["expected"]) <= set(prefixes["evicted"])
    assert set(prefixes["last"]) <= set(prefixes["reset"])


def test_aborts_in_each_phase_leave_all_blocks_free(found: dict[str, Any]) -> None:
    assert len(found["aborts"]) == 11
    for phase, facts in found["aborts"].items():
        assert all(facts.values()), f"{phase}: {facts}"


def test_named_tokens_do_not_change_the_logprobs_of_others(found: dict[str, Any]) -> None:
    alone, together = found["logprobs"]["alone"], found["logprobs"]["together"]
    assert {name: len(each) for name, each in alone.items()} == dict.fromkeys(together, 40)
    ids = {name: [token_id for token_id, _ in each[0][2]] for name, each in alone.items() if name != "none"}
    assert (ids["one named"], ids["five named"], len(ids["three likeliest"])) == ([9], [5, 9, 4, 77, 3], 3)
    for name, tokens in alone.items():
        for one, other in zip(tokens, together[name], strict=True):
            assert (one is None) == (other is None) == (name == "none"), name
            if one is not None:
                assert other[:2] == pytest.approx(one[:2], abs=1e-4), name
                assert [each[0] for each in other[2]] == [each[0] for each in one[2]], name
                assert [each[1] for each in other[2]] == pytest.approx([each[1] for each in one[2]], abs=1e-4), name


def test_slices_of_prompts_have_the_same_logprobs(found: dict[str, Any]) -> None:
    whole, sliced = found["prompt_logprobs"]["whole"], found["prompt_logprobs"]["sliced"]
    assert whole and sliced == whole


def test_prompts_whose_logprobs_are_wanted_compute_in_short_chunks(found: dict[str, Any]) -> None:
    shares = found["shares"]
    assert shares["largest_alone"] == 16, "a step has 64 tokens otherwise"
    assert shares["largest"] <= 16 + 20 and shares["has_passed"]
    assert shares["largest_beside"] == 64 and shares["is_beside"], (
        "a step of other prompts has all tokens that are left"
    )
    assert shares["largest_after"] == 64 and shares["all_have"]


def test_sequences_that_skip_steps_get_the_same_tokens(found: dict[str, Any]) -> None:
    *cases, counted = found["skipped"]
    for case in cases:
        assert case["skipped"] == case["whole"]
    assert counted["num_steps"] > 3 * 35, "each had to wait for every third step"


def test_no_list_exceeds_the_tables_of_the_second_model_runner(found: dict[str, Any]) -> None:
    """A longer one ends the engine. The runner also takes slices of a prompt's logits, which the worker shortens."""
    tables = dict(found["tables"])
    assert tables.pop("rows of logits") >= 256
    assert tables == {name: getattr(sampling_limits, name) for name in tables}


def test_what_is_refused_ends_one_request_only(found: dict[str, Any]) -> None:
    refusals = {name: each["refused"] for name, each in found["refusals"].items()}
    assert {each["beside"] for each in found["refusals"].values()} == {"length"}
    for name in ("invalid grammar", "invalid grammar, resumed"):
        assert refusals[name].startswith("invalid_request: the grammar cannot be served: ")
    assert refusals["tokens against the grammar"].startswith("invalid_request: the grammar cannot be followed: ")
    assert refusals["slow grammar"].startswith("invalid_request: the grammar is too complex: ")
    assert refusals["top_p"].startswith("internal_error: vLLM has refused the request: top_p must be")


def test_a_request_that_waits_for_kv_costs_few_steps(found: dict[str, Any]) -> None:
    pauses = found["pauses"]
    assert pauses["num_reports"] <= 20 and pauses["num_tokens"] == 2 and pauses["all_free"]


def test_a_grammar_applies_after_the_thinking(found: dict[str, Any]) -> None:
    cases = found["grammars"]
    answer = cases["answer"]
    assert answer["ending"] == "stop" and 2 <= len(answer["tokens"]) <= 4
    assert cases["after thinking"] == answer
    thought = cases["while it thinks"]["tokens"]
    assert (len(thought) > 1 and 42 in thought) or cases["while it thinks"]["ending"] == "length"
    assert cases["without thinking"] == answer


def test_an_answer_ends_before_min_tokens_only_where_its_grammar_does(found: dict[str, Any]) -> None:
    cases = found["grammars"]
    assert cases["before min_tokens"] == cases["answer"]
    assert len(cases["optional, before min_tokens"]["tokens"]) > 30


def test_an_optional_grammar_that_fails_does_not_end_its_request(found: dict[str, Any]) -> None:
    for name, case in found["grammars"].items():
        if name.startswith("optional"):
            assert case["ending"] in ("length", "stop") and case["tokens"], f"{name}: {case}"
