"""Steps with LoRA adapters equal transformers' models whose weights have the adapters merged, in float32."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import load_model
from tandem.engine.lora.adapter import Adapter
from tandem.engine.lora.adapters import MAX_CACHED_ADAPTERS, Adapters, load_adapter
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.files.lora_files import InvalidAdapter, read_adapter
from tests.support.lora import make_adapter, merge_adapter

COMMON: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),  # fused on CPU
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "phi3": (Phi3ForCausalLM, Phi3Config),  # merged projections
    "gemma2": (Gemma2ForCausalLM, Gemma2Config),  # not fused
}
ALL: dict[str, tuple[str, ...]] = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
}
ALL |= {"qwen3": ALL["llama"], "gemma2": ALL["llama"], "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
GREEDY = [Sample(SamplingParams(temperature=0.0))]


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, LoadedModel]:
    model_class, config_class = MODELS[request.param]
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp(request.param)
    model_class(config_class(**COMMON)).save_pretrained(path)
    return request.param, path, load_model(engine_config(path))


def engine_config(path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 22)


def ref_of(folder: Path) -> AdapterRef:
    return AdapterRef(read_adapter(folder).digest, str(folder))


def reference(path: Path, prompt: list[int], num_tokens: int, adapter: Path | None) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if adapter is not None:
        merge_adapter(model, adapter)
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


def generate(
    runner: ModelRunner, sequences: list[tuple[list[int], Adapter | None]], num_tokens: int
) -> list[list[int]]:
    """Generates greedily: the prompts in two chunks each, all sequences in one batch."""
    tokens: list[list[int]] = [[] for _ in sequences]
    tables = [list(range(8 * number, 8 * number + 8)) for number in range(len(sequences))]
    for start, end in ((0, 9), (9, None)):
        items = [
            BatchItem(prompt[start:end], start, table, GREEDY if end is None else [], adapter=adapter)
            for (prompt, adapter), table in zip(sequences, tables, strict=True)
        ]
        outputs = runner.run(Batch(items))
    while True:
        for each, output in zip(tokens, outputs, strict=True):
            each.append(output.tokens[0].token_id)
        if len(tokens[0]) == num_tokens:
            return tokens
        outputs = runner.run(
            Batch(
                [
                    BatchItem([each[-1]], len(prompt) + len(each) - 1, table, GREEDY, adapter=adapter)
                    for (prompt, adapter), table, each in zip(sequences, tables, tokens, strict=True)
                ]
            )
        )


def test_several_adapters_in_one_batch_equal_merged_weights(
    served: tuple[str, Path, LoadedModel], tmp_path: Path
) -> None:
    name, path, _ = served
    loaded = load_model(engine_config(path))
    plain = AutoModelForCausalLM.from_pretrained(path)
    folders = [
        make_adapter(tmp_path / "all", plain, ALL[name], seed=5),
        make_adapter(tmp_path / "some", plain, ALL[name][:1], seed=6, rank=3, use_rslora=True),
    ]
    adapters = Adapters(loaded.lora_modules, loaded.dtype, loaded.device, lambda: None)
    first, second = (adapters.get(ref_of(folder)) for folder in folders)
    assert first is not None and second is not None
    wait([first._loading, second._loading], 10)
    pool = KVPool(loaded, engine_config(path))
    runner = ModelRunner(loaded, pool)
    rng = random.Random(4)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (17, 20, 12, 23)]
    before = generate(runner, [(prompts[0], None)], 6)
    sequences = list(zip(prompts, (first, None, second, first), strict=True))
    found = generate(runner, sequences, 12)
    folder_of = {id(first): folders[0], id(second): folders[1], id(None): None}
    wanted = [reference(path, prompt, 12, folder_of[id(adapter)]) for prompt, adapter in sequences]
    assert found == wanted
    assert wanted[0] != reference(path, prompts[0], 12, None), "the adapter changes the output"
    assert generate(runner, [(prompts[0], None)], 6) == before, "steps without adapters are as before"
    pool.close()
    adapters.close()


def test_an_item_whose_adapter_failed_gets_an_error_and_the_others_run(
    served: tuple[str, Path, LoadedModel], tmp_path: Path
) -> None:
    _, path, loaded = served
    adapters = Adapters(loaded.lora_modules, loaded.dtype, loaded.device, lambda: None)
    missing = adapters.get(AdapterRef("0" * 64, str(tmp_path / "gone")))
    assert missing is not None
    wait([missing._loading], 10)
    runner = ModelRunner(load_model(engine_config(path)), pool := KVPool(loaded, engine_config(path)))
    items = [BatchItem([5, 6], 0, [0], GREEDY, adapter=missing), BatchItem([5, 6], 0, [1], GREEDY)]
    failed, fine = runner.run(Batch(items))
    assert failed.error is not None and "its log says why" in failed.error.message
    assert str(tmp_path) not in failed.error.message, "clients see no folders"
    assert fine.error is None and len(fine.tokens) == 1
    assert adapters.get(AdapterRef("0" * 64, str(tmp_path / "gone"))) is not missing, "it is tried again"
    pool.close()
    adapters.close()


def test_a_worker_refuses_files_that_differ_from_the_request(
    served: tuple[str, Path, LoadedModel], tmp_path: Path
) -> None:
    name, path, loaded = served
    folder = make_adapter(tmp_path / "a", AutoModelForCausalLM.from_pretrained(path), ALL[name], seed=5)
    ref = ref_of(folder)
    load_adapter(ref, loaded.lora_modules, loaded.dtype, loaded.device)
    shutil.copytree(
        make_adapter(tmp_path / "b", AutoModelForCausalLM.from_pretrained(path), ALL[name], seed=7),
        folder,
        dirs_exist_ok=True,
    )
    with pytest.raises(InvalidAdapter, match="differ from those"):
        load_adapter(ref, loaded.lora_modules, loaded.dtype, loaded.device)


def test_the_cache_is_limited(tmp_path: Path) -> None:
    adapters = Adapters({}, torch.float32, torch.device("cpu"), lambda: None)
    for number in range(MAX_CACHED_ADAPTERS + 3):
        adapters.get(AdapterRef(str(number), str(tmp_path)))
    assert len(adapters._adapters) == MAX_CACHED_ADAPTERS
    adapters.close()
