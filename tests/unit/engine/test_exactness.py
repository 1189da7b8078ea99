"""Log-probabilities and embeddings have the same bits in every batch and for every way of cutting a prompt."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tandem.engine.batch import Batch, BatchItem, ItemOutput, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import load_model
from tandem.engine.lora.adapter import Adapter, AdapterWeights
from tandem.engine.model_head import exact_sums
from tandem.engine.model_runner import ModelRunner
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.protocol.messages.dispatch import StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import Pooling, SamplingParams, StopConditions

VOCAB_SIZE = 200
BLOCK_SIZE = 8
BLOCKS_EACH = 10
NUM_BLOCKS = 400
GREEDY = Sample(SamplingParams(temperature=0.0, logprobs=4))
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 96, "intermediate_size": 1416, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "initializer_range": 0.1, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
# 1,416 inputs are so many that oneDNN sums a lone row in another order, and no multiple of a vector.
MODELS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "dense": (LlamaForCausalLM, LlamaConfig, {}, {}),
    "window": (MistralForCausalLM, MistralConfig, {"sliding_window": 11}, {}),
    "experts": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 1096, "norm_topk_prob": True},
        {},
    ),
    "sinks and transposed experts": (
        GptOssForCausalLM,
        GptOssConfig,
        {"sliding_window": 11, "num_local_experts": 5, "num_experts_per_tok": 2},
        {},
    ),
    "quantised": (LlamaForCausalLM, LlamaConfig, {}, {"quantization": "int8"}),
    "quantised to FP8": (LlamaForCausalLM, LlamaConfig, {}, {"quantization": "fp8"}),
    "cache in FP8": (LlamaForCausalLM, LlamaConfig, {}, {"kv_cache_dtype": "fp8"}),
}
Bits = tuple[int, float, tuple[tuple[int, float], ...]]
"""The sampled token, its log-probability and the likeliest tokens."""


class Exact:
    """An engine, and each prompt's answer when it is computed alone: the whole prompt, then token by token.

    loaded: with `exact_config`, so it would have been refused if a reason were known why it is not exact. make_runner:
    of the engine's ranks; by default there is one.
    """

    def __init__(
        self, loaded: LoadedModel, make_runner: Callable[[LoadedModel, KVPool], ModelRunner] = ModelRunner
    ) -> None:
        self.lora_modules = loaded.lora_modules
        layout = loaded.layout
        self.numerics = layout.numerics
        size = NUM_BLOCKS * layout.num_layers * 2 * layout.num_kv_heads * BLOCK_SIZE * layout.head_dim * 4
        self.pool = KVPool(loaded, EngineConfig("m", kv_cache_bytes=size))
        self._runner = make_runner(loaded, self.pool)
        self._alone: dict[tuple[tuple[int, ...], int], list[Bits]] = {}

    def alone(self, prompt: Sequence[int], num_tokens: int, adapter: Adapter | None = None) -> list[Bits]:
        key = tuple(prompt), id(adapter)
        found = self._alone.setdefault(key, [])
        if len(found) < num_tokens:
            found.clear()
            tokens, start = list(prompt), 0
            while len(found) < num_tokens:
                output = self.run([BatchItem(tokens, start, list(range(BLOCKS_EACH)), [GREEDY], adapter=adapter)])[0]
                found.append(bits(output))
                start, tokens = start + len(tokens), [found[-1][0]]
        return found[:num_tokens]

    def run(self, items: list[BatchItem]) -> list[ItemOutput]:
        return self._runner.run(Batch(items))


def exact_config(folder: Path, dtype: str, **extra: Any) -> EngineConfig:
    settings = {"model": str(folder), "dtype": dtype, "device": "cpu", "block_size": BLOCK_SIZE, "exact": True}
    return msgspec.convert(settings | extra, EngineConfig)


def bits(output: ItemOutput) -> Bits:
    token = output.tokens[0]
    assert token.logprobs is not None
    return token.token_id, token.logprobs.logprob, tuple(token.logprobs.top)


class Answer:
    """A prompt that is computed in chunks, and then some tokens."""

    def __init__(self, prompt: list[int], chunks: list[int], first_block: int, adapter: Adapter | None) -> None:
        self.prompt, self.adapter = prompt, adapter
        self.answer: list[Bits] = []
        self._chunks = chunks
        self._start = 0
        self._blocks = list(range(first_block, first_block + BLOCKS_EACH))

    def item(self) -> BatchItem:
        tokens = [*self.prompt, *(token for token, *_ in self.answer)][self._start :]
        if self._start < len(self.prompt):
            tokens = tokens[: self._chunks.pop(0) if self._chunks else None]
        is_last = self._start + len(tokens) >= len(self.prompt)
        item = BatchItem(tokens, self._start, self._blocks, [GREEDY] if is_last else [], adapter=self.adapter)
        self._start += len(tokens)
        return item

    def take(self, output: ItemOutput) -> None:
        if output.tokens:
            self.answer.append(bits(output))


Drawn = tuple[list[int], list[list[int]]]
"""Lengths of prompts, and the chunks of each."""


def check(engine: Exact, seed: int, drawn: Drawn, adapters: list[Adapter | None]) -> None:
    """Computes prompts of these lengths in one batch whose members come and go, and compares them with each alone."""
    lengths, chunks = drawn
    rng = random.Random(seed)
    waiting = [
        Answer([rng.randrange(VOCAB_SIZE) for _ in range(length)], list(cuts), (i + 1) * BLOCKS_EACH, adapter)
        for i, (length, cuts, adapter) in enumerate(zip(lengths, chunks, adapters, strict=True))
    ]
    running: list[Answer] = []
    done: list[Answer] = []
    while waiting or running:
        if waiting:
            running.append(waiting.pop())
        outputs = engine.run([sequence.item() for sequence in running])
        for sequence, output in zip(list(running), outputs, strict=True):
            sequence.take(output)
            if len(sequence.answer) == 3:
                running.remove(sequence)
                done.append(sequence)
    for sequence in done:
        assert sequence.answer == engine.alone(sequence.prompt, 3, sequence.adapter)


def prompts() -> st.SearchStrategy[Drawn]:
    lengths = st.lists(st.integers(1, 60), min_size=1, max_size=7)
    cuts = st.lists(st.integers(1, 30), max_size=3)
    return lengths.flatmap(
        lambda each: st.tuples(st.just(each), st.lists(cuts, min_size=len(each), max_size=len(each)))
    )


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.extended)])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exact]:
    model_class, config_class, config, extra = MODELS[request.param]
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("exact")
    model_class(config_class(**COMMON | config)).save_pretrained(folder)
    made = Exact(load_model(exact_config(folder, dtype, **extra)))
    yield made
    made.pool.close()


EXAMPLES = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@EXAMPLES
@given(st.integers(0, 99), prompts())
def test_bits_depend_neither_on_the_batch_nor_on_chunks(engine: Exact, seed: int, drawn: Drawn) -> None:
    check(engine, seed, drawn, [None] * len(drawn[0]))


@EXAMPLES
@given(st.integers(0, 99), prompts(), st.sampled_from(["last", "mean"]))
def test_embeddings_depend_neither_on_the_batch_nor_on_chunks(
    dense: Exact, seed: int, drawn: Drawn, pooling: Pooling
) -> None:
    rng = random.Random(seed)
    inputs = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in drawn[0]]
    together = embeddings(dense, inputs, drawn[1], pooling)
    assert together == [embeddings(dense, [each], [[]], pooling)[0] for each in inputs]


def embeddings(engine: Exact, inputs: list[list[int]], chunks: list[list[int]], pooling: Pooling) -> list[bytes]:
    """Computes the next chunk of each input in every step, beside a sequence that is sampled."""
    chunks = [list(each) for each in chunks]
    waiting = [Embedded(tokens, i * BLOCKS_EACH, pooling) for i, tokens in enumerate(inputs, start=1)]
    while open_ := [each for each in waiting if not each.prompt.is_computed]:
        cuts = [chunks[waiting.index(each)] for each in open_]
        items = [each.item(cut.pop(0) if cut else None) for each, cut in zip(open_, cuts, strict=True)]
        beside = BatchItem([5, 6], 0, list(range(BLOCKS_EACH)), [GREEDY])
        for each, output in zip(open_, engine.run([beside, *items])[1:], strict=True):
            if output.pooled is not None:
                each.prompt.add_pooled(output.pooled)
    found = [each.prompt.embedding(0.0)[0].embedding for each in waiting]
    return [each for each in found if each is not None]


class Embedded:
    """An input of an embedding request, with the state that a worker keeps of it."""

    def __init__(self, tokens: list[int], first_block: int, pooling: Pooling) -> None:
        request = StartPrefill(
            proxy_id="p", attempt_ids=["a"], transfer_id="t", token_ids=pack_token_ids(tokens), seeds=[0],
            sampling=SamplingParams(), stop=StopConditions(1), deadline_s=9.0, pooling=pooling, decode_worker_id=None,
            decode_epoch=None,
        )  # fmt: skip
        self.prompt = PrefillPrompt.of(request, None, False, 0, 0.0)
        self.prompt.block_table = list(range(first_block, first_block + BLOCKS_EACH))

    def item(self, limit: int | None) -> BatchItem:
        num_tokens = min(self.prompt.num_remaining_tokens, limit or self.prompt.num_remaining_tokens)
        item = self.prompt.next_item(num_tokens)
        self.prompt.num_computed_tokens += num_tokens
        return item


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.bfloat16, torch.float32]), st.floats(-30, 18))
def test_sums_of_states_are_exact_in_any_order(seed: int, dtype: torch.dtype, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(700, 5, generator=generator).mul_(2.0**magnitude).clamp_(-(2.0**19), 2.0**19).to(dtype)
    whole = exact_sums(rows)
    order = torch.randperm(len(rows), generator=generator)
    cuts = [int(cut) for cut in torch.randint(0, 700, (3,), generator=generator).sort().values]
    parts = [exact_sums(part) for part in torch.tensor_split(rows[order], cuts)]
    assert torch.equal(torch.stack(parts).sum(0), whole)
    expected = torch.tensor([math.fsum(column) for column in rows.double().t().tolist()], dtype=torch.float64)
    torch.testing.assert_close(whole.sum(0), expected, rtol=1e-12, atol=700 * 2.0**-41)


@EXAMPLES
@given(st.integers(0, 99), prompts(), st.randoms(use_true_random=False))
def test_bits_do_not_depend_on_the_adapters_of_other_rows(
    dense: Exact, adapters: list[Adapter | None], seed: int, drawn: Drawn, rng: random.Random
) -> None:
    check(dense, seed, drawn, [rng.choice(adapters) for _ in drawn[0]])


@pytest.fixture(scope="module")
def dense(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exact]:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("adapted")
    LlamaForCausalLM(LlamaConfig(**COMMON)).save_pretrained(folder)
    made = Exact(load_model(exact_config(folder, dtype)))
    yield made
    made.pool.close()


@pytest.fixture(scope="module")
def adapters(dense: Exact, dtype: str) -> list[Adapter | None]:
    """Returns no adapter and two adapters."""
    generator = torch.Generator().manual_seed(2)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.1).to(getattr(torch, dtype))

    def make(rank: int) -> Adapter:
        layers = {name: (matrix(rank, sizes[0]), matrix(sizes[1], rank)) for name, sizes in dense.lora_modules.items()}
        loading: Future[AdapterWeights] = Future()
        loading.set_result(AdapterWeights(layers))
        return Adapter(loading)

    return [None, make(3), make(8)]
