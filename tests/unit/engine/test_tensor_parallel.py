"""Two ranks, one of them a real follower process, generate the same tokens as one rank, greedily in float32.

Their log-probabilities have the same bits in every batch and for every way of cutting a prompt.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tandem.engine import tensor_parallel
from tandem.engine.batch import Batch, BatchItem, Sample
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.loading.sharding import check_shards
from tandem.engine.model_runner import ModelRunner
from tandem.engine.tensor_parallel import TensorParallelGroup, follow, without_sampling
from tandem.protocol.codec import Codec
from tandem.protocol.messages.sampling import SamplingParams
from tandem.protocol.rank_channel import RankChannel, open_channel
from tandem.runtime.errors import ConfigError
from tandem.runtime.logs import LogSettings
from tandem.worker.follower import start_follower
from tests.unit.engine.test_engine_parity import COMMON, MODELS
from tests.unit.engine.test_exactness import COMMON as EXACT_COMMON
from tests.unit.engine.test_exactness import Drawn, Exact, check, exact_config, prompts

PROMPT_LENGTHS = (1, 9, 31, 64, 100)
NUM_NEW_TOKENS = 12


@pytest.fixture(params=["llama", pytest.param("qwen3", marks=pytest.mark.extended)])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> EngineConfig:
    model_class, config_class, extra = MODELS[request.param]
    torch.manual_seed(1)
    model_class(config_class(**COMMON, **extra)).save_pretrained(tmp_path)
    return EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 22)


@pytest.fixture
def group_and_lost(config: EngineConfig) -> Iterator[tuple[TensorParallelGroup, list[str]]]:
    with two_ranks(config) as (group, lost):
        yield group, lost


@contextmanager
def two_ranks(config: EngineConfig) -> Iterator[tuple[TensorParallelGroup, list[str]]]:
    """Yields the ranks, and why they were lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        split = msgspec.structs.replace(config, tensor_parallel_size=2)
        lost: list[str] = []
        group = TensorParallelGroup(
            "worker",
            split,
            "127.0.0.1",
            LogSettings(),
            start_follower,
            on_lost=lambda reason, code: lost.append(reason),
        )
        try:
            yield group, lost
        finally:
            group.close()
            if dist.is_initialized():
                dist.destroy_process_group()


def greedy(runner: ModelRunner, pool: KVPool) -> list[list[int]]:
    """Prompts in chunks, then all sequences in one batch per token; blocks are scattered."""
    rng = random.Random(3)
    free = list(range(64))
    rng.shuffle(free)
    choose = [Sample(SamplingParams(temperature=0.0))]
    tokens, tables = [], []
    for length in PROMPT_LENGTHS:
        prompt = [rng.randrange(COMMON["vocab_size"]) for _ in range(length)]
        table = [free.pop() for _ in range(-(-(length + NUM_NEW_TOKENS) // 8))]
        half = length // 2
        if half:
            runner.run(Batch([BatchItem(prompt[:half], 0, table)]))
        (output,) = runner.run(Batch([BatchItem(prompt[half:], half, table, choose)]))
        tokens.append([*prompt, output.tokens[0].token_id])
        tables.append(table)
    for _ in range(NUM_NEW_TOKENS - 1):
        items = [BatchItem(t[-1:], len(t) - 1, table, choose) for t, table in zip(tokens, tables, strict=True)]
        for sequence, output in zip(tokens, runner.run(Batch(items)), strict=True):
            sequence.append(output.tokens[0].token_id)
    return [t[length:] for t, length in zip(tokens, PROMPT_LENGTHS, strict=True)]


def test_two_ranks_equal_one(config: EngineConfig, group_and_lost: tuple[TensorParallelGroup, list[str]]) -> None:
    group, lost = group_and_lost
    loaded = group.load()
    pool = KVPool(loaded, config)
    assert loaded.layout.num_kv_heads == COMMON["num_key_value_heads"] // 2
    assert group.pids[0] == os.getpid() and len(group.pids) == 2
    runner = group.make_runner(loaded, pool)
    runner.warm_up()
    split = greedy(runner, pool)
    pool.close()
    whole = load_model(config)
    whole_pool = KVPool(whole, config)
    assert split == greedy(ModelRunner(whole, whole_pool), whole_pool)
    whole_pool.close()
    assert not lost

    # A rank that freezes: the collectives' deadline ends the step, and with it the worker.
    dist.set_timeout(timedelta(seconds=0.5))
    os.kill(group.pids[1], signal.SIGSTOP)
    with pytest.raises(RuntimeError) as failure:
        runner.warm_up()
    assert runner.why_lost(failure.value).startswith("the ranks are out of step; the worker ends: ")


EXACT_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dense": (LlamaForCausalLM, LlamaConfig, {}),
    "experts": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2832, "norm_topk_prob": True},
    ),
}
"""So many inputs that those of each rank are summed in another order for a lone row."""


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_bits_of_two_ranks_depend_neither_on_the_batch_nor_on_chunks(name: str, dtype: str, tmp_path: Path) -> None:
    model_class, config_class, extra = EXACT_MODELS[name]
    torch.manual_seed(1)
    model_class(config_class(**EXACT_COMMON | {"intermediate_size": 2832} | extra)).save_pretrained(tmp_path)
    config = exact_config(tmp_path, dtype)
    with two_ranks(config) as (group, lost):
        loaded = group.load()
        engine, whole = Exact(loaded, group.make_runner), Exact(load_model(config))
        ours, one_rank = loaded.layout.numerics, whole.numerics
        assert ours.problem == "" and one_rank.first_difference(ours) == ("num_ranks", "1", "2")
        assert ours.digest != one_rank.digest
        if dtype == "float32":  # in bfloat16 one and two ranks round differently
            prompt = list(range(3, 40))
            assert [token for token, *_ in engine.alone(prompt, 5)] == [token for token, *_ in whole.alone(prompt, 5)]
        whole.pool.close()

        @settings(max_examples=4, deadline=None)
        @given(st.integers(0, 99), prompts())
        def check_drawn(seed: int, drawn: Drawn) -> None:
            check(engine, seed, drawn, [None] * len(drawn[0]))

        check_drawn()
        engine.pool.close()
        assert not lost


