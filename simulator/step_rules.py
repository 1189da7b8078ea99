"""Rules about the steps of one worker: which sequences take part in them, and what is cached when a prompt begins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from tandem.engine.batch import Batch
from tandem.prefill_worker.prompt import PrefillPrompt
from tandem.prefill_worker.step import AGING_S
from tandem.simulator.engine import NotedBlocks
from tandem.worker.worker_scheduler import WorkerScheduler

MAX_LATE_STEPS = 2
"""Steps by which a sequence may be late: others join or leave meanwhile."""


class StepRules:
    """Looks at each step of a worker before its results are known.

    name: of the worker. report(rule, details): called when a rule is broken. on_cached: called with an attempt and how
    many tokens of its prompt were cached when it began, in each of its steps; the first one counts.
    """

    def __init__(
        self,
        name: str,
        scheduler: Callable[[], WorkerScheduler],
        report: Callable[[str, str], None],
        on_cached: Callable[[str, int], object],
    ) -> None:
        self._name = name
        self._scheduler = scheduler
        self._report = report
        self._on_cached = on_cached
        self._could_compute: set[int] = set()
        """Numbers of the prompts with blocks that could take part in the next step when the last one ended."""
        self._num_cached: dict[str, int] = {}
        """Blocks of each prompt that are known to be cached, by transfer."""
        self._num_missed: Counter[int] = Counter()
        """Steps in a row, of others, since each running sequence could take part in one; by its object's id."""

    def on_step(self, batch: Batch) -> None:
        """The oldest step ends."""
        scheduler = self._scheduler()
        num_decoding = scheduler._steps[0].num_decoding
        for (prompt, _), item in zip(scheduler.prefill._step.chunks, batch.items[num_decoding:], strict=False):
            for attempt_id in prompt.request.attempt_ids:
                self._on_cached(attempt_id, item.start)
        self._check_cached(scheduler)
        self._check_shares(scheduler)
        if num_decoding:
            self._check_turns(scheduler)

    def _check_shares(self, scheduler: WorkerScheduler) -> None:
        """Short prompts pass long ones of their priority, except the one whose turn it is."""
        prefill = scheduler.prefill
        in_step = {prompt.number: prompt for prompt, _ in prefill._step.chunks}
        left_out = [
            prompt for prompt in prefill.prompts.computing.values()
            if prompt.number in self._could_compute and prompt.number not in in_step and not prompt.ended
        ]  # fmt: skip
        others = sorted(in_step.values(), key=_turn)[1:] if left_out and scheduler._isolation.is_over else []
        for prompt in others:
            for short in left_out:
                is_equal = short.request.priority == prompt.request.priority
                if is_equal and short.num_remaining_tokens < prompt.num_remaining_tokens:
                    transfers = f"{short.request.transfer_id} by {prompt.request.transfer_id}"
                    self._report("a short prompt is passed by a longer one", f"{self._name}: {transfers}")
        self._could_compute = {
            prompt.number for prompt in prefill.prompts.computing.values()
            if prompt.may_compute and prompt.request.num_prompt_logprobs is None
        }  # fmt: skip

    def _check_cached(self, scheduler: WorkerScheduler) -> None:
        """Full blocks of prompts are in the prefix cache once their step has ended, if none was ever evicted.

        An evicted one may have been the equal of a block that a prompt still holds.
        """
        blocks, num_before = scheduler.blocks, self._num_cached
        assert isinstance(blocks, NotedBlocks)
        self._num_cached = {}
        for transfer_id, prompt in scheduler.prefill.prompts.by_transfer.items() if not blocks.has_evicted else ():
            num = self._num_cached[transfer_id] = prompt.num_computed_tokens // blocks.block_size
            missing = prompt.hashes[num_before.get(transfer_id, 0) : num]
            if not prompt.ended and any(each not in blocks._by_hash for each in missing):
                self._report("computed blocks of a prompt are not cached", f"{self._name}: {transfer_id}")

    def _check_turns(self, scheduler: WorkerScheduler) -> None:
        """Sequences take turns if more of them run than one step takes."""
        running = scheduler.decode.running
        most = running._max_num_seqs
        if len(running.sequences) <= most or not scheduler._isolation.is_over:
            self._num_missed.clear()
            return
        in_step = set(map(id, running.steps[0].sequences))
        limit = math.ceil(len(running.sequences) / most) + MAX_LATE_STEPS
        num_missed: Counter[int] = Counter()
        for sequence in running.sequences:
            could = sequence.may_step and sequence.has_more_steps and not sequence.ended
            if could and id(sequence) not in in_step:
                num = num_missed[id(sequence)] = self._num_missed[id(sequence)] + 1
                if num > limit:
                    details = f"{self._name}: {sequence.attempt_id} in {num} steps, {len(running.sequences)} run"
                    self._report("a running sequence is left out of steps", details)
        self._num_missed = num_missed


def _turn(prompt: PrefillPrompt) -> tuple[float, int]:
    return prompt.arrived_at + AGING_S * prompt.request.priority, prompt.number
