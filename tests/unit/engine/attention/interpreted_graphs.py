"""Models with our kernels, run from recorded graphs. Collected by test_triton_attention.py in a process of its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM

from tandem.engine import model_runner
from tandem.engine.batch import Batch, BatchItem, ItemOutput, Sample
from tandem.engine.cpu import prepared_model
from tandem.engine.cuda.step_graphs import GraphLimits
from tandem.engine.engine_config import EngineConfig, KVCacheDtype
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.tensor_parallel import without_sampling
from tandem.protocol.messages.sampling import SamplingParams
from tests.support.recorded_graphs import RecordedGraphs
from tests.unit.engine.attention.interpreted_attention import (
    FP8,
    small_splits,  # noqa: F401  # a fixture of all tests here
)

GREEDY = Sample(SamplingParams(temperature=0.0))


SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    torch.manual_seed(11)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # the kernels' own tests have more
    MistralForCausalLM(MistralConfig(**SHAPE | heads, sliding_window=10)).save_pretrained(tmp_path)
    return new_runner(tmp_path)


def new_runner(folder: Path, kv_cache_dtype: KVCacheDtype = "auto") -> ModelRunner:
    """The layers are transformers' own, as on a GPU: kernels for CPUs could not be recorded."""
    config = EngineConfig(
        str(folder), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 21, kv_cache_dtype=kv_cache_dtype
    )
    model = load_model(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "fuse_layers", lambda model, operators: None)
        patch.setattr(prepared_model, "prepare_model", lambda loaded: None)
        return ModelRunner(model, KVPool(model, config))


def test_a_model_generates_the_same_from_recorded_graphs(runner: ModelRunner) -> None:
    """A recorded graph holds what was captured, as a CUDA graph does: other inputs, read by Python, are not seen."""
    expected = generate(runner)
    runner._uses_triton = True
    assert generate(runner) == expected
    graphs = RecordedGraphs()
    runner.use_graphs(GraphLimits(max_num_seqs=4, max_num_batched_tokens=28), graphs.capture)
    runner.warm_up()
    assert runner._graphs is not None
    captured = runner._graphs.captured
    assert set(captured) == {*runner._graphs.decode_shapes, *runner._graphs.chunk_shapes}
    graphs.num_replays = 0
    assert generate(runner) == expected
    assert graphs.num_replays == 5, "every step runs from a graph: the last ones beside a prompt, too"
    assert runner._graphs.captured == captured, "nothing is captured after startup"


def test_a_model_with_an_fp8_cache_from_recorded_graphs(runner: ModelRunner, tmp_path: Path) -> None:
    """The tokens are those of plain attention, which rounds keys and values to FP8, too."""
    own = new_runner(tmp_path, "fp8")
    expected = generate(own)
    assert own._pool.tensor.dtype == FP8 and expected != generate(runner), "rounding changes this model's tokens"
    own._uses_triton = True
    own.use_graphs(GraphLimits(max_num_seqs=4, max_num_batched_tokens=28), RecordedGraphs().capture)
    own.warm_up()
    assert own._graphs is not None and generate(own) == expected


FEW = tuple(range(40, 60))
"""Of few tokens some come again, unless a penalty prevents it."""


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_k=50, seed=3), SamplingParams(seed=3, allowed_token_ids=FEW, presence_penalty=50.0)],
    ids=["no history", "penalties"],
)
def test_a_step_takes_tokens_that_the_host_has_not_seen(runner: ModelRunner, sampling: SamplingParams) -> None:
    """With plain attention, without graphs, and from graphs: replayed before the last step's tokens are read."""
    prompts, tables = [[5, 6, 7], [8, 9]], [[0, 1], [2, 3]]
    first = [BatchItem(p, 0, t, [Sample(sampling)]) for p, t in zip(prompts, tables, strict=True)]

    def steps(*, ahead: bool) -> list[list[int]]:
        step, outputs = runner.launch(Batch(first)), list[ItemOutput]()
        found: list[list[int]] = []
        histories: list[list[int]] = [[], []]
        for number in range(4):
            order = [0, 1] if number % 2 == 0 else [1, 0]  # of the sequences in `step`
            if not ahead:
                outputs = step.result()
                found.append([output.tokens[0].token_id for output in outputs])
                for i, token in zip(order, found[-1], strict=True):
                    histories[i].append(token)
            items = []
            for i in reversed(order):
                sample, start = Sample(sampling, output_token_ids=list(histories[i])), len(prompts[i]) + number
                if ahead:
                    items.append(BatchItem([0], start, tables[i], [sample], follows=order.index(i)))
                else:
                    items.append(BatchItem([histories[i][-1]], start, tables[i], [sample]))
            next_step = runner.launch(Batch(items), step if ahead else None)
            if ahead:
                outputs = step.result()
                next_step.sample_after(outputs)
                found.append([output.tokens[0].token_id for output in outputs])
                for i, token in zip(order, found[-1], strict=True):
                    histories[i].append(token)
            step = next_step
        return found

    expected = steps(ahead=False)
    assert steps(ahead=True) == expected
    runner._uses_triton = True
    if not sampling.needs_history:  # which changes nothing of the model, but when a graph's logits are read
        assert steps(ahead=True) == expected
    graphs = RecordedGraphs()
    runner.use_graphs(GraphLimits(max_num_seqs=4, max_num_batched_tokens=28), graphs.capture)
    assert steps(ahead=True) == expected and graphs.num_replays == 5


