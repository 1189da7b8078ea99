"""Steps that overlap: the same tokens as without, no gap, and no request lost when a step fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.config import EngineConfig
from tandem.engine.kv_pool import KVPool
from tandem.engine.launched_step import LaunchedStep
from tandem.engine.loading.model_loader import LoadedModel, load_model
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages.generation import SampledToken, SamplingParams, StopConditions
from tandem.worker.engine_host import may_overlap
from tests.support.steps import SteppingWorker

VOCAB_SIZE = 5000  # top_p has fewer candidates than that, and its rows may need more
GREEDY = SamplingParams(temperature=0.0)
STEP_S = 0.005


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, EngineConfig]:
    engine = save_model(tmp_path_factory.mktemp("model"))
    return load_model(engine), engine


def save_model(folder: Path) -> EngineConfig:
    """Writes a model that two ranks can share."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return EngineConfig(str(folder), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 20)


class CountingRunner(ModelRunner):
    """Counts items that follow a step in flight, and steps that are launched again."""

    num_following = num_again = 0

    def launch(self, batch: Batch, before: LaunchedStep | None = None) -> LaunchedStep:
        self.num_following += sum(item.follows is not None for item in batch.items)
        self.num_again += before is not None and before.was_corrected
        return super().launch(batch, before)


def serve(runner: ModelRunner, samplings: list[SamplingParams], overlaps: bool) -> SteppingWorker:
    """Requests of several lengths, one with two sequences; a second wave arrives while the first one decodes.

    One request is aborted after two tokens.
    """
    worker = SteppingWorker(lambda: runner, overlaps)

    def start(name: str, number: int, seeds: tuple[int, ...] = (0,)) -> None:
        stop = StopConditions(6 + number, frozenset(range(0, VOCAB_SIZE, 37)), min_tokens=3)
        sampling = samplings[number % len(samplings)]
        worker.start(name, list(range(3, 9 + 7 * number)), sampling, stop, tuple(seed + number for seed in seeds))

    def on_message(message: Any) -> None:
        if len(worker.tokens["a0"]) == 4 and "d0" not in worker.tokens:
            start("d", 3)
            start("e", 4, (0, 50))
        if len(worker.tokens["f0"]) == 2 and not is_aborted:
            is_aborted.append(True)
            worker.perform(worker.scheduler.on_abort("p", "f0"))

    is_aborted: list[bool] = []
    worker.on_message = on_message
    for number, name in enumerate("abcf"):
        start(name, number)
    worker.run()
    worker.close()
    return worker


every_sampling = pytest.mark.parametrize(
    "samplings",
    [
        [GREEDY],
        [SamplingParams(temperature=0.8), GREEDY],
        [SamplingParams(top_p=0.9999), SamplingParams(temperature=0.9, top_k=20, logprobs=2)],
        [SamplingParams(top_p=0.9999, temperature=3.0, logprobs=1)],
        [GREEDY, SamplingParams(temperature=0.8, repetition_penalty=1.3), GREEDY, GREEDY, GREEDY],
    ],
    ids=["greedy", "plain", "filters", "too few candidates", "penalties"],
)


@every_sampling
def test_overlapped_steps_give_the_same_tokens(
    engine: tuple[LoadedModel, EngineConfig], samplings: list[SamplingParams]
) -> None:
    loaded, config = engine
    check_overlap(CountingRunner(loaded, KVPool(loaded, config)), samplings)


def check_overlap(runner: CountingRunner, samplings: list[SamplingParams]) -> None:
    """Compares the tokens of requests with overlapped steps to those without. runner: new."""
    expected = serve(runner, samplings, overlaps=False)
    assert runner.num_following == 0
    found = serve(runner, samplings, overlaps=True)
    assert found.ended == expected.ended and found.tokens.keys() == expected.tokens.keys()
    for name, tokens in found.tokens.items():
        for token, other in zip(tokens, expected.tokens[name], strict=True):
            assert token.token_id == other.token_id
            if token.logprobs is not None and other.logprobs is not None:  # batches round differently
                assert token.logprobs.rank == other.logprobs.rank
                assert token.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
    assert runner.num_following > 10
    if samplings[0].temperature == 3.0:
        assert runner.num_again > 0, "a step that has read corrected tokens is launched again"
    assert set(expected.ended.values()) <= {"stop", "length"} and expected.ended.keys() == set(expected.tokens) - {"f0"}
    assert len(expected.tokens["f0"]) == 2, "it was aborted"


