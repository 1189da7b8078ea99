"""How long a device waits for the host between decode steps, with steps that overlap and without.

    python -m bench.step_gap [--quick] [--json FILE]

The scheduler, the step loop and the engine thread are real, and so is what the host computes of a step: indices and
sampling parameters. The device is simulated: a step takes 5 ms of sleep. Copies, kernel launches, sockets and the
router's messages are missing, so a real gap without overlap is longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.support.report import Report, finish, new_parser, print_rows
from tandem.engine.attention.step_index import StepIndex
from tandem.engine.batch import Batch, ItemOutput
from tandem.engine.cuda.step_tensors import flat_on_host
from tandem.engine.sampling.sampler import SamplingStep
from tandem.engine.steps.launched_step import LaunchedStep, Sampling, are_samples_known, samples_after
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, StopConditions
from tests.support.steps import SteppingWorker

STEP_S = 0.005
BLOCK_SIZE = 64
NUM_PROMPT_TOKENS = 1024
VOCAB_SIZE = 128_256
SAMPLINGS = {
    "top_p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5),
}
"""Penalties need the token of the step before, so the host prepares their sampling while the model computes."""


class SleepingDevice:
    """Runs steps one after the other. Steps with prompt tokens take no time."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._free_at = 0.0

    def warm_up(self) -> None: ...

    def wait(self) -> None: ...

    def run(self, batch: Batch) -> list[ItemOutput]:
        return self.launch(batch).result()

    def launch(self, batch: Batch, before: LaunchedStep | None = None) -> LaunchedStep:
        flat_on_host(StepIndex.of(batch.items, BLOCK_SIZE))
        is_decode = all(len(item.token_ids) == 1 for item in batch.items)
        ends_at = self._free_at = max(time.perf_counter(), self._free_at) + STEP_S * is_decode
        numbers = [len(item.samples) for item in batch.items]

        def wait() -> None:
            time.sleep(max(0.0, ends_at - time.perf_counter()))

        def sample(outputs_before: Sequence[ItemOutput]) -> Sampling:
            samples = samples_after(batch.items, outputs_before)
            SamplingStep(samples, [item.start + 1 for item in batch.items for _ in item.samples], VOCAB_SIZE)
            return None, lambda tokens: [ItemOutput([SampledToken(9)] * number) for number in numbers]

        return LaunchedStep(sample([]) if are_samples_known(batch.items) else sample, wait)


def measure(num_sequences: int, num_tokens: int, sampling: SamplingParams, overlaps: bool) -> float:
    """Returns the milliseconds of a decode step."""
    num_blocks = num_sequences * (NUM_PROMPT_TOKENS // BLOCK_SIZE + 4)
    worker = SteppingWorker(
        SleepingDevice, overlaps, num_blocks, BLOCK_SIZE, max_num_batched_tokens=1 << 20, max_num_seqs=256
    )
    for number in range(num_sequences):
        token_ids = [number * NUM_PROMPT_TOKENS + i for i in range(NUM_PROMPT_TOKENS)]
        worker.start(f"{number}-", token_ids, sampling, StopConditions(num_tokens))
    worker.scheduler.on_tick(0.0)
    steps: list[float] = []
    worker.on_message = lambda message: steps.append(time.perf_counter())
    worker.run()
    worker.close()
    steps = steps[num_sequences + 10 :]  # first tokens, and the first steps
    return (steps[-1] - steps[0]) / (len(steps) - 1) * 1000


def main() -> None:
    options = new_parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for name, sampling in SAMPLINGS.items():
        for num_sequences in (1, 16, 64, 256):
            rows.append({"sampling": name, "sequences": num_sequences})
            for how, overlaps in (("without overlap", False), ("with overlap", True)):
                ms = measure(num_sequences, 60 if options.quick else 150, sampling, overlaps)
                rows[-1] |= {f"ms a step, {how}": ms, f"gap ms, {how}": ms - 1000 * STEP_S}
    print_rows(rows)
    finish(Report.of("step_gap", {"rows": rows}), options.json)


if __name__ == "__main__":
    main()
