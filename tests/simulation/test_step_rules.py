"""Rules of `simulator.step_rules`: turns of running sequences, and what is cached when prompts begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.batch import Batch
from tandem.simulator.engine import NotedBlocks, Pool
from tandem.simulator.scenario import ClusterShape, cluster_config
from tandem.simulator.step_rules import MAX_LATE_STEPS, StepRules

SHAPE = ClusterShape(cluster_config(prefill=1, decode=1), num_blocks=8, block_size=2)


class World:
    """A worker with four running sequences, two of which fit into a step."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self.num_cached_tokens: dict[str, int] = {}
        self.prompts: dict[str, Any] = {}
        self.computing: dict[int, Any] = {}
        pools = [Pool(8, 2)]
        self.blocks = NotedBlocks(
            "worker-0", SHAPE, lambda *_: None, pools, lambda *_: None, lambda: 4, self.rules.append
        )
        self.sequences = [
            SimpleNamespace(
                attempt_id=str(number), may_step=True, has_more_steps=True, ended=False, output_token_ids=[]
            )
            for number in range(4)
        ]
        self.running = SimpleNamespace(sequences=self.sequences, _max_num_seqs=2, steps=[])
        self.scheduler: Any = SimpleNamespace(
            decode=SimpleNamespace(running=self.running),
            prefill=SimpleNamespace(
                _step=SimpleNamespace(chunks=[]),
                prompts=SimpleNamespace(by_transfer=self.prompts, computing=self.computing),
            ),
            blocks=self.blocks,
            _isolation=SimpleNamespace(is_over=True),
            _steps=[SimpleNamespace(num_decoding=2)],
        )
        self.of_worker = StepRules("worker-0", lambda: self.scheduler, self.report, self.num_cached_tokens.setdefault)

    def report(self, rule: str, details: str) -> None:
        self.rules.append(rule)

    def step(self, *numbers: int) -> None:
        self.running.steps = [SimpleNamespace(sequences=[self.sequences[number] for number in numbers])]
        self.of_worker.on_step(Batch([]))


@pytest.fixture
def world() -> World:
    return World()


def test_sequences_take_turns(world: World) -> None:
    for _ in range(10):
        world.step(0, 1)
        world.step(2, 3)
    assert not world.rules


def test_a_sequence_that_is_left_out_is_reported(world: World) -> None:
    for number in range(3 + MAX_LATE_STEPS):
        assert not world.rules, number
        world.step(0, 1 + number % 2)
    assert world.rules == ["a running sequence is left out of steps"]


def test_a_sequence_that_waits_for_its_grammar_has_no_turn(world: World) -> None:
    world.sequences[3].may_step = False
    for _ in range(10):
        world.step(0, 1)
        world.step(0, 2)
    assert not world.rules


def test_computed_blocks_have_to_be_cached_unless_one_was_evicted(world: World) -> None:
    prompt = SimpleNamespace(hashes=[b"one", b"two", b"three"], num_computed_tokens=5, ended=False)
    world.prompts["t"] = prompt
    for block_id, block_hash in zip(world.blocks.allocate(2), (b"one", b"two"), strict=True):
        world.blocks.publish(block_id, block_hash)
    world.step(0, 1)
    assert not world.rules
    prompt.num_computed_tokens = 6
    world.blocks.has_evicted = True
    world.step(2, 3)
    assert not world.rules
    world.blocks.has_evicted = False
    world.step(0, 1)
    assert world.rules == ["computed blocks of a prompt are not cached"]


def test_new_prompts_leave_a_block_for_each_running_sequence(world: World) -> None:
    world.blocks.num_free_without([])
    world.blocks.allocate(4)
    assert not world.rules
    assert world.blocks.can_allocate(1)
    world.blocks.allocate(1)
    assert not world.rules, "a running sequence grows"
    world.blocks.num_free_without([])
    world.blocks.allocate(1)
    assert world.rules == ["worker-0: 2 blocks are left for 4 sequences"]


def test_short_prompts_pass_long_ones_but_not_the_one_whose_turn_it_is(world: World) -> None:
    world.scheduler._steps[0].num_decoding = 0
    for number, num_tokens in enumerate([90, 50, 8]):
        world.computing[number] = SimpleNamespace(
            number=number,
            arrived_at=0.0,
            ended=False,
            may_compute=number < 2,
            num_remaining_tokens=num_tokens,
            request=SimpleNamespace(attempt_ids=[], priority=0, num_prompt_logprobs=None, transfer_id=str(number)),
        )
    for _ in range(3):  # its adapter is loaded after the second step has begun
        assert not world.rules
        world.scheduler.prefill._step.chunks[:] = [(world.computing[number], 4) for number in (0, 1)]
        world.of_worker.on_step(Batch([SimpleNamespace(start=0)] * 2))  # type: ignore[list-item]
        world.computing[2].may_compute = True
    assert world.rules == ["a short prompt is passed by a longer one"]


def test_the_first_chunk_of_a_prompt_shows_what_was_cached(world: World) -> None:
    prompt = SimpleNamespace(number=0, arrived_at=0.0, request=SimpleNamespace(attempt_ids=["a", "b"], priority=0))
    world.scheduler.prefill._step.chunks.append((prompt, 8))
    world.scheduler._steps[0].num_decoding = 0
    for start in (16, 24):
        world.of_worker.on_step(Batch([SimpleNamespace(start=start)]))  # type: ignore[list-item]
    assert world.num_cached_tokens == {"a": 16, "b": 16}
