"""Whether decode workers have room for more sequences: KV blocks, and places in their steps. Pure.

Prompts wait on prefill until decode has room for them, so a queue there may be decode's.
"""

from __future__ import annotations

from tandem.deploy.diagnosis.observation import Observation, ObservedWorker

_SEQUENCES_TO_SPARE = 1.5
"""A worker whose free blocks hold fewer sequences of the present size than this lacks blocks."""


def num_places(worker: ObservedWorker) -> int:
    """Returns the limit on a decode worker's sequences if it has reached it, or 0.

    The limit is not reported. It has been reached if the number of running sequences never changes while others wait.
    """
    running = {min(load.num_decoding, load.num_running) for load in worker.loads}
    waiting = min(load.num_decoding - load.num_running for load in worker.loads)
    if worker.info.role == "any" or len(running) > 1 or waiting < 1 or lacks_blocks(worker):
        return 0
    return running.pop()


def lacks_blocks(worker: ObservedWorker) -> bool:
    """Whether the blocks that are free do not hold another sequence like those that run."""
    used = worker.load.num_blocks - worker.mean("num_free_blocks")
    per_sequence = used / max(1.0, worker.mean_sequences)
    return worker.mean_sequences >= 1 and worker.mean("num_free_blocks") < _SEQUENCES_TO_SPARE * per_sequence


def is_full(observation: Observation) -> bool:
    """Whether prompts wait because no decode worker has room for them."""
    decodes = observation.decode_workers
    waiting = sum(worker.mean("num_decoding") - worker.mean_sequences for worker in decodes)
    return waiting >= 1 and all(num_places(worker) or lacks_blocks(worker) for worker in decodes)