def test_followers_get_the_batch_without_sampling_fields() -> None:
    params = SamplingParams(temperature=0.7, repetition_penalty=1.1, seed=7)
    item = BatchItem([1, 2, 3], 8, (5, 6), [Sample(params, [1] * 99, [2], {3})] * 3, 2, [4, 5, 6])
    shared = Codec[Batch](Batch).decode(Codec[Batch](Batch).encode(without_sampling(Batch([item], [(1, 2)]))))
    (shared_item,) = shared.items
    assert (shared_item.token_ids, shared_item.start, list(shared_item.block_table)) == ([1, 2, 3], 8, [5, 6])
    assert (shared_item.num_prompt_logprobs, shared_item.target_token_ids) == (2, [4, 5, 6])
    assert [tuple(copy) for copy in shared.block_copies] == [(1, 2)]
    assert len(shared_item.samples) == 3 and not any(
        s.prompt_token_ids or s.params.temperature for s in shared_item.samples
    )


class Follower:
    """A runner whose device fails. events: what was called."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def launch(self, batch: Batch) -> None:
        self.events.append(f"launch {batch.items[0].start}")

    def wait(self) -> None:
        self.events.append("wait")
        raise RuntimeError("an illegal memory access")


def a_step(number: int) -> Batch:
    return Batch([BatchItem([1], number, [0])])


def test_a_follower_does_not_wait_between_steps() -> None:
    leader, follower = open_channel()
    channel = RankChannel(leader, Codec(Batch))
    for number in range(3):
        channel.send(a_step(number))
    channel.close()
    runner: Any = Follower()
    follow(follower, runner)
    assert runner.events == ["launch 0", "launch 1", "launch 2"]


def test_a_follower_notices_a_failed_step_behind_which_no_batch_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "QUIET_S", 0.01)
    leader, follower = open_channel()
    channel = RankChannel(leader, Codec(Batch))
    channel.send(a_step(0))
    runner: Any = Follower()
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        follow(follower, runner)
    assert runner.events == ["launch 0", "wait"]
    channel.close()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "message"),
    [
        (4, 2, 3, "may be 1 or 2$"),
        (12, 6, 4, "may be 1 or 2 or 3 or 6$"),
        (8, 2, 4, "2 key-value heads, which 4 ranks cannot share"),
    ],
)
def test_invalid_sizes_name_the_valid_ones(num_heads: int, num_kv_heads: int, size: int, message: str) -> None:
    plan = {"layers.*.self_attn.k_proj": "colwise"}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    model = SimpleNamespace(model_type="llama", base_model_tp_plan=plan, **heads)
    with pytest.raises(ConfigError, match=message):
        check_shards("some/model", model, size)


def test_a_model_whose_plan_does_not_split_attention_is_refused() -> None:
    plan = {"layers.*.self_attn.qkv_proj": "colwise_gather_output"}
    model = SimpleNamespace(model_type="phi3", num_attention_heads=4, base_model_tp_plan=plan)
    with pytest.raises(ConfigError, match="does not split its attention heads"):
        check_shards("some/model", model, 2)
    check_shards("some/model", model, 1)


@pytest.mark.parametrize(
    ("serves", "returncode", "expected"),
    [(False, 2, 2), (False, -9, 1), (True, 2, 1), (True, 3, 1), (True, 0, 1), (True, 1, 1)],
)
def test_a_rank_that_ends_while_the_worker_serves_is_a_crash(serves: bool, returncode: int, expected: int) -> None:
    """Its exit code would say that the configuration is wrong, or that the worker has drained."""
    codes: list[int] = []
    group = TensorParallelGroup(
        "worker", EngineConfig(model="m"), "127.0.0.1", LogSettings(), cast(Any, None),
        on_lost=lambda _, code: codes.append(code),
    )  # fmt: skip
    group._serves = serves
    group._watch(1, cast(Any, SimpleNamespace(pid=7, wait=lambda: returncode)))
    assert codes == [expected]