class Device:
    """Runs steps one after the other, STEP_S each, in virtual time; the host needs 1 ms to launch a step.

    fails: (number of a launched step, the error that its launch raises) or, with `is_late`, its end.
    """

    device = torch.device("cpu")
    why_lost = ModelRunner.why_lost

    def __init__(self, fails: tuple[int, Exception] | None = None, is_late: bool = False) -> None:
        self.now = self.free_at = 0.0
        self.events: list[tuple[str, int]] = []
        self._fails = fails
        self._is_late = is_late
        self._num_launched = 0

    def clock(self) -> float:
        return self.now

    def warm_up(self) -> None: ...

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)

    def run(self, batch: Batch) -> list[ItemOutput]:
        return self.launch(batch).result()

    def launch(self, batch: Batch, before: Any = None) -> Any:
        number = self._num_launched
        self._num_launched += 1
        fails = self._fails is not None and self._fails[0] == number
        if fails and not self._is_late:
            raise self._fails[1]  # type: ignore[index]
        self.now += 0.001
        self.events.append(("launched", number))
        ends_at = self.free_at = max(self.now, self.free_at) + STEP_S
        outputs = [ItemOutput([SampledToken(9)] * len(item.samples)) for item in batch.items]

        def wait() -> None:
            if fails:
                raise self._fails[1]  # type: ignore[index]
            self.now = max(self.now, ends_at)
            self.events.append(("ended", number))

        return LaunchedStep(None, lambda tokens: outputs, wait)


def decode_with(device: Device, overlaps: bool, num_tokens: int = 30) -> SteppingWorker:
    worker = SteppingWorker(lambda: device, overlaps, clock=device.clock)
    worker.start("a", [1, 2, 3], GREEDY, StopConditions(num_tokens))
    worker.start("b", [1, 2, 3, 4], GREEDY, StopConditions(num_tokens // 2))
    worker.run()
    worker.close()
    return worker


def gaps(worker: SteppingWorker) -> tuple[float, float]:
    """Returns the number of gaps and their sum."""
    [family] = worker.metrics.step_gap.collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    return values["count"], values["sum"]


def test_the_device_always_has_the_next_step() -> None:
    device = Device()
    worker = decode_with(device, overlaps=True)
    assert {name: len(tokens) for name, tokens in worker.tokens.items()} == {"a0": 30, "b0": 15}
    events = device.events
    # Step 0 computes the prompts; what follows it depends on their tokens.
    assert all(events.index(("launched", n + 1)) < events.index(("ended", n)) for n in range(1, 29))
    assert gaps(worker) == (29, pytest.approx(0.001)), "only step 1 waits for the host"
    assert worker.loop.step_time_s == pytest.approx(STEP_S), "the time of one step, not of two"


def test_without_overlap_each_step_waits_for_the_one_before() -> None:
    device = Device()
    worker = decode_with(device, overlaps=False)
    events = device.events
    assert all(events.index(("launched", n + 1)) > events.index(("ended", n)) for n in range(29))
    assert {name: len(tokens) for name, tokens in worker.tokens.items()} == {"a0": 30, "b0": 15}


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("is_late", [False, True], ids=["at its launch", "at its end"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("a bug")], ids=["memory", "bug"])
def test_a_step_that_fails_takes_back_the_step_behind_it(error: Exception, is_late: bool, number: int) -> None:
    """Every request ends once, and all blocks are freed (`SteppingWorker.run`)."""
    worker = decode_with(Device((number, error), is_late), overlaps=True)
    assert worker.ended.keys() == {"a0", "b0"}
    is_retried = isinstance(error, torch.OutOfMemoryError) and number > 0  # prompts cannot get smaller here
    expected = {"length", "preempted"} if is_retried else {"internal_error"}
    assert set(worker.ended.values()) <= expected
    assert all(reason != "length" or len(worker.tokens[name]) in (15, 30) for name, reason in worker.ended.items())


def test_a_stop_token_is_seen_one_step_late_and_its_follower_dropped() -> None:
    device = Device()
    worker = SteppingWorker(lambda: device, True, clock=device.clock)
    worker.start("a", [1, 2, 3], GREEDY, StopConditions(30, frozenset({9}), min_tokens=0))
    worker.start("b", [1, 2, 3], GREEDY, StopConditions(8))
    worker.run()
    worker.close()
    assert [len(worker.tokens[name]) for name in ("a0", "b0")] == [1, 8]


def test_only_workers_on_gpus_overlap() -> None:
    assert may_overlap("cuda") and not may_overlap("cpu")
