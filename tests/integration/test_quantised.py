"""A cluster serves a quantised checkpoint as transformers computes the dequantised model, and refuses a bad one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.cluster import MODEL, Cluster, refused_start
from tests.support.greedy import continuation
from tests.support.quantised_checkpoints import QuantisedCheckpoint, gptq, make_checkpoint

NUM_NEW_TOKENS = 24
PROMPTS = [random.Random(seed).choices(range(4, 2000), k=length) for seed, length in ((1, 150), (2, 70))]


@pytest.fixture(scope="module")
def checkpoint(noise_model: Path, tmp_path_factory: pytest.TempPathFactory) -> QuantisedCheckpoint:
    return make_checkpoint(noise_model, tmp_path_factory.mktemp("quantised") / "gptq", gptq(sym=False))


@pytest.mark.parametrize("decode_size", ["2", pytest.param("1", marks=pytest.mark.exhaustive)])
def test_answers_are_those_of_the_dequantised_model(decode_size: str, checkpoint: QuantisedCheckpoint) -> None:
    model = ("--model", str(checkpoint.folder), "--served-model-name", MODEL, "--dtype", "float32")
    checkpoint.model.generation_config.eos_token_id = None
    with Cluster(*model, "--decode-tensor-parallel-size", decode_size) as cluster:
        for prompt in PROMPTS:
            wanted = continuation(checkpoint.model, prompt, NUM_NEW_TOKENS)
            assert cluster.token_ids(prompt, NUM_NEW_TOKENS) == wanted
        assert "weights: gptq int4" in " ".join(cluster.run("status").stdout.split())


def test_a_format_that_is_not_supported_is_refused_in_one_line(noise_model: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(noise_model, tmp_path / "three-bits", gptq(bits=3)).folder
    error = refused_start("--model", str(folder), "--device", "cpu")
    [line] = [line for line in error.splitlines() if "quantization_config" in line]
    assert line.endswith("cannot be served: its quantization_config has bits 3; Tandem supports 4")
