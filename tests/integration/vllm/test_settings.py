"""What operators set reaches vLLM, and what they leave out is as `vllm serve` has it.

`settings_checks.py` reads settings in vLLM's interpreter, without a model in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import refused_start
from tests.support.vllm_clusters import cluster_arguments, run_with_vllm

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    encoder = tmp_path_factory.mktemp("encoder")
    config = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 64, "hidden_size": 32}
    config |= {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64}
    (encoder / "config.json").write_text(json.dumps(config))
    for file in noise_model.glob("tokenizer*"):
        (encoder / file.name).write_bytes(file.read_bytes())
    program = Path(__file__).with_name("settings_checks.py")
    answer: dict[str, Any] = run_with_vllm(program, str(noise_model), str(encoder))
    return answer


def test_steps_are_as_large_as_those_of_vllm_serve(found: dict[str, Any]) -> None:
    steps = found["steps"]
    assert (steps["h200"], steps["l4"], steps["cpu"]) == ([8192, 1024], [2048, 256], [2048, 128])
    assert steps["h200, given"] == steps["l4, given"] == [640, 9]


def test_arguments_of_all_kinds_reach_the_engine(found: dict[str, Any]) -> None:
    assert found["applied"] == {
        "prefix caching": False,
        "rope_theta": 4321.0,
        "watermark": 0.05,
        "load_format": "dummy",
        "sequences": 20,
        "sizes": [1, 2, 4],
    }


def test_arguments_that_vllm_does_not_take_are_refused_by_name(found: dict[str, Any]) -> None:
    refusals = found["refusals"]
    assert "no engine argument enable_expert_paralel; did you mean" in refusals.pop("enable_expert_paralel=true")
    for given, refusal in refusals.items():
        name = given.partition("=")[0]
        assert refusal.startswith("engine_arg: ") and "\n" not in refusal, refusal
        assert name in refusal.replace("-", "_"), refusal
    assert "fp8" in refusals["kv_cache_dtype=int3"], "it names the choices"


def test_what_is_wrong_stops_the_start_in_one_line() -> None:
    output = refused_start("--engine-arg", "watermark=much", *cluster_arguments())
    assert (
        output.splitlines()[-1]
        == "tandem: engine_arg: vLLM refuses it: argument --watermark: invalid float value: 'much'"
    )
    output = refused_start("--speculative-config", '{"method": "guess"}', *cluster_arguments())
    assert output.splitlines()[-1].startswith("tandem: vLLM refused the model or its settings: ")


def test_a_model_that_generates_no_text_is_refused_for_what_it_is(found: dict[str, Any]) -> None:
    assert "(BertModel) generates no text" in found["encoder"]