def generate(runner: ModelRunner) -> list[list[int]]:
    """Prompts first, then single tokens, then single tokens beside a new prompt and beside the rest of it."""
    rng = random.Random(1)
    tokens = [[rng.randrange(320) for _ in range(length)] for length in (1, 12, 11)]
    starts = [0, 0, 0]
    late, tables = [rng.randrange(320) for _ in range(19)], [list(range(8 * i, 8 * i + 8)) for i in range(4)]
    for number in range(5):
        items = [BatchItem(tokens[i][starts[i] :], starts[i], tables[i], [GREEDY]) for i in range(3)]
        if number == 3:
            items.insert(1, BatchItem(late[:9], 0, tables[3]))
        if number == 4:
            items.append(BatchItem(late[9:], 9, tables[3], [GREEDY, GREEDY]))
        outputs = runner.run(Batch(items))
        if number == 3:
            assert outputs.pop(1).tokens == []
        if number == 4:
            tokens.append([token.token_id for token in outputs.pop().tokens])
        for i, output in enumerate(outputs):
            starts[i] = len(tokens[i])
            tokens[i].append(output.tokens[0].token_id)
    return tokens


def test_a_worker_of_prompts_captures_graphs_of_single_tokens_when_it_first_needs_them(runner: ModelRunner) -> None:
    runner._uses_triton = True
    runner.use_graphs(GraphLimits(max_num_seqs=2, max_num_batched_tokens=20, decodes=False), RecordedGraphs().capture)
    runner.warm_up()
    graphs = runner._graphs
    one, two = graphs.decode_shapes
    assert graphs is not None and two not in graphs.captured, "only the one that warms up sampling"
    runner.run(Batch([BatchItem([1], 3, [2], [GREEDY])] * 2))
    assert graphs.captured[-1] == two != one


def test_all_ranks_capture_the_same_graphs_in_the_same_order(runner: ModelRunner, tmp_path: Path) -> None:
    """Rank 0 sends each step, so that the others reach the same collectives."""
    follower = new_runner(tmp_path)
    sent: list[Batch] = []
    run = runner.run

    def send_and_run(batch: Batch) -> Any:
        sent.append(without_sampling(batch))
        return run(batch)

    runner.run = send_and_run  # type: ignore[method-assign]
    for each in (runner, follower):
        each._uses_triton = True
        limits = GraphLimits(max_num_seqs=3, max_num_batched_tokens=9)
        each.use_graphs(limits, RecordedGraphs().capture)
    runner.warm_up()
    for batch in sent:
        follower.run(batch)
    assert runner._graphs is not None and follower._graphs is not None
    assert runner._graphs.captured == follower._graphs.captured
    assert len(runner._graphs.captured) == len(runner._graphs.decode_shapes) + len(runner._graphs.chunk_shapes)


def test_a_model_that_reads_from_the_device_runs_without_graphs(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(runner)
    runner._uses_triton = True
    layer = runner._model.base_model.layers[1]
    layer.register_forward_pre_hook(lambda _, args: float(args[0].sum()) and None)
    runner.use_graphs(GraphLimits(max_num_seqs=2, max_num_batched_tokens=9), RecordedGraphs().capture)
    runner.warm_up()
    assert runner._graphs is None and "without CUDA graphs" in caplog.text
    assert generate(runner) == expected


def test_a_model_with_sinks_and_experts(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = GptOssConfig(
        **SHAPE, sliding_window=10, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    runner = new_runner(tmp_path)
    expected = generate(runner)
    runner._uses_triton = True
    assert generate(runner) == expected
