"""Steps that overlap: the same tokens as without, no gap, and no request lost when a step fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sampling.grammar import TOO_SLOW, Grammar, MaskProcess, MaskRequest
from tandem.engine.sampling.grammar_messages import Mask
from tandem.engine.steps.launched_step import LaunchedStep
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions, Thinking
from tandem.runtime.errors import ErrorInfo
from tandem.worker.engine_loading import may_overlap
from tests.support.steps import SteppingWorker

VOCAB_SIZE = 5000  # top_p has fewer candidates than that, and its rows may need more
GREEDY = SamplingParams(temperature=0.0)
FEW = tuple(range(200, 224))
"""Of few tokens some come again, unless that is prevented."""
PENALISED = SamplingParams(temperature=0.8, allowed_token_ids=FEW, repetition_penalty=1.5, presence_penalty=50.0)
THINKING = Thinking(True, (7,), (8,), (11, 12), max_tokens=3)
WITHOUT_PAIRS = SamplingParams(
    temperature=0.0, allowed_token_ids=FEW, bad_words=tuple((one, two) for one in FEW for two in FEW if two < one)
)
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


class ScriptedMasks:
    """A grammar's process: the tokens so far decide which third of the vocabulary may follow. Nothing follows a stop.

    longest: number of tokens behind which its mask takes too long. late_share: of the masks, which come later.
    """

    def __init__(self, longest: int = 1000, late_share: float = 0.0) -> None:
        self._longest = longest
        self._late_share = late_share
        self._draw = random.Random(5)
        self._tokens: dict[int, list[int]] = {}
        self._masks: list[Mask] = []
        self.num_late = 0

    def send(
        self, requests: Sequence[MaskRequest], ended_state_ids: list[int], timeout_s: float, budget_s: float
    ) -> None:
        for request in requests:
            fill = request.state.request(request, 1)
            tokens = self._tokens.setdefault(fill.state_id, [])
            tokens += fill.token_ids
            if self._draw.random() < self._late_share:
                self._masks.append(Mask(is_late=True))
            elif len(tokens) >= self._longest:
                self.num_late += 1
                self._masks.append(Mask(error=ErrorInfo.of(TOO_SLOW)))
            else:
                self._masks.append(Mask(error=A_STOP) if any(map(is_stop, tokens)) else Mask(bits_after(tokens)))

    def receive(self, timeout_s: float) -> Mask:
        return self._masks.pop(0)

    def close(self) -> None: ...


A_STOP = ErrorInfo("invalid_request", "nothing follows a stop token")


def is_stop(token_id: int) -> bool:
    return token_id % 37 == 0


def may_follow(tokens: Sequence[int], token_id: int) -> bool:
    return token_id % 3 == (sum(tokens) + len(tokens)) % 3


def bits_after(tokens: Sequence[int]) -> bytes:
    allowed = np.arange(-(-VOCAB_SIZE // 32) * 32) % 3 == (sum(tokens) + len(tokens)) % 3
    return np.packbits(allowed, bitorder="little").tobytes()


def new_grammar(masks: ScriptedMasks | None = None) -> Grammar:
    compiled: Future[MaskProcess] = Future()
    compiled.set_result(masks or ScriptedMasks())
    return Grammar(compiled)


def serve(
    runner: ModelRunner, samplings: list[SamplingParams], overlaps: bool, late_share: float = 0.0
) -> SteppingWorker:
    """Requests of several lengths, one with two sequences; a second wave arrives while the first one decodes.

    One request is aborted after two tokens.
    """
    worker = SteppingWorker(lambda: runner, overlaps)

    def start(name: str, number: int, seeds: tuple[int, ...] = (0,)) -> None:
        stop = StopConditions(6 + number, frozenset(range(0, VOCAB_SIZE, 37)), min_tokens=3)
        sampling = samplings[number % len(samplings)]
        tokens, grammar = (
            list(range(3, 9 + 7 * number)),
            new_grammar(ScriptedMasks(late_share=late_share)) if sampling.grammar else None,
        )
        worker.start(name, tokens, sampling, stop, tuple(seed + number for seed in seeds), grammar)

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
        [PENALISED, GREEDY],
        [SamplingParams(top_p=0.9999, temperature=3.0, frequency_penalty=1.5), PENALISED],
        [SamplingParams(temperature=0.8, grammar="scripted"), SamplingParams(temperature=0.0, grammar="scripted")],
        [SamplingParams(temperature=0.0, thinking=THINKING)],
        [WITHOUT_PAIRS],
    ],
    ids=["greedy", "plain", "filters", "too few candidates", "penalties", "candidates and penalties", "grammars",
         "thinking", "bad words"],
)  # fmt: skip


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
    if samplings[0].grammar is not None:
        for tokens in found.tokens.values():
            token_ids = [token.token_id for token in tokens]
            assert all(may_follow(token_ids[:n], token_ids[n]) for n in range(len(token_ids)))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("late_share", [0.2, 0.8])
def test_sequences_whose_masks_are_late_get_the_same_tokens(
    engine: tuple[LoadedModel, EngineConfig], overlaps: bool, late_share: float
) -> None:
    """Their first tokens and later ones, of one sequence and of several, beside some without a grammar."""
    loaded, config = engine
    runner = CountingRunner(loaded, KVPool(loaded, config))
    samplings = [SamplingParams(temperature=0.8, grammar="scripted"), GREEDY]
    expected = serve(runner, samplings, overlaps=False)
    found = serve(runner, samplings, overlaps, late_share)
    assert found.ended == expected.ended
    for name, tokens in expected.tokens.items():
        assert [each.token_id for each in found.tokens[name]] == [each.token_id for each in tokens]


def test_a_grammar_that_fails_ends_its_sequence_and_is_asked_no_more(
    engine: tuple[LoadedModel, EngineConfig],
) -> None:
    """Its process has been replaced then, which costs the other sequences of a grammar time."""
    loaded, config = engine
    masks = ScriptedMasks(longest=4)
    runner = CountingRunner(loaded, KVPool(loaded, config))
    worker = SteppingWorker(lambda: runner, overlaps=True)
    sampling = SamplingParams(temperature=0.0, grammar="scripted")
    worker.start("a", [1, 2, 3], sampling, StopConditions(9), grammar=new_grammar(masks))
    worker.start("b", [1, 2, 3], sampling, StopConditions(9), grammar=new_grammar())
    worker.run()
    worker.close()
    assert worker.ended == {"a0": "invalid_request", "b0": "length"} and runner.num_following > 8
    assert len(worker.tokens["a0"]) == 4 and masks.num_late == 1


FailsAt = Literal["its launch", "its sampling", "its end"]


class Device:
    """Runs steps one after the other, STEP_S each, in virtual time; the host needs 1 ms to launch a step.

    fails: (number of a launched step, an error), which its launch raises, its sampling or its end.
    """

    device = torch.device("cpu")
    why_lost = ModelRunner.why_lost

    def __init__(self, fails: tuple[int, Exception] | None = None, at: FailsAt = "its launch") -> None:
        self.now = self.free_at = 0.0
        self.events: list[tuple[str, int]] = []
        self._fails = fails
        self._fails_at = at
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
        fails_at = self._fails_at if before is not None or self._fails_at != "its sampling" else "its launch"
        if fails and fails_at == "its launch":
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

        def sample(before: Sequence[ItemOutput]) -> Any:
            raise self._fails[1]  # type: ignore[index]

        return LaunchedStep(sample if fails and fails_at == "its sampling" else (None, lambda tokens: outputs), wait)


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
    assert worker.scheduler.step_times.gap_s == pytest.approx(0.001 / 29, rel=0.1)


def test_without_overlap_each_step_waits_for_the_one_before() -> None:
    device = Device()
    worker = decode_with(device, overlaps=False)
    events = device.events
    assert all(events.index(("launched", n + 1)) > events.index(("ended", n)) for n in range(29))
    assert {name: len(tokens) for name, tokens in worker.tokens.items()} == {"a0": 30, "b0": 15}


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("at", ["its launch", "its sampling", "its end"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("a bug")], ids=["memory", "bug"])
def test_a_step_that_fails_takes_back_the_step_behind_it(error: Exception, at: FailsAt, number: int) -> None:
    """Every request ends once, and all blocks are freed (`SteppingWorker.run`)."""
    worker = decode_with(Device((number, error), at), overlaps=True)
    assert worker.ended.keys() == {"a0", "b0"}
    expected = {"length"}  # none of them fails alone, nor prompts, which cannot get smaller here
    if isinstance(error, torch.OutOfMemoryError) and number:
        expected.add("preempted")
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
